//! One method per operation: fills the operation's struct from the plan, the weights, the scratch and the
//! call's arguments, and launches it. Names as in `csrc/include/ops.h`, order as in the step.
#![allow(unsafe_code)]

mod fa3;
mod ranks;

pub(crate) use fa3::prepare_metadata;

use crate::backend::cuda::params::*;
use crate::backend::cuda::{bridge, model as m, Buffer, Device};
use crate::collective::Collective;
use crate::config::{QueryPrecision, WeightKind};
use crate::error::{Error, Result};
use crate::layer::After;
use crate::plan::{AttentionEngine, AttentionPlan, DensePlan, Plan, RouterForm};
use crate::step::Args;
use crate::weights::device::DeviceWeights;
use crate::workspace::{Layout, CARRY_FLAGS, READY_WORD};

/// One call: everything its launches need.
pub(crate) struct Step<'a> {
    pub device: &'a Device,
    pub weights: &'a DeviceWeights,
    pub plan: &'a Plan,
    pub scratch: Layout,
    pub args: Args,
    pub launch: Launch,
    pub ranks: &'a dyn Collective,
    /// Called after each operation is queued, with its name.
    pub after: Option<&'a After<'a>>,
}

/// Requests of a step that take one form of the attention.
struct AttentionPart<'a> {
    plan: &'a AttentionPlan,
    first_request: u32,
    requests: u32,
    /// Their rows of the step.
    rows: std::ops::Range<u32>,
    max_q_len: u32,
}

/// The model's query factor (5.4730064863875 rounded to FP32) times the head's scale.
const SOFTMAX_SCALE: f32 = 5.473_006_2 / 8.0;

/// Parts of `ffn_input` that `boundary_topk` writes, a CTA each (moe/boundary_router.cuh).
const BOUNDARY_PARTS: i32 = 8;

