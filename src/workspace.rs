//! The memory a step works in: a control block of counters, then scratch.
//!
//! One function, [`Layout::carve`], walks the regions of a plan. [`Layout::measure`] runs it over no
//! memory to size a workspace and a call runs it over a real one, so the two cannot disagree.
//!
//! Scratch need not survive between calls, may hold anything before one, and may be shared by all
//! layers on one stream. The control block is not scratch: it is zeroed when the workspace is made, left
//! zero by every call, and never shared by two streams at once.
#![allow(unsafe_code)]

use crate::backend::cuda::model as m;
use crate::error::{Error, Result};
use crate::plan::{AttentionEngine, Plan, RouterForm};
use crate::scheduler::SchedulerMetadata;
use crate::stack::StackPlan;
use crate::tensor::{DType, DeviceTensor};

/// Words of the control block: counters, the word for the pooler, then the flags of the experts' `carry`, one an SM.
#[doc(hidden)]
pub const CONTROL_WORDS: usize = 256;
/// The first of those flags.
pub(crate) const CARRY_FLAGS: u32 = 64;
/// The word by which the router lets the pooler go on.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) const READY_WORD: u32 = 32;
/// Bytes of the control block.
#[doc(hidden)]
pub const CONTROL_BYTES: u64 = 4 * CONTROL_WORDS as u64;
/// Alignment of a workspace and of every region in it.
pub const ALIGNMENT: u64 = 256;

/// Hands out consecutive regions. Over address 0 it only measures.
struct Carver {
    at: u64,
    regions: Option<Vec<Region>>,
}

/// A region of a workspace, by name: for tests and for printing.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// What it holds.
    pub name: &'static str,
    /// First byte in the workspace.
    pub begin: u64,
    /// Its size.
    pub bytes: u64,
}

impl Carver {
    fn take(&mut self, name: &'static str, element: u64, extents: &[u64]) -> u64 {
        let bytes = element * extents.iter().product::<u64>();
        let begin = self.at;
        self.at = (begin + bytes).next_multiple_of(ALIGNMENT);
        if let Some(regions) = &mut self.regions {
            regions.push(Region { name, begin, bytes });
        }
        begin
    }
}

/// Device addresses of a call's scratch, named as the fields of `csrc/include/params.h` that use them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// u32 `[256]`, zero before and after every call.
    pub control: u64,
    /// FP32 `[splits][T][2304]`.
    pub qkv: u64,
    /// FP16 `[T][16][64]`.
    pub q: u64,
    /// FP32 `[T][1024]` (not of a step whose attention is tiled).
    pub gate: u64,
    /// FP32 `[T][16][splits][64]` (split attention).
    pub acc: u64,
    /// FP32 `[T][16][splits][2]` (split attention).
    pub lse: u64,
    /// FP16 copies of the visible pages (tiled attention).
    pub kv_scratch: u64,
    /// E4M3 `[T][16][64]` (fa3).
    pub fa3_q: u64,
    /// BF16 `[T][1024]` (fa3).
    pub fa3_out: u64,
    /// FP32 `[16][T]` (fa3).
    pub fa3_lse: u64,
    /// FP32 `[splits][16][T]` (fa3, more than one split); `acc` is `[splits][16][T][64]` then.
    pub fa3_acc_lse: u64,
    /// Scheduler metadata (fa3), for calls that bring none.
    pub fa3_metadata: u64,
    /// BF16 `[T][1024]`.
    pub gated: u64,
    /// BF16 `[T][8192]`.
    pub attn_out: u64,
    /// FP32 `[T][8192]`.
    pub stream_after_attn: u64,
    /// BF16 `[T][planes][8192]`.
    pub ffn_input: u64,
    /// FP32 `[T]` (tiled router).
    pub ffn_factor: u64,
    /// FP32 `[splits][T][256]`; with the boundary folded in `[splits][2][256]`, then `[splits][4]`.
    pub logits: u64,
    /// FP32 `[T][8]`.
    pub topk_scores: u64,
    /// i32 `[33]`.
    pub expert_offsets: u64,
    /// i32 `[8 T]`.
    pub route_token: u64,
    /// i32 `[T][8]`.
    pub token_route: u64,
    /// u32 `[ceil(T / 32)][32]`.
    pub token_masks: u64,
    /// FP32 `[splits][T][4096]`.
    pub pooled: u64,
    /// BF16 `[route_bound][4096]`.
    pub x: u64,
    /// BF16 `[route_bound][4096]`.
    pub inter: u64,
    /// BF16 `[route_bound][4096]`, or FP32 `[splits][route_bound][4096]`.
    pub y: u64,
    /// FP32, what the experts' CTAs hand on: the plan's `carry_words`.
    pub carry: u64,
    /// FP32 `[T][4096]`, with more than one pass.
    pub accumulate: u64,
    /// BF16 `[T][4096]`.
    pub moe_mix: u64,
    /// FP32 `[splits][T][columns]`, or BF16 `[T][columns]`.
    pub unpooled: u64,
    /// FP32 `[8][T][1024]`, rank by rank (sliced unpooler).
    pub slices: u64,
    /// The first byte past the last region.
    pub end: u64,
}

