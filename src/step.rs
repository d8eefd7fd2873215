//! A step's arguments in device memory, and every check of them that needs no device.
//!
//! Names and shapes are those of docs/glossary.md and of the reference. T tokens, B requests.

use crate::backend::cuda::model as m;
use crate::config::Taps;
use crate::error::{Error, Result};
use crate::kv_cache::PagedKvCache;
use crate::plan::{AttentionEngine, Plan};
use crate::scheduler::SchedulerMetadata;
use crate::tensor::{DType, DeviceTensor};

/// Inputs of the attention block.
#[derive(Clone, Debug)]
pub struct AttentionInput {
    /// BF16 `[T, 8192]`: the stream after the previous layer's norm.
    pub attn_input: DeviceTensor,
    /// i64 `[T]`: for RoPE only.
    pub positions: DeviceTensor,
    /// i64 `[T]`: flat cache row of each new token; below 0: not stored.
    pub cache_loc: DeviceTensor,
    /// i32 `[B + 1]`: the only truth on query lengths.
    pub cu_seqlens_q: DeviceTensor,
    /// i32 `[B]`: lengths, new tokens included.
    pub cache_seqlens: DeviceTensor,
    /// i32 `[B, table_width]`, any row stride.
    pub page_table: DeviceTensor,
    /// f32 `[1]`.
    pub k_scale: DeviceTensor,
    /// f32 `[1]`.
    pub v_scale: DeviceTensor,
    /// Read, and written at the step's own rows.
    pub cache: PagedKvCache,
    /// The engine fa3's tile schedule, shared by layers of a kind; `None`: prepared by the call.
    pub scheduler_metadata: Option<SchedulerMetadata>,
}

/// Inputs of the boundary and the MoE block.
#[derive(Clone, Debug)]
pub struct MoeInput {
    /// FP32 `[T, 8192]`: the residual stream.
    pub stream: DeviceTensor,
    /// BF16 `[T, 8192]`: `attn_out`, summed over the ranks.
    pub attn_out: DeviceTensor,
    /// i32 `[1]`: the first expert of this rank.
    pub local_start: DeviceTensor,
    /// i32 `[1]`: tokens from this one on are padding and take no route here.
    pub num_tokens_non_padded: Option<DeviceTensor>,
}

/// Outputs of the boundary and the MoE block.
#[derive(Clone, Debug)]
pub struct MoeOutput {
    /// FP32 `[T, 8192]`.
    pub stream_after_attn: DeviceTensor,
    /// i32 `[T, 8]`, by descending biased score.
    pub topk_ids: DeviceTensor,
    /// BF16 `[T, 4096]`: this rank's partial.
    pub moe_mix: DeviceTensor,
}

/// Inputs of the unpooler and the final boundary.
#[derive(Clone, Debug)]
pub struct FinalInput {
    /// FP32 `[T, 8192]`.
    pub stream_after_attn: DeviceTensor,
    /// BF16 `[T, 4096]`, summed over the ranks.
    pub moe_mix: DeviceTensor,
}

/// Inputs of the final boundary behind a gather (up to 8 tokens).
#[derive(Clone, Debug)]
pub struct FfnInput {
    /// FP32 `[T, 8192]`.
    pub stream_after_attn: DeviceTensor,
    /// FP32 `[ranks, T, 1024]`: the ranks' slices. Columns past the last one are zeros.
    pub slices: DeviceTensor,
}

/// Outputs of the unpooler and the final boundary.
#[derive(Clone, Debug)]
pub struct FinalOutput {
    /// BF16 `[T, 8192]`: the next layer's attention input; `None` only without a next layer's norm.
    pub hidden: Option<DeviceTensor>,
    /// FP32 `[T, 8192]`.
    pub stream: DeviceTensor,
}

/// A whole step's inputs.
#[derive(Clone, Debug)]
pub struct DeviceInput {
    /// The first segment's inputs.
    pub attention: AttentionInput,
    /// FP32 `[T, 8192]`: the residual stream.
    pub stream: DeviceTensor,
    /// i32 `[1]`: the first expert of this rank.
    pub local_start: DeviceTensor,
    /// i32 `[1]` or absent.
    pub num_tokens_non_padded: Option<DeviceTensor>,
}