impl Step<'_> {
    /// Tells a caller who measures. In a debugging plan, names the operation (the last name is the one that
    /// hangs), waits for it, and names it in the error if it failed.
    fn launched(&self, operation: &'static str, result: Result<()>) -> Result<()> {
        result?;
        if let Some(after) = self.after {
            after(operation)?;
        }
        if !self.plan.key.synchronize {
            return Ok(());
        }
        eprintln!("muse-spark-layer: {operation}");
        self.device.synchronize_stream(self.launch.stream as u64).map_err(|e| match e {
            Error::Cuda { code, text, .. } => Error::Cuda { call: operation.into(), code, text },
            Error::ContextLost { code, text, .. } => Error::ContextLost { call: operation.into(), code, text },
            other => other,
        })
    }

    fn tokens(&self) -> i32 {
        self.plan.key.tokens as i32
    }

    /// `out = x @ weight^T` as `d` says; the weight rows are packed in tiles of 64 full rows.
    fn dense(&self, d: &DensePlan, weight: &Buffer, x: u64, x_stride: i32, out: u64) -> DenseParams {
        DenseParams {
            weight: (weight.ptr() + d.row_begin as u64 * d.k as u64 * 2) as *const _,
            x: x as *const _,
            out: out as *mut _,
            tokens: self.tokens(),
            rows: d.rows as i32,
            k: d.k as i32,
            x_stride,
            out_stride: d.rows as i32,
            splits: d.splits as i32,
            out_f32: d.out_f32 as i32,
            tile_n: d.tile_n as i32,
            tile_rows: d.tile_rows as i32,
            ready: std::ptr::null(),
            ready_at: 1,
        }
    }

    /// BF16 `[T, 8192]` to FP32 splits of `[T, 2304]`: q, k, v, gate.
    pub fn qkv_gate(&self) -> Result<()> {
        let d = &self.plan.launches.qkv_gate;
        let params = self.dense(d, &self.weights.qkv_gate, self.args.attn_input, m::HIDDEN as i32, self.scratch.qkv);
        // SAFETY (here and below): addresses come from checked tensors, the workspace's layout for this very
        // plan, and the layer's own weights.
        self.launched("qkv_gate", unsafe { bridge::qkv_gate(&params, &self.launch) })
    }

    fn append_params(&self) -> QkNormRopeAppendParams {
        let (a, s, key) = (&self.args, &self.scratch, &self.plan.key);
        let sliding = self.plan.launches.attention.window > 0;
        QkNormRopeAppendParams {
            qkv: s.qkv as *const f32,
            positions: a.positions as *const i64,
            cache_loc: a.cache_loc as *const i64,
            k_scale: a.k_scale as *const f32,
            v_scale: a.v_scale as *const f32,
            inv_freq: if sliding { self.weights.inv_freq.ptr() as *const f32 } else { std::ptr::null() },
            k_cache: a.k_cache as *mut _,
            v_cache: a.v_cache as *mut _,
            q: s.q as *mut _,
            gate: if self.plan.gate_apart() { s.gate as *mut f32 } else { std::ptr::null_mut() },
            cache_rows: a.pages * key.page_size as i64,
            tokens: self.tokens(),
            splits: self.plan.launches.qkv_gate.splits as i32,
            e4m3_query: (key.query == QueryPrecision::E4m3) as i32,
            skip_slot_zero: key.skip_slot_zero as i32,
        }
    }

    /// Norms and rotates q and k, appends k and v to the cache.
    pub fn qk_norm_rope_append(&self) -> Result<()> {
        let params = self.append_params();
        // SAFETY: as in `qkv_gate`.
        self.launched("qk_norm_rope_append", unsafe { bridge::qk_norm_rope_append(&params, &self.launch) })
    }

    /// The requests that take one form of the attention: all of them, or the short ones, then the long ones.
    fn parts(&self) -> impl Iterator<Item = AttentionPart<'_>> {
        let (key, l) = (&self.plan.key, &self.plan.launches);
        let short = key.short.as_ref().zip(l.short_attention.as_ref());
        let (tokens, requests) = short.map_or((0, 0), |(s, _)| (s.tokens, s.requests));
        let long = AttentionPart {
            plan: &l.attention,
            first_request: 0,
            requests: key.requests - requests,
            rows: 0..key.tokens - tokens,
            max_q_len: key.max_q_len,
        };
        let short = short.map(|(s, plan)| AttentionPart {
            plan,
            first_request: key.requests - s.requests,
            requests: s.requests,
            rows: key.tokens - s.tokens..key.tokens,
            max_q_len: s.max_q_len,
        });
        // The short ones' kernel starts on an idle device: its CTAs are many and equal.
        short.into_iter().chain(std::iter::once(long))
    }

    fn attention_params(&self, part: &AttentionPart) -> AttentionParams {
        let (a, s, key, l) = (&self.args, &self.scratch, &self.plan.key, part.plan);
        let first = part.first_request as u64;
        AttentionParams {
            q: s.q as *const _,
            k_cache: a.k_cache as *const _,
            v_cache: a.v_cache as *const _,
            page_table: a.page_table.wrapping_add_signed(first as i64 * a.table_stride * 4) as *const i32,
            cache_seqlens: (a.cache_seqlens + 4 * first) as *const i32,
            cu_seqlens_q: (a.cu_seqlens_q + 4 * first) as *const i32,
            k_scale: a.k_scale as *const f32,
            v_scale: a.v_scale as *const f32,
            acc: s.acc as *mut f32,
            lse: s.lse as *mut f32,
            gate: (s.qkv + 4 * u64::from(m::Q_SIZE + 2 * m::KV_SIZE)) as *const f32,
            out: s.gated as *mut _,
            attn_core: a.attn_core as *mut f32,
            kv_scratch: s.kv_scratch as *mut _,
            kv_scratch_bytes: l.kv_scratch_bytes as i64,
            pages: a.pages,
            table_stride: a.table_stride,
            table_width: key.table_width as i32,
            page_log2: key.page_size.trailing_zeros() as i32,
            // Rows are the step's own, by `cu_seqlens_q`: this is where they end.
            tokens: part.rows.end as i32,
            requests: part.requests as i32,
            max_q_len: part.max_q_len as i32,
            window: l.window as i32,
            splits: l.splits as i32,
            tiled: l.tiled as i32,
            gate_splits: self.plan.launches.qkv_gate.splits as i32,
            gate_tokens: self.tokens(),
            softmax_scale: SOFTMAX_SCALE,
        }
    }

    /// Queries against the cache: splits (decode, verify) or tiles (prefill); in a mixed step one after the other.
    pub fn attention(&self) -> Result<()> {
        self.parts().try_for_each(|part| {
            let params = self.attention_params(&part);
            // SAFETY: as in `qkv_gate`.
            self.launched("attention", unsafe { bridge::attention(&params, &self.launch) })
        })
    }

    /// The two above in one launch (decode), with their bits.
    pub fn append_attention(&self) -> Result<()> {
        let append = self.append_params();
        // Such a plan has one part.
        self.parts().try_for_each(|part| {
            let attention = self.attention_params(&part);
            // SAFETY: as in `qkv_gate`.
            self.launched("append_attention", unsafe { bridge::append_attention(&append, &attention, &self.launch) })
        })
    }

    /// Joins the splits, norms each head, gates: BF16 `[T, 1024]`. The tiled attention has done it for its rows.
    pub fn out_norm_gate(&self) -> Result<()> {
        self.parts().filter(|part| !part.plan.tiled).try_for_each(|part| {
            let (s, l, first) = (&self.scratch, part.plan, part.rows.start as u64);
            let q_size = m::Q_SIZE as u64;
            let head_rows = first * m::Q_HEADS as u64 * l.splits as u64;
            let fa3 = l.engine == AttentionEngine::Fa3;
            let split = |address: u64| if fa3 { std::ptr::null() } else { address as *const f32 };
            let attn_core = self.args.attn_core;
            let params = OutNormGateParams {
                acc: split(s.acc + head_rows * m::HEAD_DIM as u64 * 4),
                lse: split(s.lse + head_rows * 8),
                joined: if fa3 { s.fa3_out as *const _ } else { std::ptr::null() },
                gate: (s.gate + first * q_size * 4) as *const f32,
                v_scale: self.args.v_scale as *const f32,
                out: (s.gated + first * q_size * 2) as *mut _,
                attn_core: if attn_core == 0 { 0 } else { attn_core + first * q_size * 4 } as *mut f32,
                tokens: part.rows.len() as i32,
                // 0: BF16, joined.
                splits: if fa3 { 0 } else { l.splits as i32 },
            };
            // SAFETY: as in `qkv_gate`.
            self.launched("out_norm_gate", unsafe { bridge::out_norm_gate(&params, &self.launch) })
        })
    }

    /// BF16 `[T, 1024]` to the rank's partial, BF16 `[T, 8192]`.
    pub fn o(&self) -> Result<()> {
        let d = &self.plan.launches.o;
        let params = self.dense(d, &self.weights.o, self.scratch.gated, m::Q_SIZE as i32, self.args.attn_out);
        // SAFETY: as in `qkv_gate`.
        self.launched("o", unsafe { bridge::o(&params, &self.launch) })
    }

    /// The first residual boundary; `ffn_input` as BF16 planes.
    pub fn attn_boundary(&self) -> Result<()> {
        let (a, w) = (&self.args, &self.weights);
        let tiled = self.plan.launches.router.form == RouterForm::Tiled;
        let params = AttnBoundaryParams {
            stream: a.stream as *const f32,
            branch: a.attn_out as *const _,
            alpha: w.attn_alpha.ptr() as *const f32,
            beta: w.attn_beta.ptr() as *const f32,
            norm_weight: w.pre_ffn_norm.ptr() as *const f32,
            stream_out: a.stream_after_attn as *mut f32,
            ffn_input: a.ffn_input as *mut _,
            factor: if tiled { self.scratch.ffn_factor as *mut f32 } else { std::ptr::null_mut() },
            tokens: self.tokens(),
            planes: self.plan.ffn_planes() as i32,
        };
        let launch = self.behind_collective(2 * self.plan.key.tokens * m::HIDDEN);
        // SAFETY: as in `qkv_gate`.
        self.launched("attn_boundary", unsafe { bridge::attn_boundary(&params, &launch) })
    }

    /// The word by which the router lets the pooler go on; null where the pooler waits for the routing.
    fn ready(&self) -> *mut u32 {
        if !self.plan.launches.router.releases {
            return std::ptr::null_mut();
        }
        (self.scratch.control + 4 * u64::from(READY_WORD)) as *mut u32
    }

    /// Partial logits, FP32 `[splits][T, 256]`, in the form the plan names.
    pub fn router(&self) -> Result<()> {
        let l = &self.plan.launches.router;
        let (weights, logits) = (&self.weights, self.scratch.logits);
        match l.form {
            RouterForm::Rows => {
                let params = RouterParams {
                    weight: weights.router.ptr() as *const f32,
                    ffn_input: self.args.ffn_input as *const _,
                    logits: logits as *mut f32,
                    tokens: self.tokens(),
                    splits: l.splits as i32,
                    ready: self.ready(),
                };
                // SAFETY: as in `qkv_gate`.
                self.launched("router", unsafe { bridge::router(&params, &self.launch) })
            }
            RouterForm::Tiled => {
                let params = RouterTiledParams {
                    weight: weights.router_tiled.ptr() as *const _,
                    stream: self.args.stream_after_attn as *const f32,
                    factor: self.scratch.ffn_factor as *const f32,
                    logits: logits as *mut f32,
                    tokens: self.tokens(),
                    splits: l.splits as i32,
                    ready: self.ready(),
                };
                // SAFETY: as in `qkv_gate`.
                self.launched("router", unsafe { bridge::router_tiled(&params, &self.launch) })
            }
        }
    }

    fn topk_params(&self) -> RouterTopkParams {
        let (a, s) = (&self.args, &self.scratch);
        RouterTopkParams {
            logits: s.logits as *const f32,
            bias: self.weights.router_bias.ptr() as *const f32,
            local_start: a.local_start as *const i32,
            topk_ids: a.topk_ids as *mut i32,
            topk_scores: a.topk_scores as *mut f32,
            router_logits: a.router_logits as *mut f32,
            expert_offsets: s.expert_offsets as *mut i32,
            route_token: s.route_token as *mut i32,
            token_route: s.token_route as *mut i32,
            token_masks: s.token_masks as *mut u32,
            counters: s.control as *mut u32,
            num_tokens_non_padded: a.num_tokens_non_padded as *const i32,
            tokens: self.tokens(),
            splits: self.plan.launches.router.splits as i32,
            behind: self.plan.launches.router.topk_behind as i32,
        }
    }

    /// Top 8, their weights, and the local routes by expert.
    pub fn router_topk(&self) -> Result<()> {
        let params = self.topk_params();
        // SAFETY: as in `qkv_gate`.
        self.launched("router_topk", unsafe { bridge::router_topk(&params, &self.launch) })
    }

    fn boundary_router_params(&self) -> BoundaryRouterParams {
        let (a, w, splits) = (&self.args, &self.weights, self.plan.launches.router.splits);
        let logits = u64::from(splits * 2 * m::EXPERTS);
        BoundaryRouterParams {
            stream: a.stream as *const f32,
            branch: a.attn_out as *const _,
            alpha: w.attn_alpha.ptr() as *const f32,
            beta: w.attn_beta.ptr() as *const f32,
            norm_weight: w.pre_ffn_norm.ptr() as *const f32,
            weight: w.router.ptr() as *const f32,
            logits: self.scratch.logits as *mut f32,
            sums: (self.scratch.logits + 4 * logits) as *mut f32,
            stream_out: a.stream_after_attn as *mut f32,
            ffn_input: a.ffn_input as *mut _,
            splits: splits as i32,
            ready: self.ready(),
        }
    }

    /// `attn_boundary` and `router` without their norms, which are factors (one token): logits of both addends of the
    /// stream, FP32 `[splits][2, 256]`, and the sums that the factors are made of.
    pub fn boundary_router(&self) -> Result<()> {
        let params = self.boundary_router_params();
        let launch = self.behind_collective(2 * self.plan.key.tokens * m::HIDDEN);
        // SAFETY: as in `qkv_gate`.
        self.launched("boundary_router", unsafe { bridge::boundary_router(&params, &launch) })
    }

    /// The norms' factors, then the outputs of `attn_boundary` and of `router_topk`.
    pub fn boundary_topk(&self) -> Result<()> {
        let (topk, boundary) = (self.topk_params(), self.boundary_router_params());
        // SAFETY: as in `qkv_gate`.
        self.launched("boundary_topk", unsafe { bridge::boundary_topk(&topk, &boundary, &self.launch) })
    }

    /// The first plane of `ffn_input` to FP32 splits of `[T, 4096]`.
    pub fn pooler(&self) -> Result<()> {
        let d = &self.plan.launches.pooler;
        let stride = (self.plan.ffn_planes() * m::HIDDEN) as i32;
        let params = self.dense(d, &self.weights.pooler, self.args.ffn_input, stride, self.scratch.pooled);
        // Each CTA of `boundary_topk` that writes a part adds one; a router sets one.
        let ready_at = if self.plan.launches.router.boundary { BOUNDARY_PARTS } else { 1 };
        let params = DenseParams { ready: self.ready(), ready_at, ..params };
        // SAFETY: as in `qkv_gate`.
        self.launched("pooler", unsafe { bridge::pooler(&params, &self.launch) })
    }

    /// The first sorted route of a pass.
    fn route_begin(&self, pass: u32) -> i32 {
        (pass * self.plan.launches.experts.route_bound) as i32
    }

    /// Norms the pooled rows and writes each once per route of the pass.
    pub fn pre_expert_norm(&self, pass: u32) -> Result<()> {
        let s = &self.scratch;
        let params = PreExpertNormParams {
            pooled: s.pooled as *const f32,
            norm_weight: self.weights.pre_expert_norm.ptr() as *const f32,
            token_route: s.token_route as *const i32,
            x: s.x as *mut _,
            // A tap of tokens, not of routes: once is enough.
            expert_input: if pass == 0 { self.args.expert_input as *mut f32 } else { std::ptr::null_mut() },
            ready: self.ready(),
            tokens: self.tokens(),
            splits: self.plan.launches.pooler.splits as i32,
            route_begin: self.route_begin(pass),
            route_bound: self.plan.launches.experts.route_bound as i32,
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("pre_expert_norm", unsafe { bridge::pre_expert_norm(&params, &self.launch) })
    }

    fn expert_gemm(&self, pass: u32) -> ExpertGemmParams {
        let e = &self.plan.launches.experts;
        ExpertGemmParams {
            expert_offsets: self.scratch.expert_offsets as *const i32,
            weight_kind: (e.weight_kind == WeightKind::Bf16) as i32,
            splits: 1,
            few: e.few as i32,
            route_begin: self.route_begin(pass),
            route_bound: e.route_bound as i32,
            max_routes_per_expert: e.max_routes_per_expert as i32,
            carry: if e.carry_words > 0 { self.scratch.carry as *mut f32 } else { std::ptr::null_mut() },
            carry_flags: (self.scratch.control + 4 * u64::from(CARRY_FLAGS)) as *mut u32,
            carry_words: e.carry_words as i32,
            ..Default::default()
        }
    }

    /// Gate and up of each route, and SwiGLU.
    pub fn w13(&self, pass: u32) -> Result<()> {
        let params = ExpertGemmParams {
            weight: self.weights.w13.weight.ptr() as *const _,
            scale: self.weights.w13.scale.ptr() as *const f32,
            x: self.scratch.x as *const _,
            out: self.scratch.inter as *mut _,
            swiglu: 1,
            ..self.expert_gemm(pass)
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("w13", unsafe { bridge::w13(&params, &self.launch) })
    }

    /// Down projection of each route.
    pub fn w2(&self, pass: u32) -> Result<()> {
        let params = ExpertGemmParams {
            weight: self.weights.w2.weight.ptr() as *const _,
            scale: self.weights.w2.scale.ptr() as *const f32,
            x: self.scratch.inter as *const _,
            out: self.scratch.y as *mut _,
            splits: self.plan.launches.experts.w2_splits as i32,
            ..self.expert_gemm(pass)
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("w2", unsafe { bridge::w2(&params, &self.launch) })
    }

    /// Norms and sums each token's routes of the pass, by slot.
    pub fn combine(&self, pass: u32) -> Result<()> {
        let (s, e) = (&self.scratch, &self.plan.launches.experts);
        let params = CombineParams {
            y: s.y as *const _,
            norm_weight: self.weights.post_expert_norm.ptr() as *const f32,
            topk_scores: self.args.topk_scores as *const f32,
            token_route: s.token_route as *const i32,
            expert_offsets: s.expert_offsets as *const i32,
            accumulate: if e.passes > 1 { s.accumulate as *mut f32 } else { std::ptr::null_mut() },
            moe_mix: self.args.moe_mix as *mut _,
            y_f32: (e.w2_splits > 1) as i32,
            tokens: self.tokens(),
            splits: e.w2_splits as i32,
            route_begin: self.route_begin(pass),
            route_bound: e.route_bound as i32,
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("combine", unsafe { bridge::combine(&params, &self.launch) })
    }

    /// BF16 `[T, 4096]` to the rank's columns of the unpooled branch.
    pub fn unpooler(&self) -> Result<()> {
        let d = &self.plan.launches.unpooler;
        let params =
            self.dense(d, &self.weights.unpooler, self.args.moe_mix, m::EXPERT_DIM as i32, self.scratch.unpooled);
        let launch = self.behind_collective(2 * self.plan.key.tokens * m::EXPERT_DIM);
        // SAFETY: as in `qkv_gate`.
        self.launched("unpooler", unsafe { bridge::unpooler(&params, &launch) })
    }

    /// Adds the splits of this rank's slice: FP32 `[T, 1024]`.
    pub fn slice_sum(&self) -> Result<()> {
        let d = &self.plan.launches.unpooler;
        let params = SliceSumParams {
            parts: self.scratch.unpooled as *const f32,
            out: self.args.slice as *mut f32,
            tokens: self.tokens(),
            splits: d.splits as i32,
            columns: d.rows as i32,
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("slice_sum", unsafe { bridge::slice_sum(&params, &self.launch) })
    }

    /// The second residual boundary and the next layer's norm.
    pub fn ffn_boundary(&self) -> Result<()> {
        let (a, w, d) = (&self.args, &self.weights, &self.plan.launches.unpooler);
        let gathered = a.slices != 0;
        let slice_bytes = 4 * self.plan.key.tokens * m::UNPOOL_SLICE;
        let launch = if gathered { self.behind_collective(slice_bytes) } else { self.launch };
        let columns = if gathered { a.slice_ranks * m::UNPOOL_SLICE } else { d.rows };
        let params = FfnBoundaryParams {
            stream: a.stream_after_attn as *const f32,
            branch: if gathered { a.slices } else { self.scratch.unpooled } as *const _,
            alpha: w.ffn_alpha.ptr() as *const f32,
            beta: w.ffn_beta.ptr() as *const f32,
            post_norm_weight: w.post_ffn_norm.ptr() as *const f32,
            next_norm_weight: w.next_pre_attn_norm.as_ref().map_or(0, Buffer::ptr) as *const f32,
            stream_out: a.stream_out as *mut f32,
            hidden: a.hidden as *mut _,
            ffn_out: a.ffn_out as *mut f32,
            tokens: self.tokens(),
            splits: if gathered { 1 } else { d.splits as i32 },
            branch_f32: (gathered || d.out_f32) as i32,
            column_begin: if gathered { 0 } else { d.row_begin as i32 },
            columns: columns as i32,
            slice: if gathered { m::UNPOOL_SLICE as i32 } else { columns as i32 },
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("ffn_boundary", unsafe { bridge::ffn_boundary(&params, &launch) })
    }
}
