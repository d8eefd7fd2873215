//! A layer's weights on the host, in the form they were stored in.

use crate::config::{LayerConfig, WeightKind};
use crate::error::{Error, Result};
use crate::tensor::{DType, HostData, NamedTensors};
use crate::weights::nvfp4;
use half::bf16;

/// One of the two expert matrices, all local experts.
pub(super) enum Experts<'a> {
    /// `codes` `[experts, rows, k / 2]`, `block_scales` `[experts, rows, k / 16]` E4M3.
    Nvfp4 { codes: &'a [u8], block_scales: &'a [u8] },
    /// `[experts, rows, k]`.
    Bf16 { values: &'a [bf16] },
}

/// Checked weights under the reference's names. They may be borrowed (a memory-mapped file, another
/// owner's arrays) and are never widened as a whole.
///
/// | name | shape | type |
/// |---|---|---|
/// | `qkv_gate` | `[qkv_rows, hidden]` | BF16 |
/// | `o` | `[hidden, q_size]` | BF16 |
/// | `attn_residual_gate`, `pre_ffn_norm`, `post_ffn_norm`, `ffn_residual_gate` | `[hidden]` | BF16 |
/// | `next_pre_attn_norm` (absent after the last layer) | `[hidden]` | BF16 |
/// | `router`, `router_bias` | `[n_experts, hidden]`, `[n_experts]` | FP32 |
/// | `pooler` | `[expert_dim, hidden]` | BF16 |
/// | `pre_expert_norm`, `post_expert_norm` | `[expert_dim]` | BF16 |
/// | `w13`, `w13_sf`, `w13_gs` | `[local, 2 dim, dim / 2]`, `[local, 2 dim, dim / 16]`, `[local, 2]` or `[local]` | U8, E4M3, FP32 |
/// | `w2`, `w2_sf`, `w2_gs` | `[local, dim, dim / 2]`, `[local, dim, dim / 16]`, `[local]` | U8, E4M3, FP32 |
/// | `w13`, `w2` of BF16 experts | `[local, 2 dim, dim]`, `[local, dim, dim]` | BF16 |
/// | `unpooler` | `[hidden, expert_dim]` | BF16 |
#[derive(Clone, Debug)]
pub struct CpuWeights<'a> {
    tensors: NamedTensors<'a>,
    experts: WeightKind,
}

/// Wanted tensors: name, type, shape.
pub fn expected(config: &LayerConfig) -> Vec<(&'static str, DType, Vec<usize>)> {
    let (h, d, e) = (config.hidden, config.expert_dim, config.local_experts);
    let mut out = vec![
        ("qkv_gate", DType::Bf16, vec![config.qkv_rows(), h]),
        ("o", DType::Bf16, vec![h, config.q_size()]),
        ("attn_residual_gate", DType::Bf16, vec![h]),
        ("pre_ffn_norm", DType::Bf16, vec![h]),
        ("router", DType::F32, vec![config.n_experts, h]),
        ("router_bias", DType::F32, vec![config.n_experts]),
        ("pooler", DType::Bf16, vec![d, h]),
        ("pre_expert_norm", DType::Bf16, vec![d]),
        ("post_expert_norm", DType::Bf16, vec![d]),
        ("unpooler", DType::Bf16, vec![h, d]),
        ("post_ffn_norm", DType::Bf16, vec![h]),
        ("ffn_residual_gate", DType::Bf16, vec![h]),
    ];
    match config.experts {
        WeightKind::Nvfp4 => out.extend([
            ("w13", DType::U8, vec![e, 2 * d, d / 2]),
            ("w13_sf", DType::E4m3, vec![e, 2 * d, d / nvfp4::BLOCK]),
            ("w13_gs", DType::F32, vec![e, 2]),
            ("w2", DType::U8, vec![e, d, d / 2]),
            ("w2_sf", DType::E4m3, vec![e, d, d / nvfp4::BLOCK]),
            ("w2_gs", DType::F32, vec![e]),
        ]),
        WeightKind::Bf16 => {
            out.extend([("w13", DType::Bf16, vec![e, 2 * d, d]), ("w2", DType::Bf16, vec![e, d, d])]);
        }
    }
    out
}

