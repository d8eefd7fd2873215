//! Router, pooler, experts and unpooler.

use super::linalg::{project, project_bf16, rms_norm, widen};
use super::residual::one_plus;
use super::weights::{CpuWeights, Experts};
use crate::config::LayerConfig;
use crate::numerics::sigmoid;
use crate::routing::{self, ExpertLists, TopK};
use crate::weights::nvfp4;
use rayon::prelude::*;

/// `router`: logits `[T, n_experts]` before the multiplier, in FP64, from `ffn_input` `[T, hidden]`.
pub fn router(config: &LayerConfig, weights: &CpuWeights, ffn_input: &[f32]) -> Vec<f64> {
    let x: Vec<f64> = ffn_input.iter().map(|&v| f64::from(v)).collect();
    let router = weights.router();
    project(&x, config.hidden, config.n_experts, |r, out| {
        for (o, &w) in out.iter_mut().zip(&router[r * config.hidden..]) {
            *o = f64::from(w);
        }
    })
}

/// `router_topk`: the experts of each token and their weights, from logits `[T, n_experts]`.
pub fn router_topk(config: &LayerConfig, weights: &CpuWeights, logits: &[f64]) -> TopK {
    routing::router_topk(config, logits, weights.router_bias())
}

/// `pooler`: `ffn_input` `[T, hidden]` to `[T, expert_dim]`.
pub fn pooler(config: &LayerConfig, weights: &CpuWeights, ffn_input: &[f32]) -> Vec<f32> {
    project_bf16(ffn_input, config.hidden, weights.pooler(), 0..config.expert_dim)
}

/// `pre_expert_norm`: `rms(pooled, rms_eps) * (1 + pre_expert_norm)`, `[T, expert_dim]`.
pub fn pre_expert_norm(config: &LayerConfig, weights: &CpuWeights, pooled: &[f32]) -> Vec<f32> {
    let mut x = pooled.to_vec();
    rms_norm(&mut x, config.expert_dim, config.rms_eps);
    one_plus(&mut x, &weights.vector("pre_expert_norm"));
    x
}

/// Rows of one matrix of one expert, times the rows of `x` `[n, k]`: `[n, rows]`. Global scales are
/// applied to the sums; `scale_of(row)` picks them.
fn expert_gemm(
    x: &[f32],
    k: usize,
    rows: usize,
    experts: &Experts,
    expert: usize,
    scale_of: impl Fn(usize) -> f32 + Sync,
) -> Vec<f32> {
    let mut y = match *experts {
        Experts::Nvfp4 { codes, block_scales } => project(x, k, rows, |r, out| {
            let row = expert * rows + r;
            let codes = &codes[row * k / 2..][..k / 2];
            let scales = &block_scales[row * k / nvfp4::BLOCK..][..k / nvfp4::BLOCK];
            nvfp4::decode_row(codes, scales, out);
        }),
        Experts::Bf16 { values } => project(x, k, rows, |r, out| widen(&values[(expert * rows + r) * k..][..k], out)),
    };
    y.par_chunks_mut(rows).for_each(|row| row.iter_mut().enumerate().for_each(|(r, v)| *v *= scale_of(r)));
    y
}

/// `w13` and SwiGLU: for each local route, in the order of `lists`, `silu(gate) * up` of its expert on
/// its token's row of `expert_input` `[T, expert_dim]`: `[R, expert_dim]`. The first half of an
/// expert's rows are the gate's.
pub fn w13(config: &LayerConfig, weights: &CpuWeights, expert_input: &[f32], lists: &ExpertLists) -> Vec<f32> {
    let dim = config.expert_dim;
    let experts = weights.w13();
    let mut inter = Vec::with_capacity(lists.routes() * dim);
    for e in 0..config.local_experts {
        let routes = &lists.route_token[lists.offsets[e]..lists.offsets[e + 1]];
        if routes.is_empty() {
            continue;
        }
        let mut x = Vec::with_capacity(routes.len() * dim);
        for &t in routes {
            x.extend_from_slice(&expert_input[t * dim..][..dim]);
        }
        let [gate_scale, up_scale] = weights.w13_scale(e);
        let h = expert_gemm(&x, dim, 2 * dim, &experts, e, |r| if r < dim { gate_scale } else { up_scale });
        for row in h.chunks_exact(2 * dim) {
            let (gate, up) = row.split_at(dim);
            inter.extend(gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u));
        }
    }
    inter
}

/// `w2`: `inter` `[R, expert_dim]`, in the order of `lists`, through each route's expert: `[R, expert_dim]`.
pub fn w2(config: &LayerConfig, weights: &CpuWeights, inter: &[f32], lists: &ExpertLists) -> Vec<f32> {
    let dim = config.expert_dim;
    let experts = weights.w2();
    let mut y = Vec::with_capacity(inter.len());
    for e in 0..config.local_experts {
        let x = &inter[lists.offsets[e] * dim..lists.offsets[e + 1] * dim];
        if !x.is_empty() {
            let scale = weights.w2_scale(e);
            y.extend(expert_gemm(x, dim, dim, &experts, e, |_| scale));
        }
    }
    y
}

/// `combine`: per token the sum, by slot, of its local routes' weight times
/// `rms(y * (1 + post_expert_norm), post_norm_eps)`: `y` `[R, expert_dim]` to `[T, expert_dim]`. A token
/// without local routes gets exact zeros.
pub fn combine(
    config: &LayerConfig,
    weights: &CpuWeights,
    y: &[f32],
    topk_scores: &[f32],
    lists: &ExpertLists,
) -> Vec<f32> {
    let dim = config.expert_dim;
    let mut y = y.to_vec();
    one_plus(&mut y, &weights.vector("post_expert_norm"));
    rms_norm(&mut y, dim, config.post_norm_eps);
    let mut out = vec![0.0; topk_scores.len() / config.top_k * dim];
    out.par_chunks_mut(dim).enumerate().for_each(|(t, row)| {
        let slots = t * config.top_k..(t + 1) * config.top_k;
        for (route, &score) in lists.token_route[slots.clone()].iter().zip(&topk_scores[slots]) {
            if let Some(r) = *route {
                for (o, v) in row.iter_mut().zip(&y[r * dim..][..dim]) {
                    *o += v * score;
                }
            }
        }
    });
    out
}

/// `unpooler`: `moe_mix` `[T, expert_dim]` to `[T, hidden]`. Up to `sliced_max_tokens` tokens only the
/// columns of `rank`'s slice are computed; the others are zero.
pub fn unpooler(config: &LayerConfig, weights: &CpuWeights, moe_mix: &[f32], rank: usize) -> Vec<f32> {
    let tokens = moe_mix.len() / config.expert_dim;
    let rows = config.unpool_rows(tokens, rank);
    let part = project_bf16(moe_mix, config.expert_dim, weights.unpooler(), rows.clone());
    if rows.len() == config.hidden {
        return part;
    }
    let mut out = vec![0.0; tokens * config.hidden];
    for (row, part) in out.chunks_exact_mut(config.hidden).zip(part.chunks_exact(rows.len())) {
        row[rows.clone()].copy_from_slice(part);
    }
    out
}
