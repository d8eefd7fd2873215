//! A layer's weights: whole, or one rank's part of a layer that is as many ranks wide.

use super::{stream_basis, Random, CHUNK};
use crate::config::{LayerConfig, WeightKind};
use crate::error::{Error, Result};
use crate::numerics::f32_to_e4m3;
use crate::tensor::{HostTensor, NamedTensors};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// A factor from 1/4 to 3.875: an output scale of one expert.
fn expert_factor(bits: u64) -> f32 {
    (16 + ((bits >> 2) & 15)) as f32 * 2f32.powi((bits & 3) as i32 - 6)
}

/// Weights of a layer under the names and in the types of the reference
/// ([`crate::backend::cpu::CpuWeights`] lists them).
///
/// Errors: [`crate::Error::Config`].
pub fn weights(config: &LayerConfig, seed: u64) -> Result<NamedTensors<'static>> {
    rank_weights(config, seed, 0, 1)
}

/// The dimensions of the layer of which `config` is one of `ranks` ranks: all heads and all experts.
#[doc(hidden)]
pub fn whole_config(config: &LayerConfig, ranks: usize) -> LayerConfig {
    LayerConfig {
        q_heads: config.q_heads * ranks,
        kv_heads: config.kv_heads * ranks,
        local_experts: config.local_experts * ranks,
        ..config.clone()
    }
}

/// The part that rank `rank` of `ranks` holds of the weights of [`whole_config`]: its heads and experts, element by
/// element those of `weights(&whole_config(config, ranks), seed)`, and everything that all ranks hold. The experts
/// begin at `rank * local_experts`.
#[doc(hidden)]
pub fn rank_weights(config: &LayerConfig, seed: u64, rank: usize, ranks: usize) -> Result<NamedTensors<'static>> {
    config.validate()?;
    if rank >= ranks {
        return Err(Error::Limit { what: "rank".into(), limit: ranks.max(1) as u64 - 1, got: rank as u64 });
    }
    let whole = whole_config(config, ranks);
    whole.validate()?;
    let (hidden, dim, local) = (config.hidden, config.expert_dim, config.local_experts);
    let mut out = NamedTensors::new();
    let fan_in = |k: usize| (1.0 / (k as f64).sqrt()) as f32;

    // q, k, v and gate rows of this rank's heads; each group of rows begins elsewhere in the whole.
    let (q, kv, wide_q, wide_kv) = (config.q_size(), config.kv_size(), whole.q_size(), whole.kv_size());
    let row_of = move |row: usize| match row {
        r if r < q => rank * q + r,
        r if r < q + kv => wide_q + rank * kv + (r - q),
        r if r < q + 2 * kv => wide_q + wide_kv + rank * kv + (r - q - kv),
        r => wide_q + 2 * wide_kv + rank * q + (r - q - 2 * kv),
    };
    let mut part = |name: &str, shape: &[usize], std: f32, at: &(dyn Fn(usize) -> usize + Sync)| {
        let random = Random::new(seed, name);
        let data = Random::fill(shape.iter().product(), |i| bf16::from_f32(random.normal(at(i as usize) as u64) * std));
        out.insert(name, HostTensor::bf16(shape, data));
    };
    part("qkv_gate", &[config.qkv_rows(), hidden], fan_in(hidden), &|i| row_of(i / hidden) * hidden + i % hidden);
    part("o", &[hidden, q], fan_in(wide_q), &|i| i / q * wide_q + rank * q + i % q);
    part("attn_residual_gate", &[hidden], 0.3, &|i| i);
    part("pre_ffn_norm", &[hidden], 0.1, &|i| i);
    part("pooler", &[dim, hidden], fan_in(hidden), &|i| i);
    part("pre_expert_norm", &[dim], 0.1, &|i| i);
    part("post_expert_norm", &[dim], 0.1, &|i| i);
    part("unpooler", &[hidden, dim], fan_in(dim), &|i| i);
    part("post_ffn_norm", &[hidden], 0.1, &|i| i);
    part("ffn_residual_gate", &[hidden], 0.3, &|i| i);
    part("next_pre_attn_norm", &[hidden], 0.1, &|i| i);

    // Router rows: noise, and a part along the stream's mean that makes some experts popular.
    let widen = (8192.0 / hidden as f64).sqrt();
    let (std, align) = ((0.045 * widen) as f32, (0.07 * widen) as f32);
    let (mean, _) = stream_basis(hidden);
    let mean: Vec<f32> = mean.iter().map(|m| m * fan_in(hidden)).collect();
    let (noise, along) = (Random::new(seed, "router"), Random::new(seed, "router/align"));
    let router = Random::fill(config.n_experts * hidden, |i| {
        let (row, column) = (i / hidden as u64, i as usize % hidden);
        noise.normal(i) * std + along.normal(row) * align * mean[column]
    });
    out.insert("router", HostTensor::f32(&[config.n_experts, hidden], router));
    let bias: Vec<f32> = Random::new(seed, "router_bias").normals(config.n_experts).iter().map(|b| b * 0.055).collect();
    out.insert("router_bias", HostTensor::f32(&[config.n_experts], bias));

    let first = rank * local;
    for (name, rows) in [("w13", 2 * dim), ("w2", dim)] {
        let factors = Random::new(seed, &format!("{name}_gs"));
        match config.experts {
            WeightKind::Nvfp4 => {
                let codes = Random::new(seed, name).bytes_from(first * rows * dim / 2, local * rows * dim / 2);
                out.insert(name, HostTensor::u8(&[local, rows, dim / 2], codes));
                let each = rows * dim / 16;
                let scales = block_scales(seed, &format!("{name}_sf"), first * each, local * each);
                out.insert(&format!("{name}_sf"), HostTensor::e4m3(&[local, rows, dim / 16], scales));
                // A code times a scale has a root mean square of 220.
                let unit = (1.0 / (220.0 * (dim as f64).sqrt())) as f32;
                let per = if name == "w13" { 2 } else { 1 };
                let own = first * per..(first + local) * per;
                let gs: Vec<f32> = own.map(|i| unit * expert_factor(factors.bits(i as u64))).collect();
                let shape = if per == 2 { vec![local, 2] } else { vec![local] };
                out.insert(&format!("{name}_gs"), HostTensor::f32(&shape, gs));
            }
            WeightKind::Bf16 => {
                let random = Random::new(seed, name);
                let each = (rows * dim) as u64;
                let data = Random::fill(local * rows * dim, |i| {
                    let i = first as u64 * each + i;
                    bf16::from_f32(random.normal(i) * (fan_in(dim) * expert_factor(factors.bits(i / each))))
                });
                out.insert(name, HostTensor::bf16(&[local, rows, dim], data));
            }
        }
    }
    Ok(out)
}

