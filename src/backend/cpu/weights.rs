//! A layer's weights on the host, in the form they were stored in.

use crate::config::{LayerConfig, WeightKind};
use crate::error::Result;
use crate::tensor::{HostData, NamedTensors};
use crate::weights;
use half::bf16;
use std::borrow::Cow;

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
/// | `attn_residual_gate`, `pre_ffn_norm`, `post_ffn_norm`, `ffn_residual_gate` | `[hidden]` | BF16 or FP32 |
/// | `next_pre_attn_norm` (absent after the last layer) | `[hidden]` | BF16 or FP32 |
/// | `router`, `router_bias` | `[n_experts, hidden]`, `[n_experts]` | FP32 |
/// | `pooler` | `[expert_dim, hidden]` | BF16 |
/// | `pre_expert_norm`, `post_expert_norm` | `[expert_dim]` | BF16 or FP32 |
/// | `w13`, `w13_sf`, `w13_gs` | `[local, 2 dim, dim / 2]`, `[local, 2 dim, dim / 16]`, `[local, 2]` or `[local]` | U8, E4M3, FP32 |
/// | `w2`, `w2_sf`, `w2_gs` | `[local, dim, dim / 2]`, `[local, dim, dim / 16]`, `[local]` | U8, E4M3, FP32 |
/// | `w13`, `w2` of BF16 experts | `[local, 2 dim, dim]`, `[local, dim, dim]` | BF16 |
/// | `unpooler` | `[hidden, expert_dim]` | BF16 |
#[derive(Clone, Debug)]
pub struct CpuWeights<'a> {
    tensors: NamedTensors<'a>,
    experts: WeightKind,
}

impl<'a> CpuWeights<'a> {
    /// Checks names, types, shapes and block scales.
    pub fn new(config: &LayerConfig, tensors: NamedTensors<'a>) -> Result<CpuWeights<'a>> {
        config.validate()?;
        weights::check_host(config, &tensors)?;
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

    /// A norm's weights or a residual gate, BF16 or FP32.
    pub(super) fn vector(&self, name: &str) -> Cow<'_, [f32]> {
        match &self.tensors.0[name].data {
            HostData::F32(x) => Cow::Borrowed(x),
            _ => Cow::Owned(self.bf16(name).iter().map(|v| v.to_f32()).collect()),
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

    pub(super) fn router(&self) -> &[f32] {
        self.f32("router")
    }

    pub(super) fn router_bias(&self) -> &[f32] {
        self.f32("router_bias")
    }

    pub(super) fn pooler(&self) -> &[bf16] {
        self.bf16("pooler")
    }

    pub(super) fn unpooler(&self) -> &[bf16] {
        self.bf16("unpooler")
    }

    pub(super) fn has_next_norm(&self) -> bool {
        self.tensors.contains("next_pre_attn_norm")
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
