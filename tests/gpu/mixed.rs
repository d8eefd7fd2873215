//! What a mixed batch costs as one call, against its parts one after the other. Graph replays behind an L2 flush,
//! medians; prints a line a measurement.

use crate::harness::{gpu, Gpu};
use muse_spark_layer::backend::cuda::graph::{Event, L2Flush, OwnedStream};
use muse_spark_layer::backend::cuda::resident::{ResidentCache, ResidentStep};
use muse_spark_layer::routing::busiest_start;
use muse_spark_layer::synthetic::{self, StepSpec};
use muse_spark_layer::{LayerKind, PlanKey, ShortRequests};
use std::cell::RefCell;
use std::io::Write;
use std::sync::Arc;

const REPLAYS: usize = 11;
/// One call may take this much of its parts' sum: 3% are what medians of a few replays differ by.
const BOUND: f64 = 1.03;
/// A case over the bound is measured again: the GPU's clock falls by a fifth while others use it, or after long steps.
const ATTEMPTS: usize = 3;
/// Rows of the pool that all steps share: more than any of them lists.
const POOL_ROWS: usize = 65 * (32_768 + 8192);

struct Timer<'a> {
    gpu: &'a Gpu,
    stream: OwnedStream,
    flush: L2Flush,
    cache: Arc<ResidentCache>,
}

impl Timer<'_> {
    /// Microseconds of one layer on a step of `q_lens` after `ctx` tokens each.
    fn step(&self, q_lens: &[usize], ctx: usize, kind: LayerKind) -> f64 {
        let (config, device, cuda) = (&self.gpu.config, &self.gpu.device, &self.gpu.cuda);
        let spec = StepSpec { q_lens: q_lens.to_vec(), ..StepSpec::new(1, 1, ctx, kind) };
        let input = synthetic::input(config, &spec, 101).expect("a step");
        let key = PlanKey {
            tokens: input.positions.len() as u32,
            max_q_len: q_lens.iter().copied().max().unwrap_or(1) as u32,
            short: (q_lens.len() > 1 && q_lens[0] > q_lens[1]).then(|| ShortRequests {
                requests: q_lens.len() as u32 - 1,
                tokens: (input.positions.len() - q_lens[0]) as u32,
                max_q_len: q_lens[1] as u32,
            }),
            kind,
            ..PlanKey::decode(q_lens.len() as u32, input.table_width as u32)
        };
        let plan = cuda.plan(key).expect("a plan");
        let workspace = RefCell::new(cuda.workspace(&plan).expect("a workspace"));
        let pages = (input.page_table.len(), 1);
        let step = ResidentStep::new(device, cuda, &input.view(), pages, &self.cache).expect("a step");
        step.forward(cuda, &plan, &mut workspace.borrow_mut(), self.stream.stream()).expect("forward");
        step.set_local_start(busiest_start(config, &step.topk_ids().expect("ids"))).expect("set");
        let graph = self
            .stream
            .capture(|stream| step.forward(cuda, &plan, &mut workspace.borrow_mut(), stream))
            .expect("a graph");
        let (begin, end) = (Event::new(device).expect("event"), Event::new(device).expect("event"));
        let mut times: Vec<f64> = (0..REPLAYS)
            .map(|_| {
                self.flush.queue(&self.stream).expect("flush");
                self.stream.record(&begin).expect("record");
                self.stream.replay(&graph).expect("replay");
                self.stream.record(&end).expect("record");
                end.microseconds_since(&begin).expect("time")
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[REPLAYS / 2]
    }
}

#[test]
fn a_mixed_batch_costs_no_more_than_its_parts() {
    let Some(gpu) = gpu("mixed::a_mixed_batch_costs_no_more_than_its_parts") else { return };
    let block =
        synthetic::step(&gpu.config, &StepSpec::new(1, 1, (1 << 19) - 1, LayerKind::Full), 7).expect("keys").cache;
    let cache = ResidentCache::new(&gpu.device, &gpu.config, POOL_ROWS, &block.k, &block.v).expect("a pool");
    let stream = OwnedStream::new(&gpu.device).expect("a stream");
    let flush = L2Flush::new(&stream).expect("a flush");
    let timer = Timer { gpu: &gpu, stream, flush, cache: Arc::new(cache) };
    // Rows in all, query length and number of the short requests, context of all. A runtime's budget of a step counts
    // all rows (512, 2048, 8192) or the chunk's alone (576, 640, 2112, 8256).
    let cases = [
        (512, 1, 64, 8192, LayerKind::Full),
        (512, 1, 64, 8192, LayerKind::Sliding),
        (512, 8, 16, 8192, LayerKind::Full),
        (512, 1, 64, 32768, LayerKind::Full),
        (576, 1, 64, 8192, LayerKind::Full),
        (576, 1, 64, 8192, LayerKind::Sliding),
        (640, 8, 16, 8192, LayerKind::Full),
        (576, 1, 64, 32768, LayerKind::Full),
        (2048, 1, 64, 8192, LayerKind::Full),
        (2112, 1, 64, 8192, LayerKind::Full),
        (8192, 1, 64, 32768, LayerKind::Full),
        (8192, 1, 64, 8192, LayerKind::Sliding),
        (8256, 1, 64, 32768, LayerKind::Full),
        (8256, 1, 64, 8192, LayerKind::Sliding),
    ];
    let mut slower = Vec::new();
    for (rows, q_len, requests, ctx, kind) in cases {
        let rest = vec![q_len; requests];
        let chunk: usize = rows - q_len * requests;
        let mixed = [&[chunk], &rest[..]].concat();
        let within = (0..ATTEMPTS).any(|_| {
            let [together, prefill, others] = [&mixed, &vec![chunk], &rest].map(|q_lens| timer.step(q_lens, ctx, kind));
            let ratio = together / (prefill + others);
            let _ = writeln!(
                std::io::stderr(),
                "  prefill {chunk} + {requests} x {q_len} after {ctx}, {kind}: {together:.0} us as one, {prefill:.0} + {others:.0} apart, {ratio:.2}"
            );
            ratio <= BOUND
        });
        if !within {
            slower.push(format!("prefill {chunk} + {requests} x {q_len} after {ctx}, {kind}"));
        }
    }
    assert!(slower.is_empty(), "{slower:?}");
}
