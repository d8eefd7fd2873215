//! The layer on the CPU: the project's reference. FP32 throughout, the router in FP64, any dimensions. Formulas are those
//! of the model's specification (`layer.py`), which wrote the goldens that the tests compare with (tests/golden/README.md).
//!
//! There is one public function per operation, named as in the CUDA backend, and [`CpuLayer`] that
//! chains them, whole or in the three segments between which the ranks communicate. Nothing is rounded
//! to 16 bits but what leaves the layer: queries by choice, the cache to E4M3, `hidden` to BF16.

mod attention;
mod linalg;
mod moe;
mod residual;
mod step;
mod weights;

pub use attention::{attention, o, out_norm_gate, qk_norm_rope_append, qkv_gate, rope, round_queries, Queries};
pub use moe::{combine, pooler, pre_expert_norm, router, router_topk, unpooler, w13, w2};
pub use residual::{attn_boundary, ffn_boundary, AttnBoundary, FfnBoundary};
pub use step::{Batch, Cache, StepInput, StepOptions, StepOutput, TapValues};
pub use weights::CpuWeights;

use crate::collective::{self, Collective, Identity};
use crate::config::{LayerConfig, Taps};
use crate::error::{Error, Result};
use crate::routing::ExpertLists;
use crate::tensor::NamedTensors;
use half::bf16;

/// A decoder layer on the CPU.
#[derive(Clone, Debug)]
pub struct CpuLayer<'a> {
    config: LayerConfig,
    weights: CpuWeights<'a>,
}

/// What the attention segment leaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionSegment {
    /// `[T, hidden]`: this rank's part, to be summed over the ranks.
    pub attn_out: Vec<f32>,
    /// `[T, q_heads, head_dim]`: attention before the output norm.
    pub attn_core: Vec<f32>,
}

/// What the boundary and MoE segment leaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MoeSegment {
    /// `[T, expert_dim]`: this rank's part, to be summed over the ranks.
    pub moe_mix: Vec<f32>,
    /// `[T, hidden]`.
    pub stream_after_attn: Vec<f32>,
    /// `[T, hidden]`.
    pub ffn_input: Vec<f32>,
    /// `[T, n_experts]`, before the multiplier.
    pub router_logits: Vec<f64>,
    /// `[T, top_k]`.
    pub topk_ids: Vec<i32>,
    /// `[T, top_k]`.
    pub topk_scores: Vec<f32>,
    /// `[T, expert_dim]`.
    pub expert_input: Vec<f32>,
}

impl<'a> CpuLayer<'a> {
    /// Checks configuration and weights ([`CpuWeights`] lists them).
    pub fn new(config: LayerConfig, tensors: NamedTensors<'a>) -> Result<CpuLayer<'a>> {
        let weights = CpuWeights::new(&config, tensors)?;
        Ok(CpuLayer { config, weights })
    }

    /// The dimensions.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// The weights.
    pub fn weights(&self) -> &CpuWeights<'a> {
        &self.weights
    }

    /// Attention: `attn_input` `[T, hidden]` to this rank's part of the attention output, with the
    /// step's keys and values appended to the cache.
    ///
    /// Errors: [`Error::Shape`], [`Error::Value`] or [`Error::Stride`] names the array that does not fit.
    pub fn attention_block(
        &self,
        attn_input: &[bf16],
        batch: &Batch,
        cache: &mut Cache,
        options: &StepOptions,
    ) -> Result<AttentionSegment> {
        let (config, weights) = (&self.config, &self.weights);
        let tokens = self.tokens("attn_input", attn_input.len(), config.hidden, None)?;
        batch.validate(tokens)?;
        cache.pages(config)?;
        let x: Vec<f32> = attn_input.iter().map(|v| v.to_f32()).collect();

        let qkv = qkv_gate(config, weights, &x);
        let StepOptions { kind, query, skip_slot_zero, .. } = *options;
        let queries = qk_norm_rope_append(config, &qkv, batch, cache, kind, query, skip_slot_zero);
        let attn_core = attention(config, &queries.q, batch, cache, kind);
        let gated = out_norm_gate(config, &attn_core, &queries.gate);
        let attn_out = o(config, weights, &gated);
        Ok(AttentionSegment { attn_out, attn_core })
    }

    /// Boundary, router and experts: `stream` and the ranks' summed `attn_out`, both `[T, hidden]`, to
    /// this rank's part of the mixture.
    ///
    /// Errors: [`Error::Shape`] names the array that does not fit.
    pub fn moe_block(
        &self,
        stream: &[f32],
        attn_out: &[f32],
        local_start: i32,
        num_tokens_non_padded: Option<usize>,
    ) -> Result<MoeSegment> {
        let (config, weights) = (&self.config, &self.weights);
        let tokens = self.tokens("stream", stream.len(), config.hidden, None)?;
        self.tokens("attn_out", attn_out.len(), config.hidden, Some(tokens))?;

        let AttnBoundary { stream_after_attn, ffn_input } = attn_boundary(config, weights, stream, attn_out);
        let router_logits = router(config, weights, &ffn_input);
        let topk = router_topk(config, weights, &router_logits);
        let lists = ExpertLists::new(config, &topk.ids, local_start, num_tokens_non_padded.unwrap_or(tokens));
        let pooled = pooler(config, weights, &ffn_input);
        let expert_input = pre_expert_norm(config, weights, &pooled);
        let inter = w13(config, weights, &expert_input, &lists);
        let y = w2(config, weights, &inter, &lists);
        let moe_mix = combine(config, weights, &y, &topk.scores, &lists);
        Ok(MoeSegment {
            moe_mix,
            stream_after_attn,
            ffn_input,
            router_logits,
            topk_ids: topk.ids,
            topk_scores: topk.scores,
            expert_input,
        })
    }

