//! What a step of the CPU layer takes and gives.

use crate::config::{check_page_size, LayerConfig, LayerKind, QueryPrecision, Taps};
use crate::error::{Error, Result};
use crate::plan::AttentionEngine;
use half::bf16;

/// How the step's tokens belong to requests, and where their keys and values live. Arrays as the CUDA
/// backend reads them on the device.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// `[T]`: position of each token, for RoPE only.
    pub positions: &'a [i64],
    /// `[T]`: cache row (page x page size + offset) each token's key and value go to; below 0: nowhere.
    pub cache_loc: &'a [i64],
    /// `[B + 1]`: request `b` has tokens `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`. Tokens past the last
    /// belong to no request and see no key.
    pub cu_seqlens_q: &'a [i32],
    /// `[B]`: tokens of each request in the cache, this step's included.
    pub cache_seqlens: &'a [i32],
    /// `[B, table_width]`, rows `table_stride` apart: the pages of each request. An id below 0 or past
    /// the pool makes its keys invisible.
    pub page_table: &'a [i32],
    /// Columns of the page table.
    pub table_width: usize,
    /// Elements from one row of the page table to the next.
    pub table_stride: usize,
}

impl Batch<'_> {
    /// The number of requests.
    pub fn requests(&self) -> usize {
        self.cache_seqlens.len()
    }

    /// Checks the arrays against each other; `tokens` is T.
    pub fn validate(&self, tokens: usize) -> Result<()> {
        let requests = self.requests();
        let length = |tensor: &str, wanted: usize, got: usize| {
            if wanted == got {
                return Ok(());
            }
            Err(Error::Shape { tensor: tensor.into(), wanted: vec![wanted], got: vec![got] })
        };
        length("positions", tokens, self.positions.len())?;
        length("cache_loc", tokens, self.cache_loc.len())?;
        length("cu_seqlens_q", requests + 1, self.cu_seqlens_q.len())?;
        let wrong = |wanted: String, got: String| Err(Error::Value { what: "cu_seqlens_q".into(), wanted, got });
        if self.cu_seqlens_q[0] != 0 {
            return wrong("0 first".into(), self.cu_seqlens_q[0].to_string());
        }
        if let Some(w) = self.cu_seqlens_q.windows(2).find(|w| w[1] < w[0]) {
            return wrong("offsets that never fall".into(), format!("{} after {}", w[1], w[0]));
        }
        if self.cu_seqlens_q[requests] as usize > tokens {
            return wrong(format!("at most {tokens} tokens"), self.cu_seqlens_q[requests].to_string());
        }
        if requests > 1 && self.table_stride < self.table_width {
            return Err(Error::Stride {
                tensor: "page_table".into(),
                wanted: format!("a row stride of at least {}", self.table_width),
                got: vec![self.table_stride as i64, 1],
            });
        }
        let reached = if requests == 0 { 0 } else { (requests - 1) * self.table_stride + self.table_width };
        if self.page_table.len() < reached {
            return Err(Error::Shape {
                tensor: "page_table".into(),
                wanted: vec![requests, self.table_width],
                got: vec![self.page_table.len()],
            });
        }
        Ok(())
    }
}

/// The paged FP8 cache: K and V apart, E4M3 bytes `[pages, page_size, kv_heads, head_dim]`.
#[derive(Debug)]
pub struct Cache<'a> {
    /// Keys, E4M3 bytes `[pages, page_size, kv_heads, head_dim]`.
    pub k: &'a mut [u8],
    /// Values, as the keys.
    pub v: &'a mut [u8],
    /// Tokens a page holds: a power of two from 1 to 256.
    pub page_size: usize,
    /// A cached key byte times this is the key.
    pub k_scale: f32,
    /// A cached value byte times this is the value.
    pub v_scale: f32,
}