/// A whole step's outputs.
#[derive(Clone, Debug)]
pub struct DeviceOutput {
    /// BF16 `[T, 8192]`; `None` only without a next layer's norm.
    pub hidden: Option<DeviceTensor>,
    /// FP32 `[T, 8192]`.
    pub stream: DeviceTensor,
    /// i32 `[T, 8]`.
    pub topk_ids: DeviceTensor,
    /// Intermediate results wanted; needs a plan with [`Taps::All`].
    pub taps: DeviceTaps,
}

macro_rules! taps {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $dtype:ident, [$($extent:expr),*];)*) => {
        /// Intermediate results a step can keep.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Tap { $($(#[$doc])* $variant),* }

        impl Tap {
            /// Every tap, in the order of the dataflow.
            pub const ALL: &'static [Tap] = &[$(Tap::$variant),*];

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Tap::$variant => $name),* }
            }

            /// Its element type.
            pub const fn dtype(self) -> DType {
                match self { $(Tap::$variant => DType::$dtype),* }
            }

            /// Its shape in a step of `tokens` tokens.
            pub fn shape(self, tokens: usize) -> Vec<usize> {
                match self { $(Tap::$variant => vec![tokens $(, $extent as usize)*]),* }
            }
        }
    };
}

taps! {
    /// FP32 `[T, 1024]`: attention before the output norm.
    AttnCore = "attn_core", F32, [m::Q_SIZE];
    /// BF16 `[T, 8192]`: after `o`.
    AttnOut = "attn_out", Bf16, [m::HIDDEN];
    /// FP32 `[T, 8192]`: the stream after the first boundary.
    StreamAfterAttn = "stream_after_attn", F32, [m::HIDDEN];
    /// BF16 `[T, 3, 8192]`: three planes whose sum is the input of router and pooler.
    FfnInput = "ffn_input", Bf16, [3, m::HIDDEN];
    /// FP32 `[T, 256]`: before the multiplier.
    RouterLogits = "router_logits", F32, [m::EXPERTS];
    /// FP32 `[T, 8]`: the normalised weights.
    TopkScores = "topk_scores", F32, [m::TOP_K];
    /// FP32 `[T, 4096]`: after `pre_expert_norm`.
    ExpertInput = "expert_input", F32, [m::EXPERT_DIM];
    /// BF16 `[T, 4096]`: the weighted sum of this rank's experts.
    MoeMix = "moe_mix", Bf16, [m::EXPERT_DIM];
    /// FP32 `[T, 8192]`: before `post_ffn_norm`, zeros outside the slice.
    FfnOut = "ffn_out", F32, [m::HIDDEN];
}

impl std::str::FromStr for Tap {
    type Err = Error;
    fn from_str(name: &str) -> Result<Tap> {
        Tap::ALL.iter().copied().find(|t| t.name() == name).ok_or_else(|| Error::Value {
            what: "tap".into(),
            wanted: Tap::ALL.iter().map(|t| t.name()).collect::<Vec<_>>().join(", "),
            got: name.into(),
        })
    }
}

/// Where a step puts the intermediate results that are wanted.
#[derive(Clone, Debug, Default)]
pub struct DeviceTaps([Option<DeviceTensor>; 9]);

impl DeviceTaps {
    /// Asks for one.
    pub fn set(&mut self, tap: Tap, tensor: DeviceTensor) {
        self.0[tap as usize] = Some(tensor);
    }

    /// The tensor asked for.
    pub fn get(&self, tap: Tap) -> Option<&DeviceTensor> {
        self.0[tap as usize].as_ref()
    }

    fn iter(&self) -> impl Iterator<Item = (Tap, &DeviceTensor)> {
        Tap::ALL.iter().filter_map(|&t| self.get(t).map(|x| (t, x)))
    }
}

/// The tensors of a call, by name, after every check that needs no device. Inputs may overlap each other,
/// outputs nothing.
#[doc(hidden)]
pub struct Checked<'a> {
    inputs: [Option<(&'static str, &'a DeviceTensor)>; 16],
    outputs: [Option<(&'static str, &'a DeviceTensor)>; 16],
    filled: (usize, usize),
}