/// E4M3 scales from 32 to 120, one in 64 anything from 0 to 448, subnormals included: `n` of them from `first` on.
fn block_scales(seed: u64, name: &str, first: usize, n: usize) -> Vec<u8> {
    let mut out = Random::new(seed, name).bytes_from(first, n);
    let rare = Random::new(seed, &format!("{name}/rare"));
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(c, part)| {
        for (i, b) in part.iter_mut().enumerate() {
            *b = match *b {
                0..=3 => (rare.byte((first + c * CHUNK + i) as u64) & 0x7f).min(0x7e),
                b => 0x60 + (b & 15),
            };
        }
    });
    out
}

/// Weights that show what the usual ones hide: residual gates that reach the clamp, norm weights far
/// from 1, branches small enough for every epsilon to count, experts whose block scales are subnormal.
#[doc(hidden)]
pub fn stress(config: &LayerConfig, tensors: &mut NamedTensors<'static>) -> Result<()> {
    let dense = |tensors: &mut NamedTensors<'static>, name: &str, rows: Range<usize>, factor: f32| -> Result<()> {
        let tensor = tensors.get(name)?;
        let width = tensor.len() / tensor.shape[0];
        let mut data = tensor.as_bf16(name)?.to_vec();
        for v in &mut data[rows.start * width..rows.end * width] {
            *v = bf16::from_f32(v.to_f32() * factor);
        }
        let tensor = HostTensor::bf16(&tensor.shape.clone(), data);
        tensors.insert(name, tensor);
        Ok(())
    };
    for name in ["attn_residual_gate", "ffn_residual_gate"] {
        dense(tensors, name, 0..config.hidden, 8.0)?;
    }
    for name in ["pre_ffn_norm", "pre_expert_norm", "post_expert_norm", "post_ffn_norm", "next_pre_attn_norm"] {
        let n = tensors.get(name)?.len();
        dense(tensors, name, 0..n, 5.0)?;
    }
    dense(tensors, "qkv_gate", 0..config.q_size() + 2 * config.kv_size(), 2f32.powi(-8))?;
    dense(tensors, "o", 0..config.hidden, 2f32.powi(-9))?;
    dense(tensors, "unpooler", 0..config.hidden, 2f32.powi(-9))?;
    dense(tensors, "pooler", 0..config.expert_dim, 2f32.powi(-9))?;
    if config.experts == WeightKind::Nvfp4 {
        for name in ["w13", "w2"] {
            let scales_name = format!("{name}_sf");
            let scales = tensors.get(&scales_name)?;
            let (shape, mut data) = (scales.shape.clone(), scales.as_e4m3(&scales_name)?.to_vec());
            let each = data.len() / config.local_experts;
            let gs_name = format!("{name}_gs");
            let gs = tensors.get(&gs_name)?;
            let (gs_shape, mut gs) = (gs.shape.clone(), gs.as_f32(&gs_name)?.to_vec());
            let per = gs.len() / config.local_experts;
            for e in (0..config.local_experts).step_by(2) {
                for b in &mut data[e * each..(e + 1) * each] {
                    *b = f32_to_e4m3(crate::numerics::e4m3_to_f32(*b) * 2f32.powi(-14));
                }
                gs[e * per..(e + 1) * per].iter_mut().for_each(|g| *g *= 2f32.powi(14));
            }
            if name == "w2" {
                gs.iter_mut().for_each(|g| *g *= 2f32.powi(-9));
            }
            tensors.insert(&scales_name, HostTensor::e4m3(&shape, data));
            tensors.insert(&gs_name, HostTensor::f32(&gs_shape, gs));
        }
    }
    Ok(())
}
