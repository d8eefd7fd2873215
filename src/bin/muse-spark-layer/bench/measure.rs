//! Timing on the device: graph replays behind an L2 flush, and operations between events.

use super::cases::Case;
use super::floor::{self, Load};
use super::kernels::{self, Keys};
use super::results::{self, median, percentile, CaseResult, Kernel, Report};
use crate::args::BenchArgs;
use crate::report;
use muse_spark_layer::backend::cuda::bridge;
use muse_spark_layer::backend::cuda::graph::{Event, Graph, L2Flush, OwnedStream};
use muse_spark_layer::backend::cuda::resident::{ResidentCache, ResidentStep};
use muse_spark_layer::backend::cuda::Device;
use muse_spark_layer::routing::busiest_start;
use muse_spark_layer::synthetic::{self, StepSpec};
use muse_spark_layer::{
    AttentionEngine, Backend, DecoderLayer, LayerConfig, LayerKind, LayerWeights, Plan, PlanKey, QueryPrecision,
    Result, Workspace,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Copies of a single layer, replayed in turn.
const COPIES: usize = 2;
/// Cache rows of a block of random entries, which fills a pool over and over: 64 MiB of keys, as much of values.
const BLOCK_ROWS: usize = 1 << 19;
/// Inputs' seeds begin here.
const INPUT_SEED: u64 = 10;
/// Calls whose host time is taken.
const HOST_CALLS: usize = 21;

struct Bench {
    config: LayerConfig,
    device: Device,
    stream: OwnedStream,
    flush: L2Flush,
    /// One layer in copies, or one chain of different layers.
    chains: Vec<Vec<DecoderLayer>>,
    /// By place in the chain.
    caches: Vec<Arc<ResidentCache>>,
    engine: AttentionEngine,
    reps: usize,
    seed: u64,
}

/// Times every case.
pub fn measure(args: &BenchArgs, cases: &[Case]) -> Result<Report> {
    let bar = report::bar(cases.len());
    let bench = Bench::new(args, cases, |what| bar.set_message(what.to_string()))?;
    let event_us = bench.empty()?;
    let mut measured = Vec::new();
    for case in cases {
        bar.set_message(case.name.clone());
        measured.push(bench.case(case, args.kernels)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let driver = bridge::driver_version()?;
    Ok(Report {
        schema: 1,
        version: env!("CARGO_PKG_VERSION").into(),
        device: bench.device.name().into(),
        sms: bench.device.sm_count(),
        cuda_driver: format!("{}.{}", driver / 1000, driver % 1000 / 10),
        engine: args.engine.to_string(),
        layers: args.layers,
        reps: args.reps,
        seed: args.cases.seed,
        event_us,
        geometric_means: results::geometric_means(&measured),
        cases: measured,
    })
}

impl Bench {
    fn new(args: &BenchArgs, cases: &[Case], progress: impl Fn(&str)) -> Result<Bench> {
        let config = LayerConfig::muse_spark_tp8();
        let device = Device::new(args.cases.device)?;
        let backend = Backend::Cuda { device: args.cases.device };
        let layer = |tensors| DecoderLayer::new(config.clone(), LayerWeights::from_host(&config, tensors)?, backend);
        progress("weights");
        let chains = if args.layers == 1 {
            let tensors = synthetic::weights(&config, args.cases.seed)?;
            let copies: Result<Vec<_>> = (0..COPIES).map(|_| Ok(vec![layer(tensors.clone())?])).collect();
            copies?
        } else {
            let seeds = args.cases.seed..args.cases.seed + args.layers as u64;
            let chain: Result<Vec<_>> = seeds.map(|seed| layer(synthetic::weights(&config, seed)?)).collect();
            vec![chain?]
        };
        progress("cache");
        let rows = cases.iter().map(|c| c.batch * c.table_width()).max().unwrap_or(0);
        let block = StepSpec::new(1, 1, BLOCK_ROWS.min(rows.max(1)) - 1, LayerKind::Full);
        let block = synthetic::step(&config, &block, args.cases.seed)?.cache;
        let pool = || ResidentCache::new(&device, &config, rows, &block.k, &block.v).map(Arc::new);
        let caches: Result<Vec<_>> = (0..args.layers).map(|_| pool()).collect();
        let caches = caches?;
        let stream = OwnedStream::new(&device)?;
        let flush = L2Flush::new(&stream)?;
        Ok(Bench {
            config,
            device,
            stream,
            flush,
            chains,
            caches,
            engine: args.engine,
            reps: args.reps.max(1),
            seed: args.cases.seed,
        })
    }

    /// Two events with nothing between them.
    fn empty(&self) -> Result<f64> {
        let (begin, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        let sample = |_| -> Result<f64> {
            self.flush.queue(&self.stream)?;
            self.stream.record(&begin)?;
            self.stream.record(&end)?;
            end.microseconds_since(&begin)
        };
        Ok(median(&(0..21).map(sample).collect::<Result<Vec<f64>>>()?))
    }

    /// The chain that input `i` runs on.
    fn chain(&self, i: usize) -> &[DecoderLayer] {
        &self.chains[i % self.chains.len()]
    }

    fn case(&self, case: &Case, with_kernels: bool) -> Result<CaseResult> {
        let query = match self.engine {
            AttentionEngine::Own => QueryPrecision::Fp16,
            AttentionEngine::Fa3 => QueryPrecision::E4m3,
        };
        let plan = self.chain(0)[0].plan(PlanKey { engine: self.engine, query, ..case.key() })?;
        let workspace = RefCell::new(self.chain(0)[0].workspace(&plan)?);
        let (mut inputs, mut loads, mut keys) = (Vec::new(), vec![Load::default(); self.caches.len()], Keys::default());
        let n = case.inputs();
        for i in 0..n {
            let input = synthetic::input(&self.config, &case.spec(), self.seed + INPUT_SEED + i as u64)?;
            let seen = Keys::of(
                &self.config,
                case.kind,
                input.cache_seqlens.iter().zip(input.cu_seqlens_q.windows(2)).map(|(end, tokens)| {
                    let q_len = (tokens[1] - tokens[0]) as usize;
                    (*end as usize - q_len, q_len)
                }),
            );
            keys.rows += seen.rows / n as f64;
            keys.pairs += seen.pairs / n as f64;
            let mut steps: Vec<ResidentStep> = Vec::new();
            for ((layer, cache), load) in self.chain(i).iter().zip(&self.caches).zip(&mut loads) {
                let step = match steps.last() {
                    Some(before) => before.next(&self.device, layer, cache)?,
                    None => ResidentStep::new(&self.device, layer, &input.view(), (input.page_table.len(), 1), cache)?,
                };
                let got = self.settle(layer, &plan, &mut workspace.borrow_mut(), &step)?;
                load.routes += got.routes / n as f64;
                load.experts += got.experts / n as f64;
                steps.push(step);
            }
            inputs.push(steps);
        }

        let samples = self.replays(&plan, &workspace, &inputs)?;
        let each = |f: fn(&[f64]) -> f64| samples.iter().map(|s| f(s)).sum::<f64>() / n as f64;
        let us = each(median);
        let all: Vec<f64> = samples.iter().flatten().copied().collect();
        let floors: f64 = loads.iter().map(|load| floor::step(&self.config, case, *load)).sum();
        let floor_us = floors / loads.len() as f64;
        let mean = |f: fn(&Load) -> f64| loads.iter().map(f).sum::<f64>() / loads.len() as f64;
        let host_us = self.host_time(&plan, &mut workspace.borrow_mut(), &inputs[0][0])?;
        Ok(CaseResult {
            case: case.name.clone(),
            phase: case.phase,
            tokens: case.tokens(),
            us,
            spread: each(|s| (percentile(s, 0.9) - percentile(s, 0.1)) / median(s)),
            min_us: percentile(&all, 0.0),
            max_us: percentile(&all, 1.0),
            floor_us,
            ratio: us / floor_us,
            routes: mean(|load| load.routes),
            experts: mean(|load| load.experts),
            host_us,
            finite: inputs[0].last().map_or(Ok(false), ResidentStep::is_finite)?,
            kernels: match with_kernels {
                true => self.kernels(case, &plan, &mut workspace.borrow_mut(), &inputs, (loads[0], keys))?,
                false => Vec::new(),
            },
        })
    }

    /// Runs a step, gives its rank the range of experts that most routes go to, and runs it again.
    fn settle(&self, layer: &DecoderLayer, plan: &Plan, ws: &mut Workspace, step: &ResidentStep) -> Result<Load> {
        step.forward(layer, plan, ws, self.stream.stream())?;
        let ids = step.topk_ids()?;
        let start = busiest_start(&self.config, &ids);
        step.set_local_start(start)?;
        step.forward(layer, plan, ws, self.stream.stream())?;
        self.stream.synchronize()?;
        Ok(Load::of(&self.config, &ids, start))
    }

    /// Microseconds a layer, by input: one graph an input, in turn, each behind a flush that still runs
    /// when the replay is queued.
    fn replays(
        &self,
        plan: &Plan,
        workspace: &RefCell<Workspace>,
        inputs: &[Vec<ResidentStep>],
    ) -> Result<Vec<Vec<f64>>> {
        let graph = |(i, steps)| -> Result<Graph<'_>> {
            let (chain, steps): (&[DecoderLayer], &Vec<ResidentStep>) = (self.chain(i), steps);
            self.stream.capture(move |stream| {
                let forward = |(layer, step): (&DecoderLayer, &ResidentStep)| {
                    step.forward(layer, plan, &mut workspace.borrow_mut(), stream)
                };
                chain.iter().zip(steps).try_for_each(forward)
            })
        };
        let graphs = inputs.iter().enumerate().map(graph).collect::<Result<Vec<_>>>()?;
        for graph in &graphs {
            self.stream.replay(graph)?;
        }
        let (begin, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        let mut samples = vec![Vec::new(); inputs.len()];
        for rep in 0..self.reps.max(5 * inputs.len()) {
            let i = rep % inputs.len();
            self.stream.synchronize()?;
            self.flush.queue(&self.stream)?;
            self.stream.record(&begin)?;
            self.stream.replay(&graphs[i])?;
            self.stream.record(&end)?;
            samples[i].push(end.microseconds_since(&begin)? / self.caches.len() as f64);
        }
        self.stream.synchronize()?;
        Ok(samples)
    }

    /// What a call costs the host when nothing is in its way.
    fn host_time(&self, plan: &Plan, workspace: &mut Workspace, step: &ResidentStep) -> Result<f64> {
        let mut call = |_| -> Result<f64> {
            let start = Instant::now();
            step.forward(&self.chain(0)[0], plan, workspace, self.stream.stream())?;
            let taken = start.elapsed().as_secs_f64() * 1e6;
            self.stream.synchronize()?;
            Ok(taken)
        };
        Ok(median(&(0..HOST_CALLS).map(&mut call).collect::<Result<Vec<f64>>>()?))
    }

    /// Each operation of the first layer's step by itself: events between all of them, no dependent launch,
    /// weights and cache not in L2, activations where the operation before left them.
    fn kernels(
        &self,
        case: &Case,
        plan: &Plan,
        workspace: &mut Workspace,
        inputs: &[Vec<ResidentStep>],
        (load, keys): (Load, Keys),
    ) -> Result<Vec<Kernel>> {
        let plan = self.chain(0)[0].plan(PlanKey { dependent_launch: false, ..plan.key.clone() })?;
        let events = (0..=plan.launch_count()).map(|_| Event::new(&self.device)).collect::<Result<Vec<_>>>()?;
        let mut order: Vec<&'static str> = Vec::new();
        let mut samples: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        for rep in 0..self.reps.max(inputs.len()) {
            let i = rep % inputs.len();
            let names = RefCell::new(Vec::new());
            let after = |name: &'static str| {
                names.borrow_mut().push(name);
                self.stream.record(&events[names.borrow().len()])
            };
            self.flush.queue(&self.stream)?;
            self.stream.record(&events[0])?;
            inputs[i][0].profile(&self.chain(i)[0], &plan, workspace, self.stream.stream(), &after)?;
            self.stream.synchronize()?;
            // An operation that runs once a pass counts with all its passes.
            let mut step: BTreeMap<&'static str, f64> = BTreeMap::new();
            for (name, pair) in names.borrow().iter().zip(events.windows(2)) {
                *step.entry(name).or_default() += pair[1].microseconds_since(&pair[0])?;
                if !order.contains(name) {
                    order.push(name);
                }
            }
            for (name, us) in step {
                samples.entry(name).or_default().push(us);
            }
        }
        tracing::debug!(case = case.name, operations = order.len(), "profiled");
        let kernel = |name: &&'static str| {
            let us = median(&samples[name]);
            let cost = kernels::cost(&self.config, &plan, load, keys, name);
            let floor_us = floor::microseconds(cost.bytes, cost.flops);
            Kernel {
                operation: name.to_string(),
                us,
                bytes: cost.bytes,
                flops: cost.flops,
                tb_per_s: cost.bytes / us * 1e-6,
                floor_us,
                share: floor_us / us,
            }
        };
        Ok(order.iter().map(kernel).collect())
    }
}
