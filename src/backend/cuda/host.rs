//! A step on host arrays: upload, run, download. For checks, examples and the command line; a serving
//! runtime calls [`DecoderLayer::forward`] on its own device memory.
#![allow(unsafe_code)]

use crate::backend::cpu::{Cache, StepInput, StepOptions, StepOutput, TapValues};
use crate::backend::cuda::heuristics::SPLIT_ATTENTION_Q_LEN;
use crate::backend::cuda::{Buffer, Device};
use crate::collective::Collective;
use crate::config::Taps;
use crate::error::{Error, Result};
use crate::kv_cache::PagedKvCache;
use crate::layer::DecoderLayer;
use crate::plan::{PlanKey, ShortRequests};
use crate::step::{AttentionInput, DeviceInput, DeviceOutput, DeviceTaps, Tap};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};
use half::bf16;

/// Device copies of a step's tensors.
#[derive(Debug)]
pub(super) struct Uploads {
    device: Device,
    kept: Vec<Buffer>,
}

macro_rules! upload {
    ($name:ident, $t:ty, $dtype:ident) => {
        fn $name(&mut self, shape: &[usize], values: &[$t]) -> Result<DeviceTensor> {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            self.bytes(DType::$dtype, shape, &bytes)
        }
    };
}

impl Uploads {
    pub(super) fn new(device: &Device) -> Uploads {
        Uploads { device: device.clone(), kept: Vec::new() }
    }

    fn bytes(&mut self, dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<DeviceTensor> {
        let buffer = self.device.upload(bytes)?;
        Ok(self.keep(dtype, shape, buffer))
    }

    /// An output: filled with 0xFF (NaN), so that what a kernel leaves out is seen.
    pub(super) fn output(&mut self, dtype: DType, shape: &[usize]) -> Result<DeviceTensor> {
        let buffer = self.device.allocate(shape.iter().product::<usize>() as u64 * dtype.size() as u64)?;
        buffer.fill(0xFF)?;
        Ok(self.keep(dtype, shape, buffer))
    }

    fn keep(&mut self, dtype: DType, shape: &[usize], buffer: Buffer) -> DeviceTensor {
        // SAFETY: the buffer holds `shape` elements of `dtype` and lives in `kept` until the step is done.
        let view = unsafe { DeviceTensor::contiguous(buffer.ptr(), dtype, shape) };
        self.kept.push(buffer);
        view
    }

    upload!(f32, f32, F32);
    upload!(bf16, bf16, Bf16);
    upload!(i32, i32, I32);
    upload!(i64, i64, I64);

    pub(super) fn read<const N: usize, T>(&self, t: &DeviceTensor, from: fn([u8; N]) -> T) -> Result<Vec<T>> {
        let mut bytes = vec![0; t.len() * t.dtype().size()];
        self.device.read(t.ptr(), &mut bytes)?;
        Ok(bytes.chunks_exact(N).map(|b| from(b.try_into().unwrap_or([0; N]))).collect())
    }

    /// All inputs of a step over `cache` with its scales of keys and values.
    pub(super) fn input(
        &mut self,
        hidden: usize,
        input: &StepInput,
        cache: PagedKvCache,
        scales: [f32; 2],
    ) -> Result<DeviceInput> {
        let batch = &input.batch;
        let (tokens, requests) = (batch.positions.len(), batch.requests());
        let stride = if requests > 1 { batch.table_stride } else { batch.table_width.max(1) };
        let table = self.i32(&[batch.page_table.len()], batch.page_table)?;
        let shape = [requests, batch.table_width];
        // SAFETY: a view of `table`, whose extent `Batch::validate` checks against rows and stride.
        let page_table = unsafe { DeviceTensor::strided(table.ptr(), DType::I32, &shape, &[stride as i64, 1]) };
        Ok(DeviceInput {
            attention: AttentionInput {
                attn_input: self.bf16(&[tokens, hidden], input.attn_input)?,
                positions: self.i64(&[tokens], batch.positions)?,
                cache_loc: self.i64(&[tokens], batch.cache_loc)?,
                cu_seqlens_q: self.i32(&[requests + 1], batch.cu_seqlens_q)?,
                cache_seqlens: self.i32(&[requests], batch.cache_seqlens)?,
                page_table,
                k_scale: self.f32(&[1], &scales[..1])?,
                v_scale: self.f32(&[1], &scales[1..])?,
                cache,
                scheduler_metadata: None,
            },
            stream: self.f32(&[tokens, hidden], input.stream)?,
            local_start: self.i32(&[1], &[input.local_start])?,
            num_tokens_non_padded: match input.num_tokens_non_padded {
                Some(n) => Some(self.i32(&[1], &[n.min(i32::MAX as usize) as i32])?),
                None => None,
            },
        })
    }

    /// A step's outputs.
    pub(super) fn outputs(&mut self, layer: &DecoderLayer, tokens: usize, taps: DeviceTaps) -> Result<DeviceOutput> {
        let (hidden, top_k) = (layer.config().hidden, layer.config().top_k);
        Ok(DeviceOutput {
            hidden: if layer.has_next_norm() { Some(self.output(DType::Bf16, &[tokens, hidden])?) } else { None },
            stream: self.output(DType::F32, &[tokens, hidden])?,
            topk_ids: self.output(DType::I32, &[tokens, top_k])?,
            taps,
        })
    }

    fn read_f32(&self, t: &DeviceTensor) -> Result<Vec<f32>> {
        match t.dtype() {
            DType::Bf16 => Ok(self.read(t, bf16::from_le_bytes)?.into_iter().map(bf16::to_f32).collect()),
            _ => self.read(t, f32::from_le_bytes),
        }
    }
}

/// The key of a step on host arrays.
fn key(input: &StepInput, tokens: usize, page_size: usize, options: &StepOptions) -> Result<PlanKey> {
    let batch = &input.batch;
    batch.validate(tokens)?;
    let offsets = batch.cu_seqlens_q;
    // Short requests at the end, if there is a long one before them.
    let longest_short = SPLIT_ATTENTION_Q_LEN as i32;
    let long = offsets.windows(2).rposition(|w| w[1] - w[0] > longest_short);
    let short =
        long.map(|last| last + 1).filter(|first| (offsets[*first] as usize) < tokens).map(|first| ShortRequests {
            requests: (batch.requests() - first) as u32,
            tokens: (tokens - offsets[first] as usize) as u32,
            max_q_len: offsets[first..].windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0).max(1) as u32,
        });
    let short = short.filter(|short| short.requests > 0);
    let longest = batch.cu_seqlens_q.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0).max(1);
    Ok(PlanKey {
        tokens: tokens as u32,
        max_q_len: (longest as u32).max((tokens as u32).div_ceil(batch.requests().max(1) as u32)).min(tokens as u32),
        short,
        page_size: page_size as u32,
        kind: options.kind,
        query: options.query,
        engine: options.engine,
        rank: options.rank as u32,
        taps: options.taps,
        skip_slot_zero: options.skip_slot_zero,
        ..PlanKey::decode(batch.requests() as u32, batch.table_width as u32)
    })
}