    /// The unpooler: the ranks' summed `moe_mix` `[T, expert_dim]` to `[T, hidden]`, up to
    /// `sliced_max_tokens` tokens zero outside the slice of `rank`, to be gathered over the ranks.
    ///
    /// Errors: [`Error::Shape`]; [`Error::Limit`] for a rank that is not there.
    pub fn unpool_block(&self, moe_mix: &[f32], rank: usize) -> Result<Vec<f32>> {
        let config = &self.config;
        self.tokens("moe_mix", moe_mix.len(), config.expert_dim, None)?;
        let ranks = config.hidden / config.unpool_slice;
        if rank >= ranks {
            return Err(Error::Limit { what: "rank".into(), limit: ranks as u64 - 1, got: rank as u64 });
        }
        Ok(unpooler(config, &self.weights, moe_mix, rank))
    }

    /// The second boundary: `stream_after_attn` and the gathered `ffn_out`, both `[T, hidden]`.
    ///
    /// Errors: [`Error::Shape`] names the array that does not fit.
    pub fn ffn_block(&self, stream_after_attn: &[f32], ffn_out: &[f32]) -> Result<FfnBoundary> {
        let tokens = self.tokens("stream_after_attn", stream_after_attn.len(), self.config.hidden, None)?;
        self.tokens("ffn_out", ffn_out.len(), self.config.hidden, Some(tokens))?;
        Ok(ffn_boundary(&self.config, &self.weights, stream_after_attn, ffn_out))
    }

    /// The whole layer, with the identity in place of the communication between ranks. [`Error::Shape`],
    /// [`Error::Value`] or [`Error::Stride`] names the array that does not fit.
    pub fn forward(&self, input: &StepInput, cache: &mut Cache, options: &StepOptions) -> Result<StepOutput> {
        self.forward_with(input, cache, options, &Identity)
    }

    /// The whole layer on one of several ranks. The taps `attn_out` and `moe_mix` are the ranks' sums, and `ffn_out`
    /// has every slice.
    ///
    /// Errors as [`CpuLayer::forward`]; [`Error::Plan`] for another rank than the options', and the collective's own.
    pub fn forward_with(
        &self,
        input: &StepInput,
        cache: &mut Cache,
        options: &StepOptions,
        ranks: &dyn Collective,
    ) -> Result<StepOutput> {
        let tokens = self.tokens("stream", input.stream.len(), self.config.hidden, None)?;
        self.tokens("attn_input", input.attn_input.len(), self.config.hidden, Some(tokens))?;
        collective::check_rank(ranks, options.rank, self.config.hidden / self.config.unpool_slice)?;
        let mut attention = self.attention_block(input.attn_input, &input.batch, cache, options)?;
        sum(ranks, "attn_out", &mut attention.attn_out)?;
        let mut moe =
            self.moe_block(input.stream, &attention.attn_out, input.local_start, input.num_tokens_non_padded)?;
        sum(ranks, "moe_mix", &mut moe.moe_mix)?;
        let mut ffn_out = self.unpool_block(&moe.moe_mix, options.rank)?;
        self.gather_slices(ranks, options.rank, &mut ffn_out)?;
        let end = self.ffn_block(&moe.stream_after_attn, &ffn_out)?;
        Ok(StepOutput {
            hidden: end.hidden.iter().map(|&v| bf16::from_f32(v)).collect(),
            stream: end.stream,
            topk_ids: moe.topk_ids.clone(),
            topk_scores: moe.topk_scores.clone(),
            taps: (options.taps == Taps::All).then(|| TapValues {
                attn_core: attention.attn_core,
                attn_out: attention.attn_out,
                stream_after_attn: moe.stream_after_attn,
                ffn_input: moe.ffn_input,
                router_logits: moe.router_logits.iter().map(|&l| l as f32).collect(),
                topk_ids: moe.topk_ids,
                topk_scores: moe.topk_scores,
                expert_input: moe.expert_input,
                moe_mix: moe.moe_mix,
                ffn_out,
            }),
        })
    }

    /// Completes `ffn_out` `[T, hidden]`, of which this rank has its slice, by the other ranks' slices.
    fn gather_slices(&self, ranks: &dyn Collective, rank: usize, ffn_out: &mut [f32]) -> Result<()> {
        let (hidden, width) = (self.config.hidden, self.config.unpool_slice);
        let tokens = ffn_out.len() / hidden;
        if ranks.is_identity() || tokens == 0 || !self.config.sliced(tokens) {
            return Ok(());
        }
        let own: Vec<f32> =
            ffn_out.chunks(hidden).flat_map(|row| row[rank * width..][..width].iter().copied()).collect();
        let gathered = ranks.all_gather_host("ffn_out", &own)?;
        for (i, slice) in gathered.chunks(width).enumerate() {
            let (other, token) = (i / tokens, i % tokens);
            ffn_out[token * hidden + other * width..][..width].copy_from_slice(slice);
        }
        Ok(())
    }

    /// The number of rows of `width` in `elements`, equal to `wanted` where that is given.
    fn tokens(&self, tensor: &str, elements: usize, width: usize, wanted: Option<usize>) -> Result<usize> {
        let tokens = elements / width;
        if elements % width != 0 || wanted.is_some_and(|w| w != tokens) {
            let rows = wanted.unwrap_or(tokens);
            return Err(Error::Shape { tensor: tensor.into(), wanted: vec![rows, width], got: vec![elements] });
        }
        Ok(tokens)
    }
}

/// Puts the ranks' sum in the place of a partial.
fn sum(ranks: &dyn Collective, name: &'static str, partial: &mut [f32]) -> Result<()> {
    if ranks.is_identity() || partial.is_empty() {
        return Ok(());
    }
    ranks.all_reduce_host(name, partial)
}
