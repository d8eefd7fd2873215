//! The CUDA backend's form of a layer's weights: matrices packed for the kernels, vectors in FP32.
//!
//! Packing runs on the device. Host arrays are uploaded one tensor at a time; device tensors are read
//! where they lie, and may be freed once `DeviceWeights::new` is back.
#![allow(unsafe_code)]

use crate::backend::cuda::bridge;
use crate::backend::cuda::params::{Launch, PackDenseParams, PackExpertsParams, PackRouterParams};
use crate::backend::cuda::{model as m, Buffer, Device};
use crate::config::{LayerConfig, WeightKind};
use crate::error::{Error, Result};
use crate::tensor::{DType, HostTensor};
use crate::weights::{derived, LayerWeights, Source};
use std::ffi::c_void;

/// Bytes of a packed 64 x 64 tile of an expert matrix: 2048 of codes and 256 of scales, or BF16.
fn expert_tile_bytes(kind: WeightKind) -> u64 {
    match kind {
        WeightKind::Nvfp4 => 2304,
        WeightKind::Bf16 => 8192,
    }
}

/// One matrix of all local experts.
#[derive(Debug)]
pub(crate) struct Experts {
    /// Packed tiles, `csrc/moe/nvfp4_layout.h`.
    pub weight: Buffer,
    /// FP32 `[32][2]` (w13) or `[32]` (w2), the packing's power of two included.
    pub scale: Buffer,
}

/// A layer's weights on the device.
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    /// Packed `[2304, 8192]`.
    pub qkv_gate: Buffer,
    /// Packed `[8192, 1024]`.
    pub o: Buffer,
    /// FP32 `[256, 8192]`, for the FP32 form.
    pub router: Buffer,
    /// Three BF16 planes, packed, for the tiled form.
    pub router_planes: Buffer,
    /// FP32 `[256]`.
    pub router_bias: Buffer,
    /// Packed `[4096, 8192]`.
    pub pooler: Buffer,
    pub w13: Experts,
    pub w2: Experts,
    /// Packed `[8192, 4096]`.
    pub unpooler: Buffer,
    /// FP32 `[8192]` each: the first residual boundary.
    pub attn_alpha: Buffer,
    pub attn_beta: Buffer,
    /// FP32, `1 + w`.
    pub pre_ffn_norm: Buffer,
    pub pre_expert_norm: Buffer,
    pub post_expert_norm: Buffer,
    pub post_ffn_norm: Buffer,
    /// `None` on the last layer.
    pub next_pre_attn_norm: Option<Buffer>,
    /// FP32 `[8192]` each: the second residual boundary.
    pub ffn_alpha: Buffer,
    pub ffn_beta: Buffer,
    /// FP32 `[32]`.
    pub inv_freq: Buffer,
}

/// A tensor of the source on the device: where it lies, or a copy that lives as long as this.
struct Staged {
    ptr: u64,
    _copy: Option<Buffer>,
}

struct Packer<'a> {
    device: &'a Device,
    source: &'a Source<'a>,
    launch: Launch,
}

