//! The operations once more, as plain FP64 loops written from the formulas: no tiles, no shared code with
//! the library but the number formats, which have tests of their own.

use half::bf16;
use muse_spark_layer::backend::cpu::{Batch, Cache};
use muse_spark_layer::numerics::{e2m1_to_f32, e4m3_to_f32};
use muse_spark_layer::{LayerConfig, LayerKind, QueryPrecision};

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The root of the mean square plus `eps`.
fn rms(x: &[f64], eps: f32) -> f64 {
    (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + f64::from(eps)).sqrt()
}

/// `x` `[T, k]` times the transpose of `w` `[rows, k]`.
pub fn project(x: &[f32], k: usize, rows: usize, w: impl Fn(usize, usize) -> f64) -> Vec<f32> {
    let mut out = Vec::new();
    for token in x.chunks_exact(k) {
        for r in 0..rows {
            out.push((0..k).map(|c| f64::from(token[c]) * w(r, c)).sum::<f64>() as f32);
        }
    }
    out
}

/// A BF16 matrix's element.
pub fn element(w: &[bf16], k: usize) -> impl Fn(usize, usize) -> f64 + '_ {
    move |r, c| w[r * k + c].to_f64()
}

/// An NVFP4 matrix's element: codes two to a byte, low nibble first; a scale per 16.
pub fn nvfp4<'a>(
    codes: &'a [u8],
    scales: &'a [u8],
    gs: impl Fn(usize) -> f32 + 'a,
    k: usize,
) -> impl Fn(usize, usize) -> f64 + 'a {
    move |r, c| {
        let at = r * k + c;
        let code = if at % 2 == 0 { codes[at / 2] & 15 } else { codes[at / 2] >> 4 };
        f64::from(e2m1_to_f32(code)) * f64::from(e4m3_to_f32(scales[at / 16])) * f64::from(gs(r))
    }
}

/// Normalised and rotated heads of one token: `x` `[heads, dim]`. Rotation by complex products.
pub fn norm_rope(config: &LayerConfig, x: &[f32], kind: LayerKind, position: i64) -> Vec<f64> {
    let dim = config.head_dim;
    let mut out = Vec::new();
    for head in x.chunks_exact(dim) {
        let head = wide(head);
        let norm = rms(&head, config.rms_eps);
        for i in 0..dim / 2 {
            let (a, b) = (head[2 * i] / norm, head[2 * i + 1] / norm);
            let angle = match kind {
                LayerKind::Full => 0.0,
                LayerKind::Sliding => {
                    let frequency = 1f32 / config.rope_theta.powf((2 * i) as f64 / dim as f64) as f32;
                    f64::from(position as f32 * frequency)
                }
            };
            out.push(a * angle.cos() - b * angle.sin());
            out.push(a * angle.sin() + b * angle.cos());
        }
    }
    out
}

/// The rounding of one query element, times the QK factor.
pub fn round_query(q: f64, precision: QueryPrecision, factor: f32) -> f64 {
    let factor = f64::from(factor);
    match precision {
        QueryPrecision::Fp32 => q * factor,
        QueryPrecision::Bf16 => bf16::from_f64(q * factor).to_f64(),
        QueryPrecision::Fp16 => half::f16::from_f64(q).to_f64() * factor,
        QueryPrecision::E4m3 => f64::from(nearest_e4m3(q)) * factor,
    }
}

/// The E4M3 value nearest to `x`, by trying all; of two equally near the one with an even byte.
pub fn nearest_e4m3(x: f64) -> f32 {
    let mut best = (f64::INFINITY, 0u8);
    for byte in (0..=255u8).filter(|b| b & 0x7f != 0x7f) {
        let distance = (f64::from(e4m3_to_f32(byte)) - x).abs();
        if distance < best.0 || (distance == best.0 && byte % 2 == 0 && best.1 % 2 == 1) {
            best = (distance, byte);
        }
    }
    e4m3_to_f32(best.1)
}