impl Layout {
    /// The regions of `plan` from address `base` on.
    pub fn carve(plan: &Plan, base: u64) -> Layout {
        Layout::walk(plan, &mut Carver { at: base, regions: None })
    }

    /// Bytes that `plan` needs.
    pub fn measure(plan: &Plan) -> u64 {
        Layout::carve(plan, 0).end
    }

    /// Every region with its name.
    pub fn regions(plan: &Plan, base: u64) -> Vec<Region> {
        let mut carver = Carver { at: base, regions: Some(Vec::new()) };
        Layout::walk(plan, &mut carver);
        carver.regions.unwrap_or_default()
    }

    fn walk(plan: &Plan, c: &mut Carver) -> Layout {
        let l = &plan.launches;
        let t = plan.key.tokens as u64;
        let (hidden, q_size, heads) = (m::HIDDEN as u64, m::Q_SIZE as u64, m::Q_HEADS as u64);
        let (expert_dim, experts) = (m::EXPERT_DIM as u64, m::EXPERTS as u64);
        let (bound, passes) = (l.experts.route_bound as u64, l.experts.passes);
        let fa3 = u64::from(l.attention.engine == AttentionEngine::Fa3);
        let (split, tiled) = if l.attention.tiled { (0, 1) } else { (l.attention.splits as u64, 0) };
        let split = l.short_attention.as_ref().map_or(split, |short| split.max(short.splits as u64));
        let slice = m::UNPOOL_SLICE as u64;
        let (own_split, fa3_split) = if fa3 == 0 { (split, 0) } else { (0, if split > 1 { split } else { 0 }) };
        let y_f32 = l.experts.w2_splits > 1;
        // Some regions belong to one form of an operation only: an extent of 0 leaves them empty.
        let mut out = Layout {
            control: c.take("control", 4, &[CONTROL_WORDS as u64]),
            qkv: c.take("qkv", 4, &[l.qkv_gate.splits as u64, t, m::QKV_ROWS as u64]),
            q: c.take("q", 2, &[t, q_size]),
            gate: c.take("gate", 4, &[u64::from(plan.gate_apart()), t, q_size]),
            acc: c.take("acc", 4, &[t, heads, own_split + fa3_split, m::HEAD_DIM as u64]),
            lse: c.take("lse", 4, &[t, heads, own_split, 2]),
            kv_scratch: c.take("kv_scratch", 1, &[tiled, l.attention.kv_scratch_bytes]),
            fa3_q: c.take("fa3_q", 1, &[fa3, t, q_size]),
            fa3_out: c.take("fa3_out", 2, &[fa3, t, q_size]),
            fa3_lse: c.take("fa3_lse", 4, &[fa3, heads, t]),
            fa3_acc_lse: c.take("fa3_acc_lse", 4, &[fa3_split, heads, t]),
            fa3_metadata: c.take("fa3_metadata", 4, &[SchedulerMetadata::words(plan) as u64]),
            gated: c.take("gated", 2, &[t, q_size]),
            attn_out: c.take("attn_out", 2, &[t, hidden]),
            stream_after_attn: c.take("stream_after_attn", 4, &[t, hidden]),
            ffn_input: c.take("ffn_input", 2, &[t, plan.ffn_planes() as u64, hidden]),
            ffn_factor: c.take("ffn_factor", 4, &[u64::from(l.router.form == RouterForm::Tiled), t]),
            // With the boundary folded in, two rows and four sums.
            logits: c.take(
                "logits",
                4,
                &[l.router.splits as u64, t, if l.router.boundary { 2 * experts + 4 } else { experts }],
            ),
            topk_scores: c.take("topk_scores", 4, &[t, m::TOP_K as u64]),
            expert_offsets: c.take("expert_offsets", 4, &[m::LOCAL_EXPERTS as u64 + 1]),
            route_token: c.take("route_token", 4, &[t, m::TOP_K as u64]),
            token_route: c.take("token_route", 4, &[t, m::TOP_K as u64]),
            token_masks: c.take("token_masks", 4, &[t.div_ceil(32), m::LOCAL_EXPERTS as u64]),
            pooled: c.take("pooled", 4, &[l.pooler.splits as u64, t, expert_dim]),
            x: c.take("x", 2, &[bound, expert_dim]),
            inter: c.take("inter", 2, &[bound, expert_dim]),
            y: c.take("y", if y_f32 { 4 } else { 2 }, &[l.experts.w2_splits as u64, bound, expert_dim]),
            carry: c.take("carry", 4, &[l.experts.carry_words as u64]),
            accumulate: c.take("accumulate", 4, &[u64::from(passes > 1), t, expert_dim]),
            moe_mix: c.take("moe_mix", 2, &[t, expert_dim]),
            unpooled: c.take(
                "unpooled",
                if l.unpooler.out_f32 { 4 } else { 2 },
                &[l.unpooler.splits as u64, t, l.unpooler.rows as u64],
            ),
            slices: c.take("slices", 4, &[u64::from(l.unpooler.rows < m::HIDDEN), m::RANKS as u64, t, slice]),
            end: 0,
        };
        out.end = c.at;
        out
    }
}

