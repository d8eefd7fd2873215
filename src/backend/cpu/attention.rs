//! From the fused projection to the gated attention output.

use super::linalg::{gemm_nn, gemm_nt, project_bf16, rms_norm};
use super::step::{Batch, Cache};
use super::weights::CpuWeights;
use crate::config::{LayerConfig, LayerKind, QueryPrecision};
use crate::numerics::{e4m3_to_f32, f32_to_e4m3, sigmoid};
use half::{bf16, f16};
use rayon::prelude::*;

/// Scores held at a time for one block of queries of one key/value head: 16 MiB of FP32.
const SCORE_BLOCK: usize = 4 << 20;
/// Query tokens of a block at most.
const QUERY_BLOCK: usize = 32;

/// `qkv_gate`: `x` `[T, hidden]` to `[T, qkv_rows]`, columns q, k, v, gate.
pub fn qkv_gate(config: &LayerConfig, weights: &CpuWeights, x: &[f32]) -> Vec<f32> {
    project_bf16(x, config.hidden, weights.qkv_gate(), 0..config.qkv_rows())
}

/// What attention needs from `qkv_gate` besides the cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Queries {
    /// `[T, q_heads, head_dim]`: normalised, rotated, rounded and multiplied by `qk_scale_factor`.
    pub q: Vec<f32>,
    /// `[T, q_size]`: the output gate before the sigmoid.
    pub gate: Vec<f32>,
}

/// `x` `[heads, head_dim]` rotated in pairs (2i, 2i + 1) by `position * inv_freq[i]`, the angle in FP32.
pub fn rope(x: &mut [f32], position: i64, inv_freq: &[f32]) {
    // Sine and cosine of the FP32 angle, correctly rounded: computed in FP64.
    let turns: Vec<(f32, f32)> = inv_freq
        .iter()
        .map(|f| {
            let (sin, cos) = f64::from(position as f32 * f).sin_cos();
            (sin as f32, cos as f32)
        })
        .collect();
    for head in x.chunks_exact_mut(2 * inv_freq.len()) {
        for (pair, &(sin, cos)) in head.chunks_exact_mut(2).zip(&turns) {
            let (even, odd) = (pair[0], pair[1]);
            pair[0] = even * cos - odd * sin;
            pair[1] = even * sin + odd * cos;
        }
    }
}

/// Rounds normalised queries and multiplies them by `qk_scale_factor`. BF16 multiplies first, as the
/// reference does; FP16 and E4M3 fold the factor into the softmax scale, that is, multiply after.
pub fn round_queries(q: &mut [f32], precision: QueryPrecision, factor: f32) {
    for v in q {
        *v = match precision {
            QueryPrecision::Fp32 => *v * factor,
            QueryPrecision::Bf16 => bf16::from_f32(*v * factor).to_f32(),
            QueryPrecision::Fp16 => f16::from_f32(*v).to_f32() * factor,
            QueryPrecision::E4m3 => e4m3_to_f32(f32_to_e4m3(*v)) * factor,
        };
    }
}

/// `qk_norm_rope_append`: RMS-norms q and k per head, rotates them (sliding layers), rounds q, and
/// stores k and v in the cache at `batch.cache_loc`, divided by their scales, saturating. Rows below 0
/// or past the pool are not stored, nor row 0 with `skip_slot_zero`. `qkv` is `[T, qkv_rows]`.
pub fn qk_norm_rope_append(
    config: &LayerConfig,
    qkv: &[f32],
    batch: &Batch,
    cache: &mut Cache,
    kind: LayerKind,
    precision: QueryPrecision,
    skip_slot_zero: bool,
) -> Queries {
    let (q_size, kv_size) = (config.q_size(), config.kv_size());
    let inv_freq = config.inv_freq();
    let mut out = Queries::default();
    for (t, row) in qkv.chunks_exact(config.qkv_rows()).enumerate() {
        let (q, rest) = row.split_at(q_size);
        let (k, rest) = rest.split_at(kv_size);
        let (v, gate) = rest.split_at(kv_size);
        let (mut q, mut k) = (q.to_vec(), k.to_vec());
        rms_norm(&mut q, config.head_dim, config.rms_eps);
        rms_norm(&mut k, config.head_dim, config.rms_eps);
        if kind == LayerKind::Sliding {
            rope(&mut q, batch.positions[t], &inv_freq);
            rope(&mut k, batch.positions[t], &inv_freq);
        }
        round_queries(&mut q, precision, config.qk_scale_factor);
        out.q.extend(q);
        out.gate.extend_from_slice(gate);
        let slot = batch.cache_loc[t];
        let slots = (cache.k.len() / kv_size) as i64;
        if (0..slots).contains(&slot) && !(skip_slot_zero && slot == 0) {
            let at = slot as usize * kv_size;
            for (i, (k, v)) in k.iter().zip(v).enumerate() {
                cache.k[at + i] = f32_to_e4m3(k / cache.k_scale);
                cache.v[at + i] = f32_to_e4m3(v / cache.v_scale);
            }
        }
    }
    out
}

