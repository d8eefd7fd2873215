//! The layer's weights by the reference's names, with shapes and element types.

use crate::config::{LayerConfig, WeightKind};
use crate::tensor::DType;

/// One tensor of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The tensor's name.
    pub name: &'static str,
    /// Element types taken, the released one first.
    pub dtypes: &'static [DType],
    /// Shapes taken, the released one first.
    pub shapes: Vec<Vec<usize>>,
    /// May be left out: the last layer has no next layer's norm.
    pub optional: bool,
}

pub(crate) const BF16: &[DType] = &[DType::Bf16];
pub(crate) const F32: &[DType] = &[DType::F32];
/// Norm weights and gates: BF16 in the release, FP32 taken as it is.
pub(crate) const VECTOR: &[DType] = &[DType::Bf16, DType::F32];
/// Codes and block scales are bytes; a file may say so or name the format.
pub(crate) const CODES: &[DType] = &[DType::U8];
pub(crate) const SCALES: &[DType] = &[DType::E4m3, DType::U8];

/// Every tensor of a layer of `config`, in the order of the dataflow.
pub fn specs(config: &LayerConfig) -> Vec<Spec> {
    let c = config;
    let (h, d, e) = (c.hidden, c.expert_dim, c.local_experts);
    let one = |name, dtypes, shape: &[usize]| Spec { name, dtypes, shapes: vec![shape.to_vec()], optional: false };
    let mut all = vec![
        one("qkv_gate", BF16, &[c.qkv_rows(), h]),
        one("o", BF16, &[h, c.q_size()]),
        one("attn_residual_gate", VECTOR, &[h]),
        one("pre_ffn_norm", VECTOR, &[h]),
        one("router", F32, &[c.n_experts, h]),
        one("router_bias", F32, &[c.n_experts]),
        one("pooler", BF16, &[d, h]),
        one("pre_expert_norm", VECTOR, &[d]),
    ];
    match c.experts {
        WeightKind::Nvfp4 => {
            all.push(one("w13", CODES, &[e, 2 * d, d / 2]));
            all.push(one("w13_sf", SCALES, &[e, 2 * d, d / 16]));
            // Gate and up have their own; one for both is broadcast.
            all.push(Spec { shapes: vec![vec![e, 2], vec![e]], ..one("w13_gs", F32, &[]) });
            all.push(one("w2", CODES, &[e, d, d / 2]));
            all.push(one("w2_sf", SCALES, &[e, d, d / 16]));
            all.push(one("w2_gs", F32, &[e]));
        }
        WeightKind::Bf16 => {
            all.push(one("w13", BF16, &[e, 2 * d, d]));
            all.push(one("w2", BF16, &[e, d, d]));
        }
    }
    all.push(one("post_expert_norm", VECTOR, &[d]));
    all.push(one("unpooler", BF16, &[h, d]));
    all.push(one("post_ffn_norm", VECTOR, &[h]));
    all.push(one("ffn_residual_gate", VECTOR, &[h]));
    all.push(Spec { optional: true, ..one("next_pre_attn_norm", VECTOR, &[h]) });
    all
}

/// Bytes of a layer's weights as the reference holds them.
#[doc(hidden)]
pub fn bytes(config: &LayerConfig) -> u64 {
    let size = |s: &Spec| s.shapes[0].iter().product::<usize>() as u64 * s.dtypes[0].size() as u64;
    specs(config).iter().map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_layer_is_a_bit_over_a_gigabyte() {
        let gib = bytes(&LayerConfig::muse_spark_tp8()) as f64 / (1u64 << 30) as f64;
        assert!((1.0..1.2).contains(&gib), "{gib}");
    }
}