/// What the layers of a stack hand on, behind the scratch of the largest of their plans: two of each, used in
/// turn, since a layer's outputs do not alias its inputs.
#[derive(Clone, Debug)]
pub(crate) struct Borders {
    /// BF16 `[T, 8192]`.
    pub hidden: [DeviceTensor; 2],
    /// FP32 `[T, 8192]`.
    pub stream: [DeviceTensor; 2],
    /// i32 `[T, 8]`, of a caller who does not want them.
    pub topk_ids: DeviceTensor,
    /// The first byte past them.
    pub end: u64,
}

impl Borders {
    fn carve(plan: &StackPlan, base: u64) -> Borders {
        let scratch = plan.plans.iter().map(Layout::measure).max().unwrap_or(0);
        let mut carver = Carver { at: base + scratch, regions: None };
        let mut take = |name: &'static str, dtype: DType, width: u32| {
            let shape = [plan.tokens() as usize, width as usize];
            let begin = carver.take(name, dtype.size() as u64, &[shape[0] as u64, shape[1] as u64]);
            // SAFETY: a region of the workspace, which the caller of a step keeps until its work is done.
            unsafe { DeviceTensor::contiguous(begin, dtype, &shape) }
        };
        Borders {
            hidden: [0, 1].map(|_| take("hidden", DType::Bf16, m::HIDDEN)),
            stream: [0, 1].map(|_| take("stream", DType::F32, m::HIDDEN)),
            topk_ids: take("topk_ids", DType::I32, m::TOP_K),
            end: carver.at,
        }
    }

    /// Bytes that a step of the stack needs, the layers' scratch included.
    pub fn measure(plan: &StackPlan) -> u64 {
        Borders::carve(plan, 0).end
    }
}

/// Device memory for the calls of one stream: the crate's own allocation or the caller's.
///
/// Dropping an owned workspace frees it: not before the work that uses it, graphs included, is done with.
#[derive(Debug)]
pub struct Workspace {
    base: u64,
    bytes: u64,
    device: i32,
    #[cfg(feature = "cuda")]
    _owner: Option<crate::backend::cuda::device::Buffer>,
}

