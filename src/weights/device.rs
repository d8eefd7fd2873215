//! The CUDA backend's form of a layer's weights: matrices packed for the kernels, vectors in FP32.
//!
//! Packing runs on the device. From the host, matrices come in cuts of a few megabytes through the ring of
//! `backend/cuda/staging.rs`, many at a time: a thread gathers a cut's rows in pinned memory, and their copy and
//! the kernel that packs them are queued behind each other. Device tensors are read where they lie, and may be
//! freed once `DeviceWeights::new` is back.
#![allow(unsafe_code)]

use crate::backend::cuda::bridge;
use crate::backend::cuda::params::{Launch, PackDenseParams, PackExpertsParams, PackRouterParams};
use crate::backend::cuda::staging::SLOT_BYTES;
use crate::backend::cuda::{model as m, Buffer, Device};
use crate::config::{LayerConfig, WeightKind};
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceTensor};
use crate::weights::cuts::{Cut, Matrix};
use crate::weights::pieces::Pieces;
use crate::weights::{derived, nvfp4, safetensors, LayerWeights, Source};
use rayon::prelude::*;
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
    /// Two FP16 halves with the norm's weight in them, packed, for the tiled form.
    pub router_tiled: Buffer,
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

/// How a matrix is packed.
enum Form<'p> {
    /// As it is, row by row.
    Rows(&'p Buffer),
    /// As 64 x 64 tiles.
    Dense(&'p Buffer),
    /// As an expert matrix, with `per` FP32 global scales an expert at `global` (0: none).
    Experts { packed: &'p Experts, kind: WeightKind, global: u64, per: usize },
}

/// A matrix to be packed.
struct Packing<'p> {
    /// The source's tensors, which have the matrix's rows, each with the bytes of one: weights, block scales.
    tensors: Vec<(&'static str, usize)>,
    matrix: Matrix,
    k: u32,
    form: Form<'p>,
}

impl Packing<'_> {
    /// Queues the packing of `cut` from compact copies of its rows, at `sources`. `bad` is one zeroed i32.
    fn launch(&self, cut: &Cut, sources: &[u64], bad: u64, launch: &Launch) -> Result<()> {
        let (row, rows) = (self.matrix.packed_row(cut) as u64, self.matrix.rows_of(cut));
        match &self.form {
            Form::Rows(_) => Ok(()),
            Form::Dense(packed) => {
                let params = PackDenseParams {
                    src: sources[0] as *const c_void,
                    dst: (packed.ptr() + row * self.k as u64 * 2) as *mut c_void,
                    rows: rows as i32,
                    k: self.k as i32,
                };
                // SAFETY: both hold rows x k BF16; the shape of the tensor was checked by its name.
                unsafe { bridge::pack_dense(&params, launch) }
            }
            Form::Experts { packed, kind, global, per } => {
                let tiles = row / 64 * (self.k as u64 / 64);
                let (first, per_packed) = (cut.experts.start as u64, self.matrix.halves as u64);
                let global = if *global == 0 { 0 } else { global + 4 * first * *per as u64 };
                let params = PackExpertsParams {
                    codes: sources[0] as *const c_void,
                    block_scale: sources.get(1).map_or(0, |s| *s) as *const c_void,
                    global_scale: global as *const f32,
                    dst: (packed.weight.ptr() + tiles * expert_tile_bytes(*kind)) as *mut c_void,
                    scale: (packed.scale.ptr() + 4 * first * per_packed) as *mut f32,
                    bad_scale: bad as *mut i32,
                    experts: cut.experts.len() as i32,
                    rows: rows as i32,
                    k: self.k as i32,
                    swiglu: (self.matrix.halves == 2) as i32,
                    weight_kind: (*kind == WeightKind::Bf16) as i32,
                    scales_per_expert: *per as i32,
                };
                // SAFETY: the sources' shapes were checked by their names; a cut's tiles follow each other from
                // `dst` on in a buffer sized for all. Cuts of one expert write the same global scales.
                unsafe { bridge::pack_experts(&params, launch) }
            }
        }
    }
}

struct Packer<'a> {
    device: &'a Device,
    source: &'a Source<'a>,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl Packer<'_> {
    fn on_device(&self, name: &str) -> Result<Option<&DeviceTensor>> {
        let Source::Device(tensors) = self.source else { return Ok(None) };
        let tensor = tensors.get(name).ok_or_else(|| Error::Missing { tensor: name.into() })?;
        self.device.check_pointer(name, tensor.ptr())?;
        Ok(Some(tensor))
    }

    fn on_host(&self, name: &str) -> Result<Pieces<'_>> {
        let pieces = match self.source {
            Source::Host(tensors) => tensors.0.get(name).map(Pieces::of),
            Source::Files(tensors) => tensors.get(name).cloned(),
            Source::Device(_) => None,
        };
        pieces.ok_or_else(|| Error::Missing { tensor: name.into() })
    }

    /// A tensor's type, shape and bytes, read from wherever it is.
    fn read(&self, name: &str) -> Result<(DType, Vec<usize>, Vec<u8>)> {
        if let Some(t) = self.on_device(name)? {
            let mut bytes = vec![0; t.len() * t.dtype().size()];
            self.device.read(t.ptr(), &mut bytes)?;
            return Ok((t.dtype(), t.shape().to_vec(), bytes));
        }
        let t = self.on_host(name)?;
        let mut bytes = vec![0; t.bytes()];
        t.copy(0, &mut bytes);
        (self.progress)(bytes.len() as u64);
        Ok((t.dtype, t.shape, bytes))
    }

    /// A floating-point vector on the host, as FP32.
    fn host(&self, name: &str) -> Result<Vec<f32>> {
        let (dtype, shape, bytes) = self.read(name)?;
        safetensors::tensor(name, dtype, &shape, &bytes)?.to_f32(name)
    }

    fn upload(&self, values: &[f32]) -> Result<Buffer> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.device.upload(&bytes)
    }

    /// `1 + w`.
    fn norm(&self, name: &str) -> Result<Buffer> {
        let weight: Vec<f32> = self.host(name)?.iter().map(|w| 1.0 + w).collect();
        self.upload(&weight)
    }

    /// Global scales of expert matrix `name` on the device, and how many an expert has.
    fn global_scales(&self, name: &'static str) -> Result<(Buffer, usize)> {
        let (_, shape, bytes) = self.read(name)?;
        Ok((self.device.upload(&bytes)?, shape.get(1).copied().unwrap_or(1)))
    }

    /// Packs all of them and waits for it.
    fn pack(&self, all: &[Packing]) -> Result<()> {
        match self.source {
            Source::Device(_) => self.pack_in_place(all),
            _ => self.pack_staged(all),
        }
    }

    fn pack_in_place(&self, all: &[Packing]) -> Result<()> {
        // The tensors may still be in the making on some stream; packing runs on the legacy stream.
        self.device.synchronize()?;
        let launch = Launch { stream: std::ptr::null_mut(), sm_count: self.device.sm_count() as i32, dependent: 0 };
        let cuts: Vec<(usize, Cut)> = all.iter().map(|p| p.matrix.whole()).enumerate().collect();
        let bad = self.device.upload(&vec![0; 4 * cuts.len()])?;
        for (i, cut) in &cuts {
            let p = &all[*i];
            let mut sources = Vec::new();
            for (name, _) in &p.tensors {
                sources.extend(self.on_device(name)?.map(DeviceTensor::ptr));
            }
            if let Form::Rows(buffer) = &p.form {
                buffer.write(&self.read(p.tensors[0].0)?.2)?;
            }
            p.launch(cut, &sources, bad.ptr() + 4 * *i as u64, &launch)?;
        }
        refuse_nan(all, &cuts, &bad)
    }

    fn pack_staged(&self, all: &[Packing]) -> Result<()> {
        let staging = self.device.staging()?;
        let mut cuts: Vec<(usize, Cut)> = Vec::new();
        let mut tensors: Vec<Vec<Pieces>> = Vec::new();
        for (i, p) in all.iter().enumerate() {
            let row_bytes = p.tensors.iter().map(|(_, row)| row).sum();
            cuts.extend(p.matrix.cuts(row_bytes, SLOT_BYTES).into_iter().map(|cut| (i, cut)));
            tensors.push(p.tensors.iter().map(|(name, _)| self.on_host(name)).collect::<Result<_>>()?);
        }
        let bad = self.device.upload(&vec![0; 4 * cuts.len()])?;
        // Small uploads from pageable memory are only queued when they return; the slots' streams wait for none.
        self.device.synchronize_stream(0)?;
        let queued = cuts.par_iter().enumerate().with_max_len(1).try_for_each(|(n, (i, cut))| {
            let p = &all[*i];
            let mut slot = staging.take()?;
            let (mut at, mut sources) = (0, Vec::with_capacity(2));
            for ((_, row), tensor) in p.tensors.iter().zip(&tensors[*i]) {
                sources.push(slot.device_ptr() + at as u64);
                for rows in p.matrix.sources(cut) {
                    let bytes = rows.len() * row;
                    tensor.copy(rows.start * row, &mut slot.bytes()[at..at + bytes]);
                    at += bytes;
                }
            }
            if let Form::Rows(buffer) = &p.form {
                slot.copy_to(buffer.ptr() + (p.matrix.packed_row(cut) * p.tensors[0].1) as u64, at)?;
            } else {
                slot.upload(at)?;
                let _current = self.device.make_current()?;
                p.launch(cut, &sources, bad.ptr() + 4 * n as u64, &slot.launch())?;
            }
            drop(slot);
            (self.progress)(at as u64);
            Ok(())
        });
        // Also after an error: what was queued writes into memory that would be freed.
        staging.wait().and(queued)?;
        refuse_nan(all, &cuts, &bad)
    }
}