/// Runs one step of `layer` on `device`, on scratch filled with NaN.
pub(crate) fn forward(
    layer: &DecoderLayer,
    device: &Device,
    input: &StepInput,
    cache: &mut Cache,
    options: &StepOptions,
    ranks: &dyn Collective,
) -> Result<StepOutput> {
    let config = layer.config();
    let hidden = config.hidden;
    let tokens = input.stream.len() / hidden;
    for (tensor, len) in [("stream", input.stream.len()), ("attn_input", input.attn_input.len())] {
        if len != tokens * hidden {
            return Err(Error::Shape { tensor: tensor.into(), wanted: vec![tokens, hidden], got: vec![len] });
        }
    }
    let pages = cache.pages(config)?;
    let plan = layer.plan(key(input, tokens, cache.page_size, options)?)?;
    let mut workspace = layer.workspace(&plan)?;
    workspace.poison(device)?;

    let mut up = Uploads::new(device);
    let shape = [pages, cache.page_size, config.kv_heads, config.head_dim];
    let k = up.bytes(DType::E4m3, &shape, cache.k)?;
    let v = up.bytes(DType::E4m3, &shape, cache.v)?;
    let device_input =
        up.input(hidden, input, PagedKvCache::new(k.clone(), v.clone())?, [cache.k_scale, cache.v_scale])?;
    let mut taps = DeviceTaps::default();
    // The scores are an output of a host step whether taps are wanted or not.
    if options.taps == Taps::All {
        for &tap in Tap::ALL {
            taps.set(tap, up.output(tap.dtype(), &tap.shape(tokens))?);
        }
    }
    let output = up.outputs(layer, tokens, taps)?;
    layer.forward_with(&plan, &mut workspace, &device_input, &output, Stream::LEGACY, ranks)?;
    device.synchronize()?;

    device.read(k.ptr(), cache.k)?;
    device.read(v.ptr(), cache.v)?;
    let topk_ids = up.read(&output.topk_ids, i32::from_le_bytes)?;
    let scores = workspace.layout(&plan)?.topk_scores;
    let topk_scores = match output.taps.get(Tap::TopkScores) {
        Some(t) => up.read_f32(t)?,
        None => {
            // SAFETY: the region of this plan's layout, still alive.
            let view = unsafe { DeviceTensor::contiguous(scores, DType::F32, &[tokens, config.top_k]) };
            up.read_f32(&view)?
        }
    };
    Ok(StepOutput {
        hidden: match &output.hidden {
            Some(t) => up.read(t, bf16::from_le_bytes)?,
            None => Vec::new(),
        },
        stream: up.read_f32(&output.stream)?,
        taps: if options.taps == Taps::All { Some(tap_values(&up, &output, &topk_ids, tokens)?) } else { None },
        topk_ids,
        topk_scores,
    })
}

fn tap_values(up: &Uploads, output: &DeviceOutput, topk_ids: &[i32], tokens: usize) -> Result<TapValues> {
    let get = |tap: Tap| output.taps.get(tap).map_or(Ok(Vec::new()), |t| up.read_f32(t));
    let planes = get(Tap::FfnInput)?;
    let width = planes.len() / tokens.max(1) / 3;
    let sum = |row: &[f32]| (0..width).map(|c| row[c] + row[width + c] + row[2 * width + c]).collect::<Vec<f32>>();
    Ok(TapValues {
        attn_core: get(Tap::AttnCore)?,
        attn_out: get(Tap::AttnOut)?,
        stream_after_attn: get(Tap::StreamAfterAttn)?,
        ffn_input: planes.chunks_exact((3 * width).max(1)).flat_map(sum).collect(),
        router_logits: get(Tap::RouterLogits)?,
        topk_ids: topk_ids.to_vec(),
        topk_scores: get(Tap::TopkScores)?,
        expert_input: get(Tap::ExpertInput)?,
        moe_mix: get(Tap::MoeMix)?,
        ffn_out: get(Tap::FfnOut)?,
    })
}