/// Attention of every token over every position of its request, one key at a time.
pub fn attention(config: &LayerConfig, q: &[f32], batch: &Batch, cache: &Cache, kind: LayerKind) -> Vec<f32> {
    let (dim, heads) = (config.head_dim, config.q_heads);
    let pages = cache.k.len() / (cache.page_size * config.kv_size());
    let mut out = vec![0f32; q.len()];
    for b in 0..batch.cache_seqlens.len() {
        for t in batch.cu_seqlens_q[b] as usize..batch.cu_seqlens_q[b + 1] as usize {
            let position = i64::from(batch.cache_seqlens[b]) - i64::from(batch.cu_seqlens_q[b + 1]) + t as i64;
            for h in 0..heads {
                let kv = h * config.kv_heads / heads;
                let mut seen = Vec::new();
                for p in 0..=position.max(-1) {
                    if kind == LayerKind::Sliding && p <= position - config.window as i64 {
                        continue;
                    }
                    let Some(row) = super::cache_row(batch, b, p as usize, cache.page_size, pages) else { continue };
                    let at = (row * config.kv_heads + kv) * dim;
                    let score: f64 = (0..dim)
                        .map(|c| {
                            let key = f64::from(e4m3_to_f32(cache.k[at + c])) * f64::from(cache.k_scale);
                            f64::from(q[(t * heads + h) * dim + c]) * key
                        })
                        .sum();
                    seen.push((score / (dim as f64).sqrt(), at));
                }
                let most = seen.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = seen.iter().map(|s| (s.0 - most).exp()).sum();
                for c in 0..dim {
                    let sum: f64 = seen
                        .iter()
                        .map(|&(s, at)| (s - most).exp() / total * f64::from(e4m3_to_f32(cache.v[at + c])))
                        .sum();
                    out[(t * heads + h) * dim + c] = (sum * f64::from(cache.v_scale)) as f32;
                }
            }
        }
    }
    out
}

/// Per-head norm times the sigmoid of the gate.
pub fn out_norm_gate(config: &LayerConfig, core: &[f32], gate: &[f32]) -> Vec<f32> {
    let dim = config.head_dim;
    let mut out = Vec::new();
    for (head, gate) in core.chunks_exact(dim).zip(gate.chunks_exact(dim)) {
        let head = wide(head);
        let norm = rms(&head, config.rms_eps);
        out.extend(head.iter().zip(gate).map(|(v, g)| (v / norm * sigmoid(f64::from(*g))) as f32));
    }
    out
}

/// `alpha` and `beta` of a residual gate's element.
pub fn coefficients(config: &LayerConfig, gate: bf16) -> (f64, f64) {
    let w = gate.to_f64() / f64::from(config.residual_temperature);
    let beta = 1.0 / (1.0 + (-w).exp());
    let radicand = (1.0 - beta) * (1.0 + beta);
    (radicand.max(f64::from(config.residual_gate_eps)).sqrt(), beta)
}

/// `alpha * stream + beta * branch / rms(branch)`.
pub fn join(config: &LayerConfig, stream: &[f32], branch: &[f64], gate: &[bf16]) -> Vec<f32> {
    let width = config.hidden;
    let mut out = Vec::new();
    for (stream, branch) in stream.chunks_exact(width).zip(branch.chunks_exact(width)) {
        let norm = rms(branch, config.post_norm_eps);
        for i in 0..width {
            let (alpha, beta) = coefficients(config, gate[i]);
            out.push((alpha * f64::from(stream[i]) + beta * branch[i] / norm) as f32);
        }
    }
    out
}

/// `x / rms(x) * (1 + w)`.
pub fn norm(x: &[f32], w: &[bf16], eps: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for row in x.chunks_exact(w.len()) {
        let row = wide(row);
        let norm = rms(&row, eps);
        out.extend(row.iter().zip(w).map(|(v, w)| (v / norm * (1.0 + w.to_f64())) as f32));
    }
    out
}

/// `x * (1 + w)`, in FP64.
pub fn weigh(x: &[f32], w: &[bf16]) -> Vec<f64> {
    x.iter().enumerate().map(|(i, v)| f64::from(*v) * (1.0 + w[i % w.len()].to_f64())).collect()
}

/// `x (1 + w) / rms(x (1 + w))` of one row.
pub fn post_expert_norm(config: &LayerConfig, y: &[f32], w: &[bf16]) -> Vec<f64> {
    let y = weigh(y, w);
    let norm = rms(&y, config.post_norm_eps);
    y.iter().map(|v| v / norm).collect()
}

/// `silu(gate) * up` of one row `[2, dim]`.
pub fn swiglu(h: &[f32]) -> Vec<f32> {
    let (gate, up) = h.split_at(h.len() / 2);
    gate.iter().zip(up).map(|(&g, &u)| (f64::from(g) * sigmoid(f64::from(g)) * f64::from(u)) as f32).collect()
}

/// Scores of one token: (unbiased, biased).
pub fn scores(config: &LayerConfig, logits: &[f64], bias: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let scores: Vec<f32> = logits.iter().map(|l| sigmoid(l * config.router_multiplier) as f32).collect();
    let biased = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    (scores, biased)
}
