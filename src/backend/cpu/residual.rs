//! The two residual boundaries.

use super::linalg::rms_norm;
use super::weights::CpuWeights;
use crate::config::LayerConfig;
use crate::weights::derived::residual_coefficients;
use rayon::prelude::*;

/// Multiplies each row of `x` by `1 + w`.
pub(super) fn one_plus(x: &mut [f32], w: &[f32]) {
    for row in x.chunks_exact_mut(w.len()) {
        for (v, w) in row.iter_mut().zip(w) {
            *v *= 1.0 + w;
        }
    }
}

/// `stream <- alpha * stream + beta * branch`, row by row.
fn join(config: &LayerConfig, stream: &mut [f32], branch: &[f32], gate: &[f32]) {
    let (alpha, beta) = residual_coefficients(config, gate);
    let width = config.hidden;
    stream.par_chunks_mut(width).zip(branch.par_chunks(width)).for_each(|(row, branch)| {
        for (i, s) in row.iter_mut().enumerate() {
            *s = alpha[i] * *s + beta[i] * branch[i];
        }
    });
}

/// What the first boundary gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttnBoundary {
    /// `[T, hidden]`.
    pub stream_after_attn: Vec<f32>,
    /// `[T, hidden]`.
    pub ffn_input: Vec<f32>,
}

/// `attn_boundary`: `stream` and `attn_out` `[T, hidden]` (summed over the ranks). The post-attention
/// norm (eps `post_norm_eps`) has no weight; `ffn_input = rms(stream, rms_eps) * (1 + pre_ffn_norm)`.
pub fn attn_boundary(config: &LayerConfig, weights: &CpuWeights, stream: &[f32], attn_out: &[f32]) -> AttnBoundary {
    let mut branch = attn_out.to_vec();
    rms_norm(&mut branch, config.hidden, config.post_norm_eps);
    let mut stream_after_attn = stream.to_vec();
    join(config, &mut stream_after_attn, &branch, &weights.vector("attn_residual_gate"));
    let mut ffn_input = stream_after_attn.clone();
    rms_norm(&mut ffn_input, config.hidden, config.rms_eps);
    one_plus(&mut ffn_input, &weights.vector("pre_ffn_norm"));
    AttnBoundary { stream_after_attn, ffn_input }
}

/// What the second boundary gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FfnBoundary {
    /// `[T, hidden]`.
    pub stream: Vec<f32>,
    /// `[T, hidden]`, before it is rounded to BF16; empty without `next_pre_attn_norm`.
    pub hidden: Vec<f32>,
}

/// `ffn_boundary`: `ffn_out` `[T, hidden]`, with zeros where no rank's slice is known. The branch is
/// multiplied by `1 + post_ffn_norm` before its norm (eps `post_norm_eps`, over all columns).
pub fn ffn_boundary(
    config: &LayerConfig,
    weights: &CpuWeights,
    stream_after_attn: &[f32],
    ffn_out: &[f32],
) -> FfnBoundary {
    let mut branch = ffn_out.to_vec();
    one_plus(&mut branch, &weights.vector("post_ffn_norm"));
    rms_norm(&mut branch, config.hidden, config.post_norm_eps);
    let mut stream = stream_after_attn.to_vec();
    join(config, &mut stream, &branch, &weights.vector("ffn_residual_gate"));
    let mut hidden = Vec::new();
    if weights.has_next_norm() {
        hidden = stream.clone();
        rms_norm(&mut hidden, config.hidden, config.rms_eps);
        one_plus(&mut hidden, &weights.vector("next_pre_attn_norm"));
    }
    FfnBoundary { stream, hidden }
}
