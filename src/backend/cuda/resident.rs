//! Steps whose tensors live on the device, so that they can be captured and replayed: for measurements.
#![allow(unsafe_code)]

use crate::backend::cpu::StepInput;
use crate::backend::cuda::host::Uploads;
use crate::backend::cuda::{Buffer, Device};
use crate::config::LayerConfig;
use crate::error::{Error, Result};
use crate::kv_cache::PagedKvCache;
use crate::layer::{After, DecoderLayer};
use crate::plan::Plan;
use crate::step::{DeviceInput, DeviceOutput, DeviceTaps};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};
use crate::workspace::Workspace;
use std::sync::Arc;

/// A pool of cache rows with unit scales. Steps may share it: each writes its own new rows only.
#[derive(Debug)]
pub struct ResidentCache {
    k: Buffer,
    v: Buffer,
}

impl ResidentCache {
    /// `rows` rows of the layer's heads, filled with the two blocks of E4M3 bytes over and over.
    pub fn new(device: &Device, config: &LayerConfig, rows: usize, k: &[u8], v: &[u8]) -> Result<ResidentCache> {
        let bytes = (rows * config.kv_size()) as u64;
        let pool = |block: &[u8]| -> Result<Buffer> {
            let buffer = device.allocate(bytes)?;
            let mut at = 0;
            while at < bytes && !block.is_empty() {
                let part = (block.len() as u64).min(bytes - at);
                buffer.write_at(at, &block[..part as usize])?;
                at += part;
            }
            Ok(buffer)
        };
        Ok(ResidentCache { k: pool(k)?, v: pool(v)? })
    }

    /// The first `pages` pages.
    fn view(&self, config: &LayerConfig, pages: usize, page_size: usize) -> Result<PagedKvCache> {
        let wanted = (pages * page_size * config.kv_size()) as u64;
        if wanted > self.k.bytes() {
            return Err(Error::Limit { what: "bytes of cache".into(), limit: self.k.bytes(), got: wanted });
        }
        let shape = [pages, page_size, config.kv_heads, config.head_dim];
        // SAFETY: each buffer holds `shape` bytes, and every step keeps its cache alive.
        let [k, v] = [&self.k, &self.v].map(|b| unsafe { DeviceTensor::contiguous(b.ptr(), DType::E4m3, &shape) });
        PagedKvCache::new(k, v)
    }
}

/// One step's tensors. Everything stays where it is, so a captured graph of the step can be replayed as
/// long as the step lives.
#[derive(Debug)]
pub struct ResidentStep {
    input: DeviceInput,
    output: DeviceOutput,
    local_start: Buffer,
    pages: (usize, usize),
    /// The step's own tensors, and those of the steps before it in a chain.
    kept: Vec<Arc<Uploads>>,
    _cache: Arc<ResidentCache>,
}

impl ResidentStep {
    /// Uploads the inputs of a step of `layer`, for `pages` pages of `page_size` tokens of the cache.
    pub fn new(
        device: &Device,
        layer: &DecoderLayer,
        input: &StepInput,
        pages: (usize, usize),
        cache: &Arc<ResidentCache>,
    ) -> Result<ResidentStep> {
        let config = layer.config();
        let tokens = input.batch.positions.len();
        input.batch.validate(tokens)?;
        let mut up = Uploads::new(device);
        let view = cache.view(config, pages.0, pages.1)?;
        let mut device_input = up.input(config.hidden, input, view, [1.0, 1.0])?;
        let (local_start, tensor) = local_start(device, input.local_start)?;
        device_input.local_start = tensor;
        let output = up.outputs(layer, tokens, DeviceTaps::default())?;
        let kept = vec![Arc::new(up)];
        Ok(ResidentStep { input: device_input, output, local_start, pages, kept, _cache: cache.clone() })
    }

    /// The step of the next layer: the same requests on another layer's cache; this step's outputs are its
    /// inputs.
    pub fn next(&self, device: &Device, layer: &DecoderLayer, cache: &Arc<ResidentCache>) -> Result<ResidentStep> {
        let Some(hidden) = &self.output.hidden else {
            return Err(Error::Missing { tensor: "hidden".into() });
        };
        let mut input = self.input.clone();
        input.attention.attn_input = hidden.clone();
        input.attention.cache = cache.view(layer.config(), self.pages.0, self.pages.1)?;
        input.stream = self.output.stream.clone();
        let (local_start, tensor) = local_start(device, 0)?;
        input.local_start = tensor;
        let mut up = Uploads::new(device);
        let output = up.outputs(layer, hidden.shape()[0], DeviceTaps::default())?;
        let mut kept = self.kept.clone();
        kept.push(Arc::new(up));
        Ok(ResidentStep { input, output, local_start, pages: self.pages, kept, _cache: cache.clone() })
    }

    /// [`DecoderLayer::forward`] of this step.
    pub fn forward(&self, layer: &DecoderLayer, plan: &Plan, workspace: &mut Workspace, stream: Stream) -> Result<()> {
        layer.forward(plan, workspace, &self.input, &self.output, stream)
    }

    /// The same with a call after each operation.
    pub fn profile(
        &self,
        layer: &DecoderLayer,
        plan: &Plan,
        workspace: &mut Workspace,
        stream: Stream,
        after: &After,
    ) -> Result<()> {
        layer.profile(plan, workspace, &self.input, &self.output, stream, after)
    }

    /// Which experts are this rank's. Waits for it.
    pub fn set_local_start(&self, start: i32) -> Result<()> {
        self.local_start.write(&start.to_le_bytes())?;
        self.local_start.device().synchronize()
    }

    /// The experts chosen, after all work queued on the device.
    pub fn topk_ids(&self) -> Result<Vec<i32>> {
        match self.kept.last() {
            Some(up) => up.read(&self.output.topk_ids, i32::from_le_bytes),
            None => Ok(Vec::new()),
        }
    }

    /// Whether the whole stream that came out is finite, after all work queued on the device.
    pub fn is_finite(&self) -> Result<bool> {
        match self.kept.last() {
            Some(up) => Ok(up.read(&self.output.stream, f32::from_le_bytes)?.iter().all(|v| v.is_finite())),
            None => Ok(false),
        }
    }
}

/// The scalar in memory of its own, and the view of it.
fn local_start(device: &Device, start: i32) -> Result<(Buffer, DeviceTensor)> {
    let buffer = device.upload(&start.to_le_bytes())?;
    // SAFETY: one i32, kept with the view.
    let tensor = unsafe { DeviceTensor::contiguous(buffer.ptr(), DType::I32, &[1]) };
    Ok((buffer, tensor))
}