impl Packer<'_> {
    fn stage(&self, name: &str) -> Result<Staged> {
        match self.source {
            Source::Host(tensors) => {
                let copy = self.device.upload(tensors.get(name)?.bytes())?;
                Ok(Staged { ptr: copy.ptr(), _copy: Some(copy) })
            }
            Source::Device(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| Error::Missing { tensor: name.into() })?;
                self.device.check_pointer(name, tensor.ptr())?;
                Ok(Staged { ptr: tensor.ptr(), _copy: None })
            }
        }
    }

    /// A floating-point vector on the host, as FP32.
    fn host(&self, name: &str) -> Result<Vec<f32>> {
        match self.source {
            Source::Host(tensors) => tensors.get(name)?.to_f32(name),
            Source::Device(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| Error::Missing { tensor: name.into() })?;
                self.device.check_pointer(name, tensor.ptr())?;
                let mut bytes = vec![0; tensor.len() * tensor.dtype().size()];
                self.device.read(tensor.ptr(), &mut bytes)?;
                // Through a copy: the bytes of a `Vec<u8>` need not be aligned for FP32.
                let values = match tensor.dtype() {
                    DType::Bf16 => HostTensor::bf16(tensor.shape(), words::<2, _>(&bytes, half::bf16::from_le_bytes)),
                    _ => HostTensor::f32(tensor.shape(), words::<4, _>(&bytes, f32::from_le_bytes)),
                };
                values.to_f32(name)
            }
        }
    }

    fn upload(&self, values: &[f32]) -> Result<Buffer> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.device.upload(&bytes)
    }

    /// `1 + w`.
    fn norm(&self, name: &str) -> Result<Buffer> {
        self.upload(&derived::one_plus(&self.host(name)?))
    }

    fn dense(&self, name: &str, rows: u32, k: u32) -> Result<Buffer> {
        let src = self.stage(name)?;
        let dst = self.device.allocate(rows as u64 * k as u64 * 2)?;
        let params = PackDenseParams {
            src: src.ptr as *const c_void,
            dst: dst.ptr() as *mut c_void,
            rows: rows as i32,
            k: k as i32,
        };
        // SAFETY: both hold rows x k BF16; the shape of `src` was checked by its name.
        unsafe { bridge::pack_dense(&params, &self.launch)? };
        self.device.synchronize()?;
        Ok(dst)
    }

    fn router_planes(&self, rows: &Buffer) -> Result<Buffer> {
        let dst = self.device.allocate(3 * rows.bytes() / 2)?;
        let params = PackRouterParams { src: rows.ptr() as *const f32, dst: dst.ptr() as *mut c_void };
        // SAFETY: FP32 [256][8192] to three BF16 planes of as many elements.
        unsafe { bridge::pack_router(&params, &self.launch)? };
        self.device.synchronize()?;
        Ok(dst)
    }

    /// FP32 values as they are, in memory of the crate's own.
    fn kept(&self, name: &str) -> Result<Buffer> {
        self.upload(&self.host(name)?)
    }

    fn experts(&self, name: &'static str, kind: WeightKind, rows: u32) -> Result<Experts> {
        let (experts, k, swiglu) = (m::LOCAL_EXPERTS, m::EXPERT_DIM, name == "w13");
        let codes = self.stage(name)?;
        let names = [format!("{name}_sf"), format!("{name}_gs")];
        let (block_scale, global_scale, scales_per_expert) = match kind {
            WeightKind::Bf16 => (None, None, 1),
            WeightKind::Nvfp4 => {
                let per_expert = self.elements(&names[1])? / experts as usize;
                (Some(self.stage(&names[0])?), Some(self.stage(&names[1])?), per_expert as i32)
            }
        };
        let tiles = experts as u64 * (rows as u64 / 64) * (k as u64 / 64);
        let weight = self.device.allocate(tiles * expert_tile_bytes(kind))?;
        let scale = self.device.allocate(4 * experts as u64 * if swiglu { 2 } else { 1 })?;
        let bad = self.device.upload(&0i32.to_le_bytes())?;
        let params = PackExpertsParams {
            codes: codes.ptr as *const c_void,
            block_scale: block_scale.as_ref().map_or(0, |s| s.ptr) as *const c_void,
            global_scale: global_scale.as_ref().map_or(0, |s| s.ptr) as *const f32,
            dst: weight.ptr() as *mut c_void,
            scale: scale.ptr() as *mut f32,
            bad_scale: bad.ptr() as *mut i32,
            experts: experts as i32,
            rows: rows as i32,
            k: k as i32,
            swiglu: swiglu as i32,
            weight_kind: (kind == WeightKind::Bf16) as i32,
            scales_per_expert,
        };
        // SAFETY: the sources' shapes were checked by their names; `weight` and `scale` are sized for the
        // packed form.
        unsafe { bridge::pack_experts(&params, &self.launch)? };
        let mut found = [0; 4];
        bad.read(&mut found)?;
        match i32::from_le_bytes(found) {
            0 => Ok(Experts { weight, scale }),
            at => Err(Error::NanScale { tensor: names[0].clone(), index: at as usize - 1 }),
        }
    }

    fn elements(&self, name: &str) -> Result<usize> {
        let missing = || Error::Missing { tensor: name.into() };
        match self.source {
            Source::Host(tensors) => tensors.get(name).map(|t| t.len()),
            Source::Device(tensors) => tensors.get(name).map(|t| t.len()).ok_or_else(missing),
        }
    }
}