impl<'a> Checked<'a> {
    fn new() -> Checked<'a> {
        Checked { inputs: [None; 16], outputs: [None; 16], filled: (0, 0) }
    }

    /// An input of this shape.
    fn input(
        &mut self,
        name: &'static str,
        t: &'a DeviceTensor,
        dtype: DType,
        shape: &[usize],
        align: usize,
    ) -> Result<()> {
        t.expect_contiguous(name, dtype, shape, align)?;
        self.read(name, t);
        Ok(())
    }

    /// An input of one element, whatever its rank.
    fn scalar(&mut self, name: &'static str, t: &'a DeviceTensor, dtype: DType) -> Result<()> {
        let shape: &[usize] = if t.shape().is_empty() { &[] } else { &[1] };
        self.input(name, t, dtype, shape, dtype.size())
    }

    /// An output of this shape.
    fn output(&mut self, name: &'static str, t: &'a DeviceTensor, dtype: DType, shape: &[usize]) -> Result<()> {
        t.expect_contiguous(name, dtype, shape, 16)?;
        self.write(name, t);
        Ok(())
    }

    fn read(&mut self, name: &'static str, t: &'a DeviceTensor) {
        self.inputs[self.filled.0] = Some((name, t));
        self.filled.0 += 1;
    }

    fn write(&mut self, name: &'static str, t: &'a DeviceTensor) {
        self.outputs[self.filled.1] = Some((name, t));
        self.filled.1 += 1;
    }

    /// No output overlaps an input or another output.
    fn apart(self) -> Result<Checked<'a>> {
        for (i, &(name, t)) in self.outputs.iter().flatten().enumerate() {
            let mut others = self.inputs.iter().flatten().chain(self.outputs.iter().flatten().take(i));
            if let Some((other, _)) = others.find(|(_, o)| t.overlaps(o)) {
                return Err(Error::Alias { tensor: name.into(), other: other.to_string() });
            }
        }
        Ok(self)
    }

    /// Every tensor that has elements, by name.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &'a DeviceTensor)> + '_ {
        self.inputs.iter().chain(&self.outputs).flatten().copied().filter(|(_, t)| !t.is_empty())
    }
}

fn attention_input<'a>(c: &mut Checked<'a>, plan: &Plan, x: &'a AttentionInput) -> Result<()> {
    let key = &plan.key;
    let (t, b, width) = (key.tokens as usize, key.requests as usize, key.table_width as usize);
    c.input("attn_input", &x.attn_input, DType::Bf16, &[t, m::HIDDEN as usize], 16)?;
    c.input("positions", &x.positions, DType::I64, &[t], 8)?;
    c.input("cache_loc", &x.cache_loc, DType::I64, &[t], 8)?;
    c.input("cu_seqlens_q", &x.cu_seqlens_q, DType::I32, &[b + 1], 4)?;
    c.input("cache_seqlens", &x.cache_seqlens, DType::I32, &[b], 4)?;
    c.scalar("k_scale", &x.k_scale, DType::F32)?;
    c.scalar("v_scale", &x.v_scale, DType::F32)?;
    page_table(&x.page_table, b, width)?;
    c.read("page_table", &x.page_table);
    if x.cache.page_size() != key.page_size as usize {
        return Err(Error::Plan {
            field: "page_size",
            planned: key.page_size.to_string(),
            got: x.cache.page_size().to_string(),
        });
    }
    for (name, t) in [("k_cache", x.cache.k()), ("v_cache", x.cache.v())] {
        let wanted = [x.cache.pages(), x.cache.page_size(), m::KV_HEADS as usize, m::HEAD_DIM as usize];
        if t.shape() != wanted {
            return Err(Error::Shape { tensor: name.into(), wanted: wanted.to_vec(), got: t.shape().to_vec() });
        }
        c.write(name, t);
    }
    if key.engine == AttentionEngine::Fa3 && x.cache.pages() > i32::MAX as usize {
        let (limit, got) = (i32::MAX as u64, x.cache.pages() as u64);
        return Err(Error::Limit { what: "pages of k_cache with the engine fa3".into(), limit, got });
    }
    if let Some(metadata) = &x.scheduler_metadata {
        metadata.check(plan)?;
        c.write("scheduler_metadata", metadata.memory());
    }
    Ok(())
}

