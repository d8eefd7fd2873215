//! A batch on the GPU. The step's tensors stay where they are, so that the graphs captured at the start serve
//! every batch of their size; a mixed step runs as it comes.
#![allow(unsafe_code)]

use crate::engine::Engine;
use crate::model::{Model, BLOCK};
use crate::scheduler::{Batch, Limits, StepKind, LEAST_ROWS};
use half::bf16;
use muse_spark_layer::backend::cuda::graph::{Graph, OwnedStream};
use muse_spark_layer::backend::cuda::{Buffer, Device};
use muse_spark_layer::stack::{KindInput, LayerCache};
use muse_spark_layer::{
    Backend, DType, DecoderStack, DeviceTensor, PagedKvCache, PerKind, PlanKey, Result, ShortRequests, StackInput,
    StackOutput, StackPlan, Workspace,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// A buffer as a tensor. The engine keeps its buffers for as long as it runs steps.
fn view(buffer: &Buffer, dtype: DType, shape: &[usize]) -> DeviceTensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    assert!(bytes as u64 <= buffer.bytes());
    // SAFETY: as large as that, and alive as the engine is.
    unsafe { DeviceTensor::contiguous(buffer.ptr(), dtype, shape) }
}

/// Device memory of the largest step; smaller ones use its beginning.
struct Tensors {
    attn_input: Buffer,
    stream: Buffer,
    positions: Buffer,
    cu_seqlens_q: Buffer,
    cache_seqlens: Buffer,
    cache_loc: PerKind<Buffer>,
    page_table: PerKind<Buffer>,
    non_padded: Buffer,
    local_start: Buffer,
    unit_scale: Buffer,
    hidden: Buffer,
    stream_out: Buffer,
    pools: Vec<[Buffer; 2]>,
}

pub struct GpuEngine<'a> {
    // Before what they use.
    graphs: HashMap<(usize, usize), Graph<'static>>,
    model: &'a Model,
    device: Device,
    stream: OwnedStream,
    stack: Rc<DecoderStack>,
    workspace: Rc<RefCell<Workspace>>,
    tensors: Tensors,
    limits: Limits,
}

fn le<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|v| to(*v)).collect()
}