fn words<const N: usize, T>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).map(|b| from(b.try_into().unwrap_or([0; N]))).collect()
}

impl DeviceWeights {
    /// Packs `weights` for `device`. Synchronises the device; not for capture.
    pub fn new(device: &Device, config: &LayerConfig, weights: &LayerWeights) -> Result<DeviceWeights> {
        m::check_dimensions(config)?;
        let _current = device.make_current()?;
        // Device tensors may still be in the making on some stream; packing runs on the legacy stream.
        device.synchronize()?;
        let launch = Launch { stream: std::ptr::null_mut(), sm_count: device.sm_count() as i32, dependent: 0 };
        let p = Packer { device, source: &weights.source, launch };
        let (attn_alpha, attn_beta) = derived::residual_coefficients(config, &p.host("attn_residual_gate")?);
        let (ffn_alpha, ffn_beta) = derived::residual_coefficients(config, &p.host("ffn_residual_gate")?);
        let router = p.kept("router")?;
        Ok(DeviceWeights {
            qkv_gate: p.dense("qkv_gate", m::QKV_ROWS, m::HIDDEN)?,
            o: p.dense("o", m::HIDDEN, m::Q_SIZE)?,
            router_planes: p.router_planes(&router)?,
            router,
            router_bias: p.kept("router_bias")?,
            pooler: p.dense("pooler", m::EXPERT_DIM, m::HIDDEN)?,
            w13: p.experts("w13", config.experts, 2 * m::EXPERT_DIM)?,
            w2: p.experts("w2", config.experts, m::EXPERT_DIM)?,
            unpooler: p.dense("unpooler", m::HIDDEN, m::EXPERT_DIM)?,
            attn_alpha: p.upload(&attn_alpha)?,
            attn_beta: p.upload(&attn_beta)?,
            pre_ffn_norm: p.norm("pre_ffn_norm")?,
            pre_expert_norm: p.norm("pre_expert_norm")?,
            post_expert_norm: p.norm("post_expert_norm")?,
            post_ffn_norm: p.norm("post_ffn_norm")?,
            next_pre_attn_norm: if weights.has_next_norm() { Some(p.norm("next_pre_attn_norm")?) } else { None },
            ffn_alpha: p.upload(&ffn_alpha)?,
            ffn_beta: p.upload(&ffn_beta)?,
            inv_freq: p.upload(&derived::inv_freq(config))?,
        })
    }

    /// Bytes of device memory held.
    pub fn bytes(&self) -> u64 {
        let next = self.next_pre_attn_norm.as_ref().map_or(0, Buffer::bytes);
        [
            &self.qkv_gate,
            &self.o,
            &self.router,
            &self.router_planes,
            &self.router_bias,
            &self.pooler,
            &self.w13.weight,
            &self.w13.scale,
            &self.w2.weight,
            &self.w2.scale,
            &self.unpooler,
            &self.attn_alpha,
            &self.attn_beta,
            &self.pre_ffn_norm,
            &self.pre_expert_norm,
            &self.post_expert_norm,
            &self.post_ffn_norm,
            &self.ffn_alpha,
            &self.ffn_beta,
            &self.inv_freq,
        ]
        .iter()
        .map(|b| b.bytes())
        .sum::<u64>()
            + next
    }
}
