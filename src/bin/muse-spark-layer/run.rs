//! `run`: one synthetic step, and what came out; `trace dump` runs it too.

use crate::args::RunArgs;
use crate::bench::floor::Load;
use crate::{machine, report};
use muse_spark_layer::backend::cpu::{StepOptions, StepOutput};
use muse_spark_layer::routing::busiest_start;
use muse_spark_layer::synthetic::{self, SyntheticStep};
use muse_spark_layer::{Backend, DecoderLayer, LayerWeights, Result, Taps};
use std::time::Instant;

/// Which of the step's routes stay on this rank.
#[derive(serde::Serialize)]
pub struct Routing {
    pub local_start: i32,
    pub routes: usize,
    pub local_routes: usize,
    pub local_experts: usize,
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
        local_start = busiest_start(&config, &output.topk_ids);
        (output, step_ms) = forward(local_start)?;
    }
    progress.finish_and_clear();
    Ok(Ran { backend, step, output, local_start, weights_seconds, load_seconds, step_ms })
}

/// One synthetic step. `false`: what came out is not finite.
pub fn run(args: &RunArgs) -> Result<bool> {
    let ran = simulate(args, Taps::None)?;
    let Ran { step, output, local_start, weights_seconds, load_seconds, step_ms, .. } = &ran;
    let hidden: Vec<f32> = output.hidden.iter().map(|h| h.to_f32()).collect();
    let update: Vec<f32> = output.stream.iter().zip(&step.input.stream).map(|(a, b)| a - b).collect();
    let finite = output.stream.iter().chain(&hidden).all(|v| v.is_finite());
    let load = Load::of(&args.dims.config(), &output.topk_ids, *local_start);
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
        routing: Routing {
            local_start: *local_start,
            routes: output.topk_ids.len(),
            local_routes: load.routes as usize,
            local_experts: load.experts as usize,
        },
    };
    report::show(args.json, &report, table)?;
    Ok(finite)
}

fn table(r: &RunReport) -> String {
    let routing = &r.routing;
    let facts = report::facts(&[
        ("device", r.device.clone()),
        (
            "step",
            format!(
                "{} request(s) x {} token(s) after {} cached, {} attention, page {}, {} queries",
                r.batch, r.q_len, r.ctx, r.kind, r.page, r.query
            ),
        ),
        ("weights made / loaded", format!("{:.1} s / {:.1} s", r.weights_seconds, r.load_seconds)),
        ("step, host to host", format!("{:.1} ms", r.step_ms)),
        ("rms of stream / update / hidden", format!("{:.4} / {:.4} / {:.4}", r.stream_rms, r.update_rms, r.hidden_rms)),
        (
            "routing",
            format!(
                "{} routes, {} of them on experts {}.. of this rank ({} experts touched)",
                routing.routes, routing.local_routes, routing.local_start, routing.local_experts
            ),
        ),
        ("outputs", if r.finite { "finite".into() } else { "NOT FINITE".into() }),
    ]);
    facts.to_string()
}
