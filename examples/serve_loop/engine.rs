//! What runs a batch: the CPU here, the GPU in `gpu.rs`.

use crate::model::Model;
use crate::scheduler::{Batch, Limits};
use half::bf16;
use muse_spark_layer::backend::cpu::{Cache, StepOptions};
use muse_spark_layer::stack::HostStackInput;
use muse_spark_layer::{Backend, DecoderStack, LayerKind, QueryPrecision, Result};

pub trait Engine {
    /// The last layer's normed output, BF16 `[T, hidden]`, the batch's keys and values stored.
    fn step(&mut self, batch: &Batch) -> Result<Vec<bf16>>;
}

pub struct CpuEngine<'a> {
    model: &'a Model,
    stack: DecoderStack,
    /// K and V of each layer.
    pools: Vec<[Vec<u8>; 2]>,
}

impl CpuEngine<'_> {
    pub fn new(model: &Model, limits: Limits) -> Result<CpuEngine<'_>> {
        let stack = model.stack(Backend::Cpu)?;
        let slots = limits.slots();
        let pool = |kind: LayerKind| vec![0; slots.get(kind) * model.config().kv_size()];
        let pools = stack.layers().iter().map(|(kind, _)| [pool(*kind), pool(*kind)]).collect();
        Ok(CpuEngine { model, stack, pools })
    }
}

impl Engine for CpuEngine<'_> {
    fn step(&mut self, batch: &Batch) -> Result<Vec<bf16>> {
        let (stream, attn_input) = self.model.embed(&batch.tokens);
        let input = HostStackInput {
            stream: &stream,
            attn_input: &attn_input,
            batches: batch.views(),
            local_start: 0,
            num_tokens_non_padded: Some(batch.real_tokens),
        };
        let mut caches: Vec<Cache> =
            self.pools.iter_mut().map(|[k, v]| Cache { k, v, page_size: 1, k_scale: 1.0, v_scale: 1.0 }).collect();
        let options = StepOptions { skip_slot_zero: true, ..StepOptions::new(LayerKind::Full, QueryPrecision::Fp16) };
        let mut outputs = self.stack.forward_host(&input, &mut caches, &options)?;
        Ok(outputs.pop().map(|last| last.hidden).unwrap_or_default())
    }
}