impl GpuEngine<'_> {
    /// Loads the layers and captures a graph for each kind of step and batch size.
    pub fn new<'a>(device: &Device, model: &'a Model, limits: Limits) -> Result<GpuEngine<'a>> {
        let stack = Rc::new(model.stack(Backend::Cuda { device: device.ordinal() })?);
        let (t, b, width) = (limits.tokens(), limits.running.max(LEAST_ROWS), limits.longest);
        let hidden = model.config().hidden;
        let allocate = |bytes: usize| device.allocate(bytes as u64);
        let slots = limits.slots();
        let pool = |kind| -> Result<Buffer> {
            let buffer = allocate(slots.get(kind) * model.config().kv_size())?;
            buffer.fill(0)?;
            Ok(buffer)
        };
        let pools = stack.layers().iter().map(|(kind, _)| Ok([pool(*kind)?, pool(*kind)?])).collect::<Result<_>>()?;
        let tensors = Tensors {
            attn_input: allocate(t * hidden * 2)?,
            stream: allocate(t * hidden * 4)?,
            positions: allocate(t * 8)?,
            cu_seqlens_q: allocate((b + 1) * 4)?,
            cache_seqlens: allocate(b * 4)?,
            cache_loc: PerKind { full: allocate(t * 8)?, sliding: allocate(t * 8)? },
            page_table: PerKind { full: allocate(b * width * 4)?, sliding: allocate(b * width * 4)? },
            non_padded: allocate(4)?,
            local_start: device.upload(&0i32.to_le_bytes())?,
            unit_scale: device.upload(&1f32.to_le_bytes())?,
            hidden: allocate(t * hidden * 2)?,
            stream_out: allocate(t * hidden * 4)?,
            pools,
        };
        let mut engine = GpuEngine {
            graphs: HashMap::new(),
            model,
            device: device.clone(),
            stream: OwnedStream::new(device)?,
            workspace: Rc::new(RefCell::new(stack.layers()[0].1.workspace_of(0)?)),
            stack,
            tensors,
            limits,
        };
        engine.capture()?;
        Ok(engine)
    }

    /// A plan is plain data, made whenever it is wanted.
    fn plan(
        &self,
        tokens: usize,
        requests: usize,
        max_q_len: usize,
        short: Option<ShortRequests>,
    ) -> Result<StackPlan> {
        self.stack.plan(&PerKind::both(PlanKey {
            tokens: tokens as u32,
            max_q_len: max_q_len as u32,
            short,
            skip_slot_zero: true,
            ..PlanKey::decode(requests as u32, self.limits.longest as u32)
        }))
    }

    /// Of a mixed step: chunks of prompts, then `short` requests that have `rows` of the step's rows.
    fn mixed(&self, tokens: usize, short: usize, rows: usize) -> Result<StackPlan> {
        let of_short = ShortRequests { requests: short as u32, tokens: rows as u32, max_q_len: 1 };
        let some = short > 0 && short < self.limits.running && rows > 0 && rows < tokens;
        self.plan(tokens, self.limits.running, self.limits.chunk, some.then_some(of_short))
    }

    /// A workspace for every plan there can be, and the graphs.
    fn capture(&mut self) -> Result<()> {
        let (mut sizes, mut bytes) = (Vec::new(), 0);
        for (kind, block) in [(StepKind::Decode, 1), (StepKind::Verify, BLOCK)] {
            for requests in self.limits.buckets() {
                let plan = self.plan(requests * block, requests, block, None)?;
                bytes = plan.workspace_bytes.max(bytes);
                sizes.push((kind as usize, requests, plan));
            }
        }
        for tokens in LEAST_ROWS..=self.limits.tokens() {
            for short in 0..self.limits.running {
                bytes = self.mixed(tokens, short, 1)?.workspace_bytes.max(bytes);
            }
        }
        self.workspace = Rc::new(RefCell::new(self.stack.layers()[0].1.workspace_of(bytes)?));
        for (kind, requests, plan) in sizes {
            let (input, output) = self.tensors(plan.tokens() as usize, requests)?;
            let (stack, workspace) = (self.stack.clone(), self.workspace.clone());
            let graph = self
                .stream
                .capture(move |stream| stack.forward(&plan, &mut workspace.borrow_mut(), &input, &output, stream))?;
            self.graphs.insert((kind, requests), graph);
        }
        Ok(())
    }

    /// The tensors of a step of this size.
    fn tensors(&self, tokens: usize, requests: usize) -> Result<(StackInput, StackOutput)> {
        let (x, config) = (&self.tensors, self.model.config());
        let kind = |loc: &Buffer, table: &Buffer| KindInput {
            cache_loc: view(loc, DType::I64, &[tokens]),
            cache_seqlens: view(&x.cache_seqlens, DType::I32, &[requests]),
            page_table: view(table, DType::I32, &[requests, self.limits.longest]),
            scheduler_metadata: None,
        };
        let scale = view(&x.unit_scale, DType::F32, &[1]);
        let cache = |[k, v]: &[Buffer; 2]| -> Result<LayerCache> {
            let shape = [k.bytes() as usize / config.kv_size(), 1, config.kv_heads, config.head_dim];
            let cache = PagedKvCache::new(view(k, DType::E4m3, &shape), view(v, DType::E4m3, &shape))?;
            Ok(LayerCache { cache, k_scale: scale.clone(), v_scale: scale.clone() })
        };
        let input = StackInput {
            attn_input: view(&x.attn_input, DType::Bf16, &[tokens, config.hidden]),
            stream: view(&x.stream, DType::F32, &[tokens, config.hidden]),
            positions: view(&x.positions, DType::I64, &[tokens]),
            cu_seqlens_q: view(&x.cu_seqlens_q, DType::I32, &[requests + 1]),
            kinds: PerKind {
                full: kind(&x.cache_loc.full, &x.page_table.full),
                sliding: kind(&x.cache_loc.sliding, &x.page_table.sliding),
            },
            caches: x.pools.iter().map(cache).collect::<Result<_>>()?,
            local_start: view(&x.local_start, DType::I32, &[1]),
            num_tokens_non_padded: Some(view(&x.non_padded, DType::I32, &[1])),
        };
        let output = StackOutput {
            hidden: Some(view(&x.hidden, DType::Bf16, &[tokens, config.hidden])),
            stream: view(&x.stream_out, DType::F32, &[tokens, config.hidden]),
            streams: Vec::new(),
            topk_ids: None,
        };
        Ok((input, output))
    }

    fn upload(&self, batch: &Batch) -> Result<()> {
        let x = &self.tensors;
        let (stream, attn_input) = self.model.embed(&batch.tokens);
        x.attn_input.write(&le(&attn_input, bf16::to_le_bytes))?;
        x.stream.write(&le(&stream, f32::to_le_bytes))?;
        x.positions.write(&le(&batch.positions, i64::to_le_bytes))?;
        x.cu_seqlens_q.write(&le(&batch.cu_seqlens_q, i32::to_le_bytes))?;
        x.cache_seqlens.write(&le(&batch.cache_seqlens, i32::to_le_bytes))?;
        for (loc, table, from_loc, from_table) in [
            (&x.cache_loc.full, &x.page_table.full, &batch.cache_loc.full, &batch.page_table.full),
            (&x.cache_loc.sliding, &x.page_table.sliding, &batch.cache_loc.sliding, &batch.page_table.sliding),
        ] {
            loc.write(&le(from_loc, i64::to_le_bytes))?;
            table.write(&le(from_table, i32::to_le_bytes))?;
        }
        x.non_padded.write(&(batch.real_tokens as i32).to_le_bytes())?;
        // The copies are the legacy stream's, for which the engine's own stream does not wait.
        self.device.synchronize()
    }
}

impl Engine for GpuEngine<'_> {
    fn step(&mut self, batch: &Batch) -> Result<Vec<bf16>> {
        self.upload(batch)?;
        let tokens = batch.tokens.len();
        match self.graphs.get(&(batch.kind as usize, batch.requests())) {
            Some(graph) => self.stream.replay(graph)?,
            None => {
                let (input, output) = self.tensors(tokens, batch.requests())?;
                let rows = tokens - batch.cu_seqlens_q[batch.chunks] as usize;
                let plan = self.mixed(tokens, batch.requests() - batch.chunks, rows)?;
                let workspace = &mut self.workspace.borrow_mut();
                self.stack.forward(&plan, workspace, &input, &output, self.stream.stream())?;
            }
        }
        self.stream.synchronize()?;
        let mut bytes = vec![0; tokens * self.model.config().hidden * 2];
        self.tensors.hidden.read(&mut bytes)?;
        Ok(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect())
    }
}
