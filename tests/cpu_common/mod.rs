//! What the CPU tests share.
#![allow(dead_code, unused_macros, unused_imports)] // each test binary uses a part

pub mod naive;
pub mod pairwise;
mod steps;

use half::bf16;
use muse_spark_layer::backend::cpu::{Batch, CpuLayer, StepInput, StepOptions, StepOutput};
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::tensor::NamedTensors;
use muse_spark_layer::{LayerConfig, LayerKind, QueryPrecision, Taps};

pub use muse_spark_layer::numerics::relative_l2;
pub use steps::{only, part, rows, tokens, with_pages_renamed};

pub fn widen(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|v| v.to_f32()).collect()
}

/// A layer of `config` with synthetic weights.
pub fn layer(config: &LayerConfig, seed: u64) -> CpuLayer<'static> {
    CpuLayer::new(config.clone(), synthetic::weights(config, seed).unwrap()).unwrap()
}

/// A copy of `weights` with one tensor changed.
pub fn with(weights: &NamedTensors<'static>, change: impl FnOnce(&mut NamedTensors<'static>)) -> NamedTensors<'static> {
    let mut out = weights.clone();
    change(&mut out);
    out
}

/// Runs a step; the cache in `step` is updated.
pub fn run(layer: &CpuLayer, step: &mut SyntheticStep, options: &StepOptions) -> StepOutput {
    let SyntheticStep { input, cache } = step;
    layer.forward(&input.view(), &mut cache.view(), options).unwrap()
}

/// Unrounded queries and all taps.
pub fn exact(kind: LayerKind) -> StepOptions {
    StepOptions { taps: Taps::All, ..StepOptions::new(kind, QueryPrecision::Fp32) }
}

/// The specification of a batch with equal query lengths.
pub fn spec(batch: usize, q_len: usize, ctx: usize, kind: LayerKind, page_size: usize) -> StepSpec {
    StepSpec { page_size, ..StepSpec::new(batch, q_len, ctx, kind) }
}

/// The cached row of `position` of request `b`, or `None` when it is not visible.
pub fn cache_row(batch: &Batch, b: usize, position: usize, page_size: usize, pages: usize) -> Option<usize> {
    let column = position / page_size;
    if column >= batch.table_width {
        return None;
    }
    let page = batch.page_table[b * batch.table_stride + column];
    (page >= 0 && (page as usize) < pages).then(|| page as usize * page_size + position % page_size)
}

/// Asserts that `got` is within `bound` of `want` in relative L2.
#[track_caller]
pub fn close(what: &str, got: &[f32], want: &[f32], bound: f64) {
    let error = relative_l2(got, want);
    assert!(error <= bound, "{what}: relative L2 error {error:.3e} is past {bound:.1e}");
}

/// A step input whose every array is empty but the offsets.
pub fn nothing() -> StepInput<'static> {
    StepInput {
        stream: &[],
        attn_input: &[],
        batch: Batch {
            positions: &[],
            cache_loc: &[],
            cu_seqlens_q: &[0],
            cache_seqlens: &[],
            page_table: &[],
            table_width: 0,
            table_stride: 0,
        },
        local_start: 0,
        num_tokens_non_padded: None,
    }
}
