//! `run` and `plan`.

use crate::args::RunArgs;
use crate::{machine, report};
use muse_spark_layer::backend::cpu::{StepOptions, StepOutput};
use muse_spark_layer::synthetic::{self, SyntheticStep};
use muse_spark_layer::{Backend, DecoderLayer, LayerConfig, LayerWeights, Result, Taps};
use std::time::Instant;

/// Which of the step's routes stay on this rank.
#[derive(serde::Serialize)]
pub struct Routing {
    pub local_start: i32,
    pub routes: usize,
    pub local_routes: usize,
    pub local_experts: usize,
}

/// The first expert of the aligned range of `local_experts` that gets the most of `ids`.
pub fn busiest(config: &LayerConfig, ids: &[i32]) -> i32 {
    let mut routes = vec![0usize; config.n_experts / config.local_experts];
    for id in ids {
        routes[*id as usize / config.local_experts] += 1;
    }
    let most = routes.iter().max().copied().unwrap_or(0);
    (routes.iter().position(|r| *r == most).unwrap_or(0) * config.local_experts) as i32
}

fn routing(config: &LayerConfig, local_start: i32, ids: &[i32]) -> Routing {
    let n = config.n_experts as i32;
    let mut local: Vec<i32> = ids
        .iter()
        .map(|id| (id - local_start).rem_euclid(n))
        .filter(|e| (*e as usize) < config.local_experts)
        .collect();
    let local_routes = local.len();
    local.sort_unstable();
    local.dedup();
    Routing { local_start, routes: ids.len(), local_routes, local_experts: local.len() }
}

#[derive(serde::Serialize)]
struct RunReport {
    backend: &'static str,
    device: String,
    tokens: usize,
    batch: usize,
    q_len: usize,
    ctx: usize,
    kind: String,
    page: usize,
    query: String,
    seed: u64,
    weights_seconds: f64,
    load_seconds: f64,
    /// Host arrays in, host arrays out.
    step_ms: f64,
    stream_rms: f64,
    hidden_rms: f64,
    update_rms: f64,
    finite: bool,
    routing: Routing,
}

/// A synthetic step and what came out.
pub struct Ran {
    pub backend: Backend,
    pub step: SyntheticStep,
    pub output: StepOutput,
    pub local_start: i32,
    pub weights_seconds: f64,
    pub load_seconds: f64,
    pub step_ms: f64,
}

impl Ran {
    pub fn backend_name(&self) -> &'static str {
        match self.backend {
            Backend::Cpu => "cpu",
            Backend::Cuda { .. } => "cuda",
        }
    }

    pub fn device(&self) -> String {
        machine::name(self.backend)
    }
}

/// Makes weights and inputs, and runs the step; twice where the step's routes decide the expert range.
pub fn simulate(args: &RunArgs, taps: Taps) -> Result<Ran> {
    let config = args.dims.config();
    let backend = machine::chosen(args.backend, args.device);

    let start = Instant::now();
    let progress = report::spinner("making synthetic weights");
    let tensors = synthetic::weights(&config, args.seed)?;
    let weights_seconds = start.elapsed().as_secs_f64();
    progress.set_message("loading the layer");
    let start = Instant::now();
    let layer = DecoderLayer::new(config.clone(), LayerWeights::from_host(&config, tensors)?, backend)?;
    let load_seconds = start.elapsed().as_secs_f64();

    progress.set_message("making the step's inputs");
    let mut local_start = args.local_start.unwrap_or(0);
    let mut step = synthetic::step(&config, &args.step.spec(local_start), args.seed)?;
    let options = StepOptions { taps, engine: args.step.engine, ..StepOptions::new(args.step.kind, args.step.query) };
    let mut forward = |local_start: i32| -> Result<(StepOutput, f64)> {
        step.input.local_start = local_start;
        let mut cache = step.cache.clone();
        let start = Instant::now();
        let output = layer.forward_host(&step.input.view(), &mut cache.view(), &options)?;
        Ok((output, start.elapsed().as_secs_f64() * 1e3))
    };
    progress.set_message("running the step");
    let (mut output, mut step_ms) = forward(local_start)?;
    if args.local_start.is_none() {
        local_start = busiest(&config, &output.topk_ids);
        (output, step_ms) = forward(local_start)?;
    }
    progress.finish_and_clear();
    Ok(Ran { backend, step, output, local_start, weights_seconds, load_seconds, step_ms })
}

/// One synthetic step.
pub fn run(args: &RunArgs) -> Result<bool> {
    let ran = simulate(args, Taps::None)?;
    let Ran { step, output, local_start, weights_seconds, load_seconds, step_ms, .. } = &ran;
    let hidden: Vec<f32> = output.hidden.iter().map(|h| h.to_f32()).collect();
    let update: Vec<f32> = output.stream.iter().zip(&step.input.stream).map(|(a, b)| a - b).collect();
    let finite = output.stream.iter().chain(&hidden).all(|v| v.is_finite());
    let report = RunReport {
        backend: ran.backend_name(),
        device: ran.device(),
        tokens: args.step.batch * args.step.q_len,
        batch: args.step.batch,
        q_len: args.step.q_len,
        ctx: args.step.ctx,
        kind: args.step.kind.to_string(),
        page: args.step.page,
        query: args.step.query.to_string(),
        seed: args.seed,
        weights_seconds: *weights_seconds,
        load_seconds: *load_seconds,
        step_ms: *step_ms,
        stream_rms: report::rms(&output.stream),
        hidden_rms: report::rms(&hidden),
        update_rms: report::rms(&update),
        finite,
        routing: routing(&args.dims.config(), *local_start, &output.topk_ids),
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(report_error)?);
        return Ok(finite);
    }
    let r = &report.routing;
    println!(
        "{}",
        report::facts(&[
            ("device", report.device.clone()),
            (
                "step",
                format!(
                    "{} request(s) x {} token(s) after {} cached, {} attention, page {}, {} queries",
                    report.batch, report.q_len, report.ctx, report.kind, report.page, report.query
                ),
            ),
            ("weights made / loaded", format!("{weights_seconds:.1} s / {load_seconds:.1} s")),
            ("step, host to host", format!("{step_ms:.1} ms")),
            (
                "rms of stream / update / hidden",
                format!("{:.4} / {:.4} / {:.4}", report.stream_rms, report.update_rms, report.hidden_rms)
            ),
            (
                "routing",
                format!(
                    "{} routes, {} of them on experts {}.. of this rank ({} experts touched)",
                    r.routes, r.local_routes, r.local_start, r.local_experts
                ),
            ),
            ("outputs", if finite { "finite".into() } else { "NOT FINITE".into() }),
        ])
    );
    Ok(finite)
}

/// A report that cannot be serialised is a fault of this program.
pub fn report_error(error: serde_json::Error) -> muse_spark_layer::Error {
    muse_spark_layer::Error::Internal { what: error.to_string() }
}