impl<'a> CpuWeights<'a> {
    /// Checks names, types, shapes and block scales.
    pub fn new(config: &LayerConfig, tensors: NamedTensors<'a>) -> Result<CpuWeights<'a>> {
        config.validate()?;
        for (name, dtype, shape) in expected(config) {
            let tensor = tensors.get(name)?;
            if name == "w13_gs" && tensor.shape == [config.local_experts] {
                tensor.expect(name, dtype, &[config.local_experts])?;
            } else {
                tensor.expect(name, dtype, &shape)?;
            }
            if dtype == DType::E4m3 {
                nvfp4::check_scales(name, tensor.as_e4m3(name)?)?;
            }
        }
        if tensors.contains("next_pre_attn_norm") {
            tensors.get("next_pre_attn_norm")?.expect("next_pre_attn_norm", DType::Bf16, &[config.hidden])?;
        }
        for (name, tensor) in &tensors.0 {
            let known = name == "next_pre_attn_norm" || expected(config).iter().any(|(n, ..)| n == name);
            if !known {
                return Err(Error::Value {
                    what: "weights".into(),
                    wanted: "only the layer's own tensors".into(),
                    got: format!("{name} {:?}", tensor.shape),
                });
            }
        }
        Ok(CpuWeights { tensors, experts: config.experts })
    }

    /// The tensors.
    pub fn tensors(&self) -> &NamedTensors<'a> {
        &self.tensors
    }

    // `new` has checked names and types, so these have one case each.
    fn bf16(&self, name: &str) -> &[bf16] {
        match &self.tensors.0[name].data {
            HostData::Bf16(x) => x,
            _ => &[],
        }
    }

    fn f32(&self, name: &str) -> &[f32] {
        match &self.tensors.0[name].data {
            HostData::F32(x) => x,
            _ => &[],
        }
    }

    fn u8(&self, name: &str) -> &[u8] {
        match &self.tensors.0[name].data {
            HostData::U8(x) | HostData::E4m3(x) => x,
            _ => &[],
        }
    }

    pub(super) fn qkv_gate(&self) -> &[bf16] {
        self.bf16("qkv_gate")
    }

    pub(super) fn o(&self) -> &[bf16] {
        self.bf16("o")
    }

    pub(super) fn attn_residual_gate(&self) -> &[bf16] {
        self.bf16("attn_residual_gate")
    }

    pub(super) fn pre_ffn_norm(&self) -> &[bf16] {
        self.bf16("pre_ffn_norm")
    }

    pub(super) fn router(&self) -> &[f32] {
        self.f32("router")
    }

    pub(super) fn router_bias(&self) -> &[f32] {
        self.f32("router_bias")
    }

    pub(super) fn pooler(&self) -> &[bf16] {
        self.bf16("pooler")
    }

    pub(super) fn pre_expert_norm(&self) -> &[bf16] {
        self.bf16("pre_expert_norm")
    }

    pub(super) fn post_expert_norm(&self) -> &[bf16] {
        self.bf16("post_expert_norm")
    }

    pub(super) fn unpooler(&self) -> &[bf16] {
        self.bf16("unpooler")
    }

    pub(super) fn post_ffn_norm(&self) -> &[bf16] {
        self.bf16("post_ffn_norm")
    }

    pub(super) fn ffn_residual_gate(&self) -> &[bf16] {
        self.bf16("ffn_residual_gate")
    }

    pub(super) fn next_pre_attn_norm(&self) -> Option<&[bf16]> {
        self.tensors.contains("next_pre_attn_norm").then(|| self.bf16("next_pre_attn_norm"))
    }

    fn experts(&self, name: &str, scales: &str) -> Experts<'_> {
        match self.experts {
            WeightKind::Nvfp4 => Experts::Nvfp4 { codes: self.u8(name), block_scales: self.u8(scales) },
            WeightKind::Bf16 => Experts::Bf16 { values: self.bf16(name) },
        }
    }

    pub(super) fn w13(&self) -> Experts<'_> {
        self.experts("w13", "w13_sf")
    }

    pub(super) fn w2(&self) -> Experts<'_> {
        self.experts("w2", "w2_sf")
    }

    /// Global scales of an expert's gate and up rows; one given for both is used for both.
    pub(super) fn w13_scale(&self, expert: usize) -> [f32; 2] {
        match self.experts {
            WeightKind::Bf16 => [1.0, 1.0],
            WeightKind::Nvfp4 if self.tensors.0["w13_gs"].shape.len() == 1 => [self.f32("w13_gs")[expert]; 2],
            WeightKind::Nvfp4 => [self.f32("w13_gs")[2 * expert], self.f32("w13_gs")[2 * expert + 1]],
        }
    }

    pub(super) fn w2_scale(&self, expert: usize) -> f32 {
        match self.experts {
            WeightKind::Bf16 => 1.0,
            WeightKind::Nvfp4 => self.f32("w2_gs")[expert],
        }
    }
}