/// The keys and values that a request's tokens may see, decoded: positions `first..`.
struct Visible {
    first: i64,
    /// Per position: whether its page id was valid.
    valid: Vec<bool>,
    /// `[kv_heads][positions, head_dim]` each.
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    /// (position - first, head, column) of NaN values, which are 0 in `v` so that they reach nobody
    /// who cannot see them.
    nan_values: Vec<(usize, usize, usize)>,
}

fn gather(config: &LayerConfig, batch: &Batch, cache: &Cache, request: usize, first: i64, end: i64) -> Visible {
    let (heads, dim) = (config.kv_heads, config.head_dim);
    // Nothing past the table is visible, whatever length the request claims.
    let end = end.min((batch.table_width * cache.page_size) as i64);
    let n = (end - first).max(0) as usize;
    let pages = (cache.k.len() / (cache.page_size * config.kv_size())) as i64;
    let table = &batch.page_table[request * batch.table_stride..][..batch.table_width];
    let mut out = Visible {
        first,
        valid: vec![false; n],
        k: vec![vec![0.0; n * dim]; heads],
        v: vec![vec![0.0; n * dim]; heads],
        nan_values: Vec::new(),
    };
    for j in 0..n {
        let position = first as usize + j;
        let Some(&page) = table.get(position / cache.page_size) else { continue };
        if !(0..pages).contains(&i64::from(page)) {
            continue;
        }
        out.valid[j] = true;
        let row = page as usize * cache.page_size + position % cache.page_size;
        for h in 0..heads {
            let at = (row * heads + h) * dim;
            for c in 0..dim {
                out.k[h][j * dim + c] = e4m3_to_f32(cache.k[at + c]);
                let v = e4m3_to_f32(cache.v[at + c]);
                if v.is_nan() {
                    out.nan_values.push((j, h, c));
                } else {
                    out.v[h][j * dim + c] = v;
                }
            }
        }
    }
    out
}