/// i32 `[B, table_width]`, columns next to each other, rows any distance of at least the width apart.
fn page_table(t: &DeviceTensor, requests: usize, width: usize) -> Result<()> {
    t.expect("page_table", DType::I32, &[requests, width], 4)?;
    let strides = t.strides();
    let columns = width <= 1 || strides[1] == 1;
    let rows = requests <= 1 || (strides[0] >= width as i64 && strides[0] <= i32::MAX as i64);
    if t.is_empty() || (columns && rows) {
        return Ok(());
    }
    Err(Error::Stride {
        tensor: "page_table".into(),
        wanted: format!("columns next to each other and rows {width} to {} apart", i32::MAX),
        got: strides.to_vec(),
    })
}

fn taps<'a>(c: &mut Checked<'a>, plan: &Plan, taps: &'a DeviceTaps) -> Result<()> {
    for (tap, t) in taps.iter() {
        if plan.key.taps == Taps::None {
            return Err(Error::Plan { field: "taps", planned: "none".into(), got: tap.name().into() });
        }
        c.output(tap.name(), t, tap.dtype(), &tap.shape(plan.key.tokens as usize))?;
    }
    Ok(())
}

/// `hidden` is given if and only if the layer makes it.
fn hidden<'a>(c: &mut Checked<'a>, shape: &[usize], t: Option<&'a DeviceTensor>, has_next_norm: bool) -> Result<()> {
    match (t, has_next_norm) {
        (Some(t), true) => c.output("hidden", t, DType::Bf16, shape),
        (None, false) => Ok(()),
        (None, true) => Err(Error::Missing { tensor: "hidden".into() }),
        (Some(_), false) => Err(Error::Value {
            what: "hidden".into(),
            wanted: "none: the layer has no next_pre_attn_norm".into(),
            got: "a tensor".into(),
        }),
    }
}

fn optional<'a>(c: &mut Checked<'a>, t: Option<&'a DeviceTensor>) -> Result<()> {
    t.map_or(Ok(()), |t| c.scalar("num_tokens_non_padded", t, DType::I32))
}

/// Checks a whole step.
#[doc(hidden)]
pub fn check_step<'a>(
    plan: &Plan,
    input: &'a DeviceInput,
    output: &'a DeviceOutput,
    has_next_norm: bool,
) -> Result<Checked<'a>> {
    let mut c = Checked::new();
    let wide = [plan.key.tokens as usize, m::HIDDEN as usize];
    attention_input(&mut c, plan, &input.attention)?;
    c.input("stream", &input.stream, DType::F32, &wide, 16)?;
    c.scalar("local_start", &input.local_start, DType::I32)?;
    optional(&mut c, input.num_tokens_non_padded.as_ref())?;
    hidden(&mut c, &wide, output.hidden.as_ref(), has_next_norm)?;
    c.output("stream (output)", &output.stream, DType::F32, &wide)?;
    c.output("topk_ids", &output.topk_ids, DType::I32, &[wide[0], m::TOP_K as usize])?;
    taps(&mut c, plan, &output.taps)?;
    c.apart()
}

/// Checks the attention block.
#[doc(hidden)]
pub fn check_attention_block<'a>(
    plan: &Plan,
    input: &'a AttentionInput,
    attn_out: &'a DeviceTensor,
) -> Result<Checked<'a>> {
    let mut c = Checked::new();
    attention_input(&mut c, plan, input)?;
    c.output("attn_out", attn_out, DType::Bf16, &[plan.key.tokens as usize, m::HIDDEN as usize])?;
    c.apart()
}

/// Checks the boundary and the MoE block.
#[doc(hidden)]
pub fn check_moe_block<'a>(plan: &Plan, input: &'a MoeInput, output: &'a MoeOutput) -> Result<Checked<'a>> {
    let mut c = Checked::new();
    let t = plan.key.tokens as usize;
    let wide = [t, m::HIDDEN as usize];
    c.input("stream", &input.stream, DType::F32, &wide, 16)?;
    c.input("attn_out", &input.attn_out, DType::Bf16, &wide, 16)?;
    c.scalar("local_start", &input.local_start, DType::I32)?;
    optional(&mut c, input.num_tokens_non_padded.as_ref())?;
    c.output("stream_after_attn", &output.stream_after_attn, DType::F32, &wide)?;
    c.output("topk_ids", &output.topk_ids, DType::I32, &[t, m::TOP_K as usize])?;
    c.output("moe_mix", &output.moe_mix, DType::Bf16, &[t, m::EXPERT_DIM as usize])?;
    c.apart()
}