impl Workspace {
    /// A workspace for backends that need none.
    pub(crate) fn none() -> Workspace {
        Workspace {
            base: 0,
            bytes: 0,
            device: -1,
            #[cfg(feature = "cuda")]
            _owner: None,
        }
    }

    /// Allocates `bytes` on the device and zeroes the control block. Synchronises; not for capture.
    #[cfg(feature = "cuda")]
    pub fn new(device: &crate::backend::cuda::Device, bytes: u64) -> Result<Workspace> {
        let buffer = device.allocate(bytes.max(CONTROL_BYTES))?;
        device.zero(buffer.ptr(), CONTROL_BYTES)?;
        Ok(Workspace {
            base: buffer.ptr(),
            bytes: bytes.max(CONTROL_BYTES),
            device: device.ordinal(),
            _owner: Some(buffer),
        })
    }

    /// Takes the caller's memory and zeroes the control block at its start. Synchronises; not for capture.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` must be memory of the device that nothing else uses while this workspace lives
    /// and while work that used it is queued or captured.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_raw(device: &crate::backend::cuda::Device, ptr: u64, bytes: u64) -> Result<Workspace> {
        if ptr == 0 {
            return Err(Error::Null { tensor: "workspace".into() });
        }
        if ptr % ALIGNMENT != 0 {
            return Err(Error::Alignment { tensor: "workspace".into(), wanted: ALIGNMENT as usize, got: ptr });
        }
        if bytes < CONTROL_BYTES {
            return Err(too_small(CONTROL_BYTES, bytes));
        }
        device.zero(ptr, CONTROL_BYTES)?;
        Ok(Workspace { base: ptr, bytes, device: device.ordinal(), _owner: None })
    }

    /// Fills the scratch (not the control block) with 0xFF, NaN in every floating-point type: for tests.
    /// Synchronises.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    pub fn poison(&mut self, device: &crate::backend::cuda::Device) -> Result<()> {
        if device.ordinal() != self.device {
            return Err(Error::Device { tensor: "workspace".into(), wanted: self.device, got: device.ordinal() });
        }
        device.fill(self.base + CONTROL_BYTES, 0xFF, self.bytes - CONTROL_BYTES)
    }

    /// The control block's words, all zero between calls: for tests. Synchronises.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    pub fn control(&self, device: &crate::backend::cuda::Device) -> Result<[u32; CONTROL_WORDS]> {
        let mut bytes = [0; CONTROL_BYTES as usize];
        device.read(self.base, &mut bytes)?;
        Ok(std::array::from_fn(|i| {
            u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
        }))
    }

    /// Address of the workspace: the control block, then scratch from [`CONTROL_BYTES`] on.
    pub fn ptr(&self) -> u64 {
        self.base
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device it lives on; -1 for the CPU backend.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// The regions of `plan` in this workspace.
    #[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code))]
    pub(crate) fn layout(&self, plan: &Plan) -> Result<Layout> {
        // Measured here again: a plan is plain data that anyone may have written.
        let layout = Layout::carve(plan, self.base);
        let wanted = layout.end - self.base;
        if self.bytes < wanted {
            return Err(too_small(wanted, self.bytes));
        }
        Ok(layout)
    }

    /// What a stack's layers hand on, in this workspace.
    pub(crate) fn borders(&self, plan: &StackPlan) -> Result<Borders> {
        let borders = Borders::carve(plan, self.base);
        let wanted = borders.end - self.base;
        if self.bytes < wanted {
            return Err(too_small(wanted, self.bytes));
        }
        Ok(borders)
    }
}