impl Cache<'_> {
    /// Checks the page size and that both halves hold whole pages; gives the number of pages.
    pub fn pages(&self, config: &LayerConfig) -> Result<usize> {
        check_page_size(self.page_size)?;
        let page = self.page_size * config.kv_size();
        let pages = self.k.len() / page;
        for (tensor, n) in [("k_cache", self.k.len()), ("v_cache", self.v.len())] {
            if n != pages * page {
                return Err(Error::Shape {
                    tensor: tensor.into(),
                    wanted: vec![pages, self.page_size, config.kv_heads, config.head_dim],
                    got: vec![n],
                });
            }
        }
        Ok(pages)
    }
}

/// A step's inputs besides the cache.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// `[T, hidden]`: the residual stream.
    pub stream: &'a [f32],
    /// `[T, hidden]`: the stream after the previous layer's fused norm.
    pub attn_input: &'a [bf16],
    /// Which tokens belong to which request, and where their cache is.
    pub batch: Batch<'a>,
    /// The first expert of this rank.
    pub local_start: i32,
    /// Tokens from this one on are padding and take no route; `None`: there is no padding.
    pub num_tokens_non_padded: Option<usize>,
}

/// The choices of a step that a plan makes on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepOptions {
    /// Full or sliding attention.
    pub kind: LayerKind,
    /// What queries are rounded to.
    pub query: QueryPrecision,
    /// The attention engine; the CPU has its own only and takes no notice.
    pub engine: AttentionEngine,
    /// Which slice of the unpooler this rank computes at few tokens.
    pub rank: usize,
    /// Do not store tokens whose `cache_loc` is 0 (runtimes that use slot 0 as a sink).
    pub skip_slot_zero: bool,
    /// Which intermediate results to keep.
    pub taps: Taps,
}

impl StepOptions {
    /// The own engine, rank 0, nothing skipped, no taps.
    pub fn new(kind: LayerKind, query: QueryPrecision) -> StepOptions {
        StepOptions { kind, query, engine: AttentionEngine::Own, rank: 0, skip_slot_zero: false, taps: Taps::None }
    }
}

/// A step's outputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// `[T, hidden]`: the next layer's attention input; empty without `next_pre_attn_norm`.
    pub hidden: Vec<bf16>,
    /// `[T, hidden]`: the residual stream.
    pub stream: Vec<f32>,
    /// `[T, top_k]`: expert ids over all ranks, by descending biased score.
    pub topk_ids: Vec<i32>,
    /// `[T, top_k]`: the normalised weights.
    pub topk_scores: Vec<f32>,
    /// Filled with [`Taps::All`].
    pub taps: Option<TapValues>,
}

/// Intermediate results by the names the project uses for them, all FP32 and row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TapValues {
    /// `[T, q_heads, head_dim]`: attention before the output norm.
    pub attn_core: Vec<f32>,
    /// `[T, hidden]`: after `o`.
    pub attn_out: Vec<f32>,
    /// `[T, hidden]`: the stream after the first residual boundary.
    pub stream_after_attn: Vec<f32>,
    /// `[T, hidden]`: the input of router and pooler.
    pub ffn_input: Vec<f32>,
    /// `[T, n_experts]`: before the multiplier.
    pub router_logits: Vec<f32>,
    /// `[T, top_k]`.
    pub topk_ids: Vec<i32>,
    /// `[T, top_k]`.
    pub topk_scores: Vec<f32>,
    /// `[T, expert_dim]`: after `pre_expert_norm`.
    pub expert_input: Vec<f32>,
    /// `[T, expert_dim]`: the weighted sum of this rank's experts.
    pub moe_mix: Vec<f32>,
    /// `[T, hidden]`: the unpooler's output before `post_ffn_norm`, zeros outside the slice.
    pub ffn_out: Vec<f32>,
}

impl TapValues {
    /// The floating-point taps by name, in the order of the dataflow.
    pub fn named(&self) -> [(&'static str, &[f32]); 9] {
        [
            ("attn_core", &self.attn_core),
            ("attn_out", &self.attn_out),
            ("stream_after_attn", &self.stream_after_attn),
            ("ffn_input", &self.ffn_input),
            ("router_logits", &self.router_logits),
            ("topk_scores", &self.topk_scores),
            ("expert_input", &self.expert_input),
            ("moe_mix", &self.moe_mix),
            ("ffn_out", &self.ffn_out),
        ]
    }
}