/// Checks the unpooler and the final boundary.
#[doc(hidden)]
pub fn check_final_block<'a>(
    plan: &Plan,
    input: &'a FinalInput,
    output: &'a FinalOutput,
    has_next_norm: bool,
) -> Result<Checked<'a>> {
    let mut c = Checked::new();
    let t = plan.key.tokens as usize;
    let wide = [t, m::HIDDEN as usize];
    c.input("stream_after_attn", &input.stream_after_attn, DType::F32, &wide, 16)?;
    c.input("moe_mix", &input.moe_mix, DType::Bf16, &[t, m::EXPERT_DIM as usize], 16)?;
    hidden(&mut c, &wide, output.hidden.as_ref(), has_next_norm)?;
    c.output("stream (output)", &output.stream, DType::F32, &wide)?;
    c.apart()
}

/// The plan slices the unpooler over the ranks.
fn sliced(plan: &Plan) -> Result<()> {
    if plan.sliced() {
        return Ok(());
    }
    let planned = format!("{} (the unpooler is not sliced)", plan.key.tokens);
    Err(Error::Plan { field: "tokens", planned, got: "a block of the sliced unpooler".into() })
}

/// Checks the sliced unpooler.
#[doc(hidden)]
pub fn check_unpool_block<'a>(plan: &Plan, moe_mix: &'a DeviceTensor, slice: &'a DeviceTensor) -> Result<Checked<'a>> {
    sliced(plan)?;
    let mut c = Checked::new();
    let t = plan.key.tokens as usize;
    c.input("moe_mix", moe_mix, DType::Bf16, &[t, m::EXPERT_DIM as usize], 16)?;
    c.output("slice", slice, DType::F32, &[t, m::UNPOOL_SLICE as usize])?;
    c.apart()
}

/// Checks the final boundary behind a gather.
#[doc(hidden)]
pub fn check_ffn_block<'a>(
    plan: &Plan,
    input: &'a FfnInput,
    output: &'a FinalOutput,
    has_next_norm: bool,
) -> Result<Checked<'a>> {
    sliced(plan)?;
    let mut c = Checked::new();
    let t = plan.key.tokens as usize;
    let wide = [t, m::HIDDEN as usize];
    let ranks = input.slices.shape().first().copied().unwrap_or(0).clamp(1, m::RANKS as usize);
    c.input("stream_after_attn", &input.stream_after_attn, DType::F32, &wide, 16)?;
    c.input("slices", &input.slices, DType::F32, &[ranks, t, m::UNPOOL_SLICE as usize], 16)?;
    hidden(&mut c, &wide, output.hidden.as_ref(), has_next_norm)?;
    c.output("stream (output)", &output.stream, DType::F32, &wide)?;
    c.apart()
}

/// Device addresses of a call's own tensors. 0: absent, or not part of the segment.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Args {
    pub attn_input: u64,
    pub positions: u64,
    pub cache_loc: u64,
    pub cu_seqlens_q: u64,
    pub cache_seqlens: u64,
    pub page_table: u64,
    pub table_stride: i64,
    pub k_scale: u64,
    pub v_scale: u64,
    pub k_cache: u64,
    pub v_cache: u64,
    pub pages: i64,
    pub scheduler_metadata: u64,
    pub stream: u64,
    pub local_start: u64,
    pub num_tokens_non_padded: u64,
    /// Borders between segments: the caller's tensors, taps, or scratch.
    pub attn_out: u64,
    pub stream_after_attn: u64,
    pub moe_mix: u64,
    /// This rank's slice of the unpooled branch, and all ranks' (0: not gathered).
    pub slice: u64,
    pub slices: u64,
    pub slice_ranks: u32,
    pub topk_ids: u64,
    pub topk_scores: u64,
    pub ffn_input: u64,
    pub hidden: u64,
    pub stream_out: u64,
    /// Taps that are written only when wanted.
    pub attn_core: u64,
    pub router_logits: u64,
    pub expert_input: u64,
    pub ffn_out: u64,
}