fn too_small(wanted: u64, got: u64) -> Error {
    Error::Value { what: "workspace".into(), wanted: format!("at least {wanted} bytes"), got: format!("{got} bytes") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LayerKind, Taps, WeightKind};
    use crate::plan::{PlanKey, ShortRequests};

    fn plans() -> Vec<Plan> {
        let mut plans = Vec::new();
        for tokens in [0, 1, 7, 8, 9, 33, 64, 65, 255, 1024, 1025, 8192, 16384] {
            for (q_len, kind) in [(1, LayerKind::Full), (tokens, LayerKind::Sliding)] {
                let requests = if q_len == 1 { tokens } else { 1 };
                let key = PlanKey { tokens, kind, max_q_len: q_len.min(tokens), ..PlanKey::decode(requests, 4000) };
                plans.push(Plan::new(key, WeightKind::Nvfp4, 132).unwrap());
            }
            if tokens > 64 {
                let short = Some(ShortRequests { requests: 9, tokens: 40, max_q_len: 8 });
                let key = PlanKey { tokens, max_q_len: tokens, short, ..PlanKey::decode(12, 4000) };
                plans.push(Plan::new(key, WeightKind::Nvfp4, 132).unwrap());
            }
        }
        plans
    }

    #[test]
    fn regions_are_aligned_and_do_not_overlap() {
        for plan in plans() {
            let base = 3 << 40;
            let regions = Layout::regions(&plan, base);
            let mut at = base;
            for r in &regions {
                assert!(r.begin % ALIGNMENT == 0 && r.begin >= at, "{}: {r:?} begins before {at}", plan.key.tokens);
                at = r.begin + r.bytes;
            }
            assert_eq!(regions[0].bytes, CONTROL_BYTES);
            assert!(at <= base + plan.workspace_bytes, "{plan}");
            assert!(base + plan.workspace_bytes - at < ALIGNMENT, "what is measured is what is carved");
        }
    }

    #[test]
    fn regions_hold_what_the_kernels_write() {
        for plan in plans() {
            let bytes =
                |name: &str| Layout::regions(&plan, 0).iter().find(|r| r.name == name).map(|r| r.bytes).unwrap();
            let (t, l) = (plan.key.tokens as u64, &plan.launches);
            assert_eq!(bytes("qkv"), l.qkv_gate.splits as u64 * t * 2304 * 4);
            let planes = if (t > 5 || t == 1) && plan.key.taps == Taps::None { 1 } else { 3 };
            assert_eq!(bytes("ffn_input"), t * planes * 8192 * 2);
            assert_eq!(bytes("ffn_factor"), if t > 5 { t * 4 } else { 0 });
            let split = !l.attention.tiled || l.short_attention.is_some();
            assert_eq!(bytes("acc") + bytes("lse") > 0, split && t > 0);
            assert_eq!(bytes("gate"), if split { t * 4096 } else { 0 });
            assert_eq!(bytes("carry"), l.experts.carry_words as u64 * 4);
            assert_eq!(bytes("accumulate") > 0, l.experts.passes > 1);
            assert_eq!(
                bytes("slices"),
                if t <= 8 { t * 8192 * 4 } else { 0 },
                "every rank's slice of the sliced unpooler"
            );
            assert_eq!(bytes("y"), l.experts.route_bound as u64 * 4096 * if l.experts.w2_splits > 1 { 8 } else { 2 });
        }
    }

    #[test]
    fn a_stack_hands_on_behind_every_plan_s_scratch() {
        for plan in plans() {
            let smaller = Plan::new(PlanKey::decode(1, 8), WeightKind::Nvfp4, 132).unwrap();
            let stack = StackPlan { plans: vec![plan.clone(), smaller], of_layer: vec![0, 1], workspace_bytes: 0 };
            let base = 3 << 40;
            let b = Borders::carve(&stack, base);
            let t = plan.key.tokens as u64;
            let mut at = base + plan.workspace_bytes;
            for (tensor, bytes) in b
                .hidden
                .iter()
                .map(|x| (x, t * 16384))
                .chain(b.stream.iter().map(|x| (x, t * 32768)))
                .chain([(&b.topk_ids, t * 32)])
            {
                assert!(tensor.ptr() >= at && tensor.ptr() % ALIGNMENT == 0, "{tensor:?} begins before {at}");
                assert_eq!(tensor.span_bytes(), bytes);
                at = tensor.ptr() + bytes;
            }
            assert!(at <= b.end && b.end - base == Borders::measure(&stack));
        }
    }

    #[test]
    fn a_workspace_that_is_too_small_is_refused() {
        let plan = &plans()[3];
        let text = Workspace::none().layout(plan).unwrap_err().to_string();
        assert!(text.starts_with("workspace: wanted at least"), "{text}");
    }
}