/// A NaN that packing `cuts` found, as an error; `bad` has 1 + its place in each cut, 0 for none.
fn refuse_nan(all: &[Packing], cuts: &[(usize, Cut)], bad: &Buffer) -> Result<()> {
    let mut found = vec![0; 4 * cuts.len()];
    bad.read(&mut found)?;
    let mut places = cuts.iter().zip(words(&found, i32::from_le_bytes)).filter(|(_, place)| *place != 0);
    let Some(((i, cut), place)) = places.next() else { return Ok(()) };
    let (p, block) = (&all[*i], place as usize - 1);
    let blocks = p.k as usize / nvfp4::BLOCK;
    let index = p.matrix.source(cut, block / blocks) * blocks + block % blocks;
    Err(Error::NanScale { tensor: p.tensors[1].0.into(), index })
}

fn words<const N: usize, T>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).map(|b| from(b.try_into().unwrap_or([0; N]))).collect()
}

impl DeviceWeights {
    /// Packs `weights` for `device` and waits for it; not for capture. On an error nothing stays allocated.
    pub fn new(device: &Device, config: &LayerConfig, weights: &LayerWeights) -> Result<DeviceWeights> {
        m::check_dimensions(config)?;
        let _current = device.make_current()?;
        let p = Packer { device, source: &weights.source, progress: weights.progress.0 };
        let matrix = |rows: u32, k: u32| device.allocate(rows as u64 * k as u64 * 2);
        let (experts, k) = (m::LOCAL_EXPERTS as u64, m::EXPERT_DIM);
        let packed = |rows: u32, scales: u64| -> Result<Experts> {
            let tiles = experts * (rows as u64 / 64) * (k as u64 / 64);
            let weight = device.allocate(tiles * expert_tile_bytes(config.experts))?;
            Ok(Experts { weight, scale: device.allocate(4 * experts * scales)? })
        };
        let qkv_gate = matrix(m::QKV_ROWS, m::HIDDEN)?;
        let o = matrix(m::HIDDEN, m::Q_SIZE)?;
        let router = device.allocate(m::EXPERTS as u64 * m::HIDDEN as u64 * 4)?;
        let pooler = matrix(m::EXPERT_DIM, m::HIDDEN)?;
        let unpooler = matrix(m::HIDDEN, m::EXPERT_DIM)?;
        let (w13, w2) = (packed(2 * k, 2)?, packed(k, 1)?);

        let dense = |name, rows: u32, k: u32, form| {
            let bytes = if matches!(form, Form::Rows(_)) { 4 } else { 2 };
            let matrix = Matrix { experts: 1, rows: rows as usize, halves: 1 };
            Packing { tensors: vec![(name, k as usize * bytes)], matrix, k, form }
        };
        let mut all = vec![
            dense("qkv_gate", m::QKV_ROWS, m::HIDDEN, Form::Dense(&qkv_gate)),
            dense("o", m::HIDDEN, m::Q_SIZE, Form::Dense(&o)),
            dense("router", m::EXPERTS, m::HIDDEN, Form::Rows(&router)),
            dense("pooler", m::EXPERT_DIM, m::HIDDEN, Form::Dense(&pooler)),
            dense("unpooler", m::HIDDEN, m::EXPERT_DIM, Form::Dense(&unpooler)),
        ];
        // Until packing is done.
        let mut global_scales = Vec::new();
        for (names, packed, rows, halves) in
            [(["w13", "w13_sf", "w13_gs"], &w13, 2 * k, 2), (["w2", "w2_sf", "w2_gs"], &w2, k, 1)]
        {
            let (kind, matrix) = (config.experts, Matrix { experts: experts as usize, rows: rows as usize, halves });
            let (k, bytes) = (m::EXPERT_DIM, m::EXPERT_DIM as usize);
            all.push(match kind {
                WeightKind::Bf16 => {
                    let form = Form::Experts { packed, kind, global: 0, per: 1 };
                    Packing { tensors: vec![(names[0], 2 * bytes)], matrix, k, form }
                }
                WeightKind::Nvfp4 => {
                    let (scales, per) = p.global_scales(names[2])?;
                    let form = Form::Experts { packed, kind, global: scales.ptr(), per };
                    global_scales.push(scales);
                    let tensors = vec![(names[0], bytes / 2), (names[1], bytes / nvfp4::BLOCK)];
                    Packing { tensors, matrix, k, form }
                }
            });
        }
        p.pack(&all)?;
        drop((all, global_scales));

        // Two FP16 halves of each weight, and a scale for each expert.
        let router_tiled = device.allocate(router.bytes() + 4 * m::EXPERTS as u64)?;
        let pre_ffn_norm = p.norm("pre_ffn_norm")?;
        let params = PackRouterParams {
            src: router.ptr() as *const f32,
            norm_weight: pre_ffn_norm.ptr() as *const f32,
            dst: router_tiled.ptr() as *mut c_void,
        };
        let launch = Launch { stream: std::ptr::null_mut(), sm_count: device.sm_count() as i32, dependent: 0 };
        // SAFETY: FP32 [256][8192] and [8192] to two FP16 planes of as many elements and FP32 [256].
        unsafe { bridge::pack_router(&params, &launch)? };
        let (attn_alpha, attn_beta) = derived::residual_coefficients(config, &p.host("attn_residual_gate")?);
        let (ffn_alpha, ffn_beta) = derived::residual_coefficients(config, &p.host("ffn_residual_gate")?);
        let weights = DeviceWeights {
            qkv_gate,
            o,
            router,
            router_tiled,
            router_bias: p.upload(&p.host("router_bias")?)?,
            pooler,
            w13,
            w2,
            unpooler,
            attn_alpha: p.upload(&attn_alpha)?,
            attn_beta: p.upload(&attn_beta)?,
            pre_ffn_norm,
            pre_expert_norm: p.norm("pre_expert_norm")?,
            post_expert_norm: p.norm("post_expert_norm")?,
            post_ffn_norm: p.norm("post_ffn_norm")?,
            next_pre_attn_norm: if weights.has_next_norm() { Some(p.norm("next_pre_attn_norm")?) } else { None },
            ffn_alpha: p.upload(&ffn_alpha)?,
            ffn_beta: p.upload(&ffn_beta)?,
            inv_freq: p.upload(&config.inv_freq())?,
        };
        device.synchronize_stream(0)?;
        Ok(weights)
    }

    /// Bytes of device memory held.
    pub fn bytes(&self) -> u64 {
        let next = self.next_pre_attn_norm.as_ref().map_or(0, Buffer::bytes);
        [
            &self.qkv_gate,
            &self.o,
            &self.router,
            &self.router_tiled,
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