/// `attention` over the paged cache, which holds the step's own entries already: `q` `[T, q_heads,
/// head_dim]` (scaled) to `[T, q_heads, head_dim]`.
///
/// Token `i` of request `b` stands at position `cache_seqlens[b] - cu_seqlens_q[b + 1] + i` and sees the
/// keys up to it, in sliding layers the last `window` of them. A key whose page id is below 0, past the
/// pool or past the table is not visible; a token that sees no key gives zeros.
pub fn attention(config: &LayerConfig, q: &[f32], batch: &Batch, cache: &Cache, kind: LayerKind) -> Vec<f32> {
    let q_size = config.q_size();
    let (group, dim) = (config.group(), config.head_dim);
    let window = config.window_of(kind) as i64;
    let scale = config.sm_scale() * cache.k_scale;
    let mut out = vec![0.0; q.len()];
    for b in 0..batch.requests() {
        let tokens = batch.cu_seqlens_q[b] as usize..batch.cu_seqlens_q[b + 1] as usize;
        if tokens.is_empty() {
            continue;
        }
        let seq = i64::from(batch.cache_seqlens[b]);
        let position = |t: usize| seq - tokens.end as i64 + t as i64;
        let oldest = |t: usize| if window > 0 { (position(t) - window + 1).max(0) } else { 0 };
        let keys = gather(config, batch, cache, b, oldest(tokens.start), seq);
        let rows_at_once = (SCORE_BLOCK / (group * keys.valid.len().max(1))).clamp(1, QUERY_BLOCK);
        let out = &mut out[tokens.start * q_size..tokens.end * q_size];
        out.par_chunks_mut(rows_at_once * q_size).enumerate().for_each(|(block, out)| {
            let start = tokens.start + block * rows_at_once;
            let count = out.len() / q_size;
            // Keys that some token of the block sees, relative to keys.first.
            let known = keys.valid.len();
            let lo = ((oldest(start) - keys.first) as usize).min(known);
            let hi = ((position(start + count - 1) + 1 - keys.first).max(lo as i64) as usize).min(known);
            let n = hi - lo;
            let mut rows = vec![0.0; count * group * dim];
            let mut scores = vec![0.0; count * group * n];
            let mut mixed = vec![0.0; count * group * dim];
            for h in 0..config.kv_heads {
                for (i, row) in rows.chunks_exact_mut(group * dim).enumerate() {
                    row.copy_from_slice(&q[(start + i) * q_size + h * group * dim..][..group * dim]);
                }
                gemm_nt(&rows, &keys.k[h][lo * dim..hi * dim], dim, &mut scores);
                for (i, row) in scores.chunks_exact_mut(n.max(1)).enumerate() {
                    let t = start + i / group;
                    let seen = (oldest(t) - keys.first) as usize - lo;
                    let past = ((position(t) + 1 - keys.first).max(0) as usize).max(lo) - lo;
                    softmax(row, |j| (seen..past).contains(&j) && keys.valid[lo + j], scale);
                }
                gemm_nn(&scores, &keys.v[h][lo * dim..hi * dim], n, &mut mixed);
                for (i, token) in out.chunks_exact_mut(q_size).enumerate() {
                    let dst = &mut token[h * group * dim..][..group * dim];
                    for (d, m) in dst.iter_mut().zip(&mixed[i * group * dim..]) {
                        *d = m * cache.v_scale;
                    }
                    let (first, last) = (oldest(start + i), position(start + i));
                    for &(j, _, c) in keys.nan_values.iter().filter(|x| x.1 == h) {
                        if (first..=last).contains(&(keys.first + j as i64)) {
                            dst.iter_mut().skip(c).step_by(dim).for_each(|d| *d = f32::NAN);
                        }
                    }
                }
            }
        });
    }
    out
}

/// Softmax of `scale * scores` over the visible keys, in place; zeros where a key is not visible.
fn softmax(scores: &mut [f32], visible: impl Fn(usize) -> bool, scale: f32) {
    let mut most = f32::NEG_INFINITY;
    for (j, s) in scores.iter_mut().enumerate() {
        if visible(j) {
            *s *= scale;
            most = most.max(*s);
        }
    }
    let mut sum = 0f64;
    for (j, s) in scores.iter_mut().enumerate() {
        *s = if visible(j) { (*s - most).exp() } else { 0.0 };
        sum += f64::from(*s);
    }
    if sum != 0.0 {
        let inverse = (1.0 / sum) as f32;
        scores.iter_mut().for_each(|s| *s *= inverse);
    }
}

/// `out_norm_gate`: RMS-norms each head of `attn_core` `[T, q_heads, head_dim]` and multiplies by
/// `sigmoid(gate)`: `[T, q_size]`.
pub fn out_norm_gate(config: &LayerConfig, attn_core: &[f32], gate: &[f32]) -> Vec<f32> {
    let mut out = attn_core.to_vec();
    rms_norm(&mut out, config.head_dim, config.rms_eps);
    for (v, g) in out.iter_mut().zip(gate) {
        *v *= sigmoid(*g);
    }
    out
}

/// `o`: `x` `[T, q_size]` to this rank's part of the attention output `[T, hidden]`.
pub fn o(config: &LayerConfig, weights: &CpuWeights, x: &[f32]) -> Vec<f32> {
    project_bf16(x, config.q_size(), weights.o(), 0..config.hidden)
}
