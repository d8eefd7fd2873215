//! What stands around the stack: an embedding, a head, drafts by n-gram, and the stack on the CPU as reference.

use half::bf16;
use muse_spark_layer::backend::cpu::{Batch, Cache, StepOptions};
use muse_spark_layer::stack::HostStackInput;
use muse_spark_layer::synthetic::{self, Random};
use muse_spark_layer::{
    Backend, DecoderLayer, DecoderStack, LayerConfig, LayerKind, LayerWeights, NamedTensors, PerKind, QueryPrecision,
    Result,
};
use std::cell::OnceCell;

/// Tokens there are.
pub const VOCABULARY: u32 = 64;
/// Rows of a verify block: a token and the drafts behind it.
pub const BLOCK: usize = 4;
/// Size of the embedding: beside what the layers add, so that drafts are right now and then.
const EMBEDDING: f32 = 1.5;
/// Sets of weights; layers take them in turn.
const SETS: usize = 2;

/// A model of synthetic weights.
#[derive(Debug)]
pub struct Model {
    config: LayerConfig,
    layers: usize,
    sets: Vec<NamedTensors<'static>>,
    /// `[VOCABULARY, hidden]`.
    embedding: Vec<f32>,
    reference: OnceCell<DecoderStack>,
}

impl Model {
    pub fn new(config: LayerConfig, layers: usize) -> Result<Model> {
        let sets: Result<Vec<_>> = (0..SETS.min(layers) as u64).map(|i| synthetic::weights(&config, 40 + i)).collect();
        let random = Random::new(1, "embedding");
        let embedding =
            (0..(u64::from(VOCABULARY) * config.hidden as u64)).map(|i| EMBEDDING * random.normal(i)).collect();
        Ok(Model { config, layers, sets: sets?, embedding, reference: OnceCell::new() })
    }

    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// The layers on a backend. Every fourth is full, as in the released model.
    pub fn stack(&self, backend: Backend) -> Result<DecoderStack> {
        let layer = |i: usize| {
            let tensors = self.sets[i % self.sets.len()].view();
            let weights = LayerWeights::from_host(&self.config, tensors)?;
            Ok((LayerKind::of_layer(i), DecoderLayer::new(self.config.clone(), weights, backend)?))
        };
        DecoderStack::new((0..self.layers).map(layer).collect::<Result<_>>()?)
    }

    fn row(&self, token: u32) -> &[f32] {
        let at = (token % VOCABULARY) as usize * self.config.hidden;
        &self.embedding[at..at + self.config.hidden]
    }

    /// The residual stream of tokens and its normed form: what the first layer takes.
    pub fn embed(&self, tokens: &[u32]) -> (Vec<f32>, Vec<bf16>) {
        let stream: Vec<f32> = tokens.iter().flat_map(|t| self.row(*t)).copied().collect();
        let normed = stream.chunks_exact(self.config.hidden).flat_map(|row| {
            let square = row.iter().map(|v| v * v).sum::<f32>() / row.len() as f32;
            let inverse = 1.0 / (square + 1e-5).sqrt();
            row.iter().map(move |v| bf16::from_f32(v * inverse))
        });
        let normed = normed.collect();
        (stream, normed)
    }

    /// The token after each of the first `rows` rows of `[T, hidden]`, by the largest logit, and the row. The head
    /// is the embedding with the tokens moved on by one within groups of eight, so that the model counts, as far
    /// as the layers let it.
    pub fn sample(&self, hidden: &[bf16], rows: usize) -> Vec<(u32, Vec<bf16>)> {
        let logit = |row: &[bf16], token: u32| -> f32 {
            let before = token & !7 | (token + 7) & 7;
            row.iter().zip(self.row(before)).map(|(h, e)| h.to_f32() * e).sum()
        };
        let choose = |row: &[bf16]| {
            let logits = (0..VOCABULARY).map(|token| logit(row, token));
            let best = logits.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
            (best.map_or(0, |(token, _)| token as u32), row.to_vec())
        };
        hidden.chunks_exact(self.config.hidden).take(rows).map(choose).collect()
    }

    /// What followed the last time that these last two tokens stood together.
    pub fn draft(tokens: &[u32]) -> Option<Vec<u32>> {
        let last = tokens.len().checked_sub(2)?;
        let at = (0..last).rev().find(|&i| tokens[i..i + 2] == tokens[last..])?;
        let draft: Vec<u32> = tokens[at + 2..].iter().copied().cycle().take(BLOCK - 1).collect();
        Some(draft)
    }

    /// Relative L2 distance of `hidden` from the reference's output at the last of `tokens`, which it computes in
    /// one step from nothing.
    pub fn distance(&self, tokens: &[u32], hidden: &[bf16]) -> Result<f64> {
        let stack = match self.reference.get() {
            Some(stack) => stack,
            None => {
                let made = self.stack(Backend::Cpu)?;
                self.reference.get_or_init(|| made)
            }
        };
        let (stream, attn_input) = self.embed(tokens);
        let n = tokens.len();
        let positions: Vec<i64> = (0..n as i64).collect();
        let table: Vec<i32> = (0..n as i32).collect();
        let batch = Batch {
            positions: &positions,
            cache_loc: &positions,
            cu_seqlens_q: &[0, n as i32],
            cache_seqlens: &[n as i32],
            page_table: &table,
            table_width: n,
            table_stride: n,
        };
        let bytes = n * self.config.kv_size();
        let mut pools: Vec<[Vec<u8>; 2]> = (0..self.layers).map(|_| [vec![0; bytes], vec![0; bytes]]).collect();
        let mut caches: Vec<Cache> =
            pools.iter_mut().map(|[k, v]| Cache { k, v, page_size: 1, k_scale: 1.0, v_scale: 1.0 }).collect();
        let input = HostStackInput {
            stream: &stream,
            attn_input: &attn_input,
            batches: PerKind::both(batch),
            local_start: 0,
            num_tokens_non_padded: None,
        };
        let options = StepOptions::new(LayerKind::Full, QueryPrecision::Fp16);
        let outputs = stack.forward_host(&input, &mut caches, &options)?;
        let want = outputs.last().map_or(&[][..], |last| &last.hidden[(n - 1) * self.config.hidden..]);
        let square = |x: f32| f64::from(x) * f64::from(x);
        let difference: f64 = hidden.iter().zip(want).map(|(g, w)| square(g.to_f32() - w.to_f32())).sum();
        Ok((difference / want.iter().map(|w| square(w.to_f32())).sum::<f64>()).sqrt())
    }
}
