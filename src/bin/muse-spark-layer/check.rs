//! `check`: the CUDA backend against the CPU reference, tap by tap.

use crate::args::CheckArgs;
use crate::cases::{self, Case};
use crate::{machine, report};
use muse_spark_layer::backend::cpu::{StepOptions, StepOutput, TapValues};
use muse_spark_layer::numerics::relative_l2;
use muse_spark_layer::routing::{busiest_start, route_score};
use muse_spark_layer::weights::derived::residual_coefficients;
use muse_spark_layer::{
    synthetic, Backend, DecoderLayer, Error, LayerConfig, LayerWeights, NamedTensors, Result, Taps,
};

/// Bounds on the relative L2 distance from the reference, by tap: each a small multiple of what the
/// 16-bit roundings on the way (docs/numerics.md) amount to.
const BOUNDS: [(&str, f64); 9] = [
    ("attn_core", 0.003),
    ("attn_out", 0.006),
    ("stream_after_attn", 0.004),
    ("ffn_input", 0.004),
    ("router_logits", 0.004),
    ("topk_scores", 0.004),
    ("expert_input", 0.008),
    ("moe_mix", 0.01),
    ("ffn_out", 0.01),
];
/// Bound on the residual update and the next attention input.
const OUTPUT_BOUND: f64 = 0.01;
/// A token may choose another expert than the reference where the two scores are this close.
const TIE: f32 = 2e-3;
/// So many tokens of a case may, and a twentieth of them (a case of 32 tokens had 3, one of 512 had 8); a router that
/// chose at random would be far above.
const NEAR_TIES: usize = 2;

#[derive(serde::Serialize)]
struct CheckReport {
    version: &'static str,
    device: String,
    seed: u64,
    passed: usize,
    failed: usize,
    cases: Vec<Outcome>,
}

/// One compared case.
#[derive(serde::Serialize)]
struct Outcome {
    case: String,
    ok: bool,
    update: f64,
    hidden: f64,
    /// (tap, distance) in the order of the dataflow.
    taps: Vec<(&'static str, f64)>,
    /// Tokens whose experts differ by a near tie; they are left out of the experts' taps and the outputs.
    near_ties: usize,
    faults: Vec<String>,
}

/// The layer on both backends and what `update` needs of its weights.
struct Pair {
    cpu: DecoderLayer,
    cuda: DecoderLayer,
    carried: Vec<f32>,
    bias: Vec<f32>,
}

fn pair(config: &LayerConfig, tensors: NamedTensors<'static>, device: i32) -> Result<Pair> {
    let gate = |name: &str| -> Result<Vec<f32>> {
        let gate: Vec<f32> = tensors.get(name)?.as_bf16(name)?.iter().map(|v| v.to_f32()).collect();
        Ok(residual_coefficients(config, &gate).0)
    };
    let carried = gate("attn_residual_gate")?.iter().zip(gate("ffn_residual_gate")?).map(|(a, b)| a * b).collect();
    let bias = tensors.get("router_bias")?.as_f32("router_bias")?.to_vec();
    let cuda =
        DecoderLayer::new(config.clone(), LayerWeights::from_host(config, tensors.clone())?, Backend::Cuda { device })?;
    let cpu = DecoderLayer::new(config.clone(), LayerWeights::from_host(config, tensors)?, Backend::Cpu)?;
    Ok(Pair { cpu, cuda, carried, bias })
}

/// Compares the whole matrix. `false`: a case departs.
pub fn check(args: &CheckArgs) -> Result<bool> {
    let selected: Vec<Case> = cases::all()
        .into_iter()
        .filter(|c| cases::named(&c.name, &args.cases.only) && (args.long || !c.long))
        .collect();
    if selected.is_empty() {
        let wanted = "parts of cases' names, separated by | (see --list, and --long)".into();
        return Err(Error::Value { what: "--only".into(), wanted, got: args.cases.only.clone() });
    }
    if args.cases.list {
        return report::list(selected.iter().map(|c| c.name.as_str()));
    }
    let config = LayerConfig::muse_spark_tp8();
    let bar = report::bar(selected.len());
    let mut outcomes = Vec::new();
    for stressed in [false, true] {
        let cases: Vec<&Case> = selected.iter().filter(|c| c.stressed == stressed).collect();
        if cases.is_empty() {
            continue;
        }
        bar.set_message("weights");
        let mut tensors = synthetic::weights(&config, args.cases.seed)?;
        if stressed {
            synthetic::stress(&config, &mut tensors)?;
        }
        let pair = pair(&config, tensors, args.cases.device)?;
        for case in cases {
            bar.set_message(case.name.clone());
            outcomes.push(compare(&config, &pair, case, args.cases.seed)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let failed = outcomes.iter().filter(|o| !o.ok).count();
    let report = CheckReport {
        version: env!("CARGO_PKG_VERSION"),
        device: machine::name(Backend::Cuda { device: args.cases.device }),
        seed: args.cases.seed,
        passed: outcomes.len() - failed,
        failed,
        cases: outcomes,
    };
    report::show(args.cases.json, &report, table)?;
    Ok(failed == 0)
}

fn table(r: &CheckReport) -> String {
    let mut header = vec!["case", "update", "hidden"];
    header.extend(BOUNDS.map(|(tap, _)| tap));
    header.push("");
    let mut table = report::table(&header);
    for o in &r.cases {
        let mut row = vec![o.case.clone(), format!("{:.4}", o.update), format!("{:.4}", o.hidden)];
        row.extend(o.taps.iter().map(|(_, d)| format!("{d:.4}")));
        row.push(if o.ok { "ok".into() } else { o.faults.join("; ") });
        table.add_row(row);
    }
    format!("{table}\n{} passed, {} failed", r.passed, r.failed)
}

fn compare(config: &LayerConfig, pair: &Pair, case: &Case, seed: u64) -> Result<Outcome> {
    let mut step = synthetic::step(config, &case.spec, seed)?;
    let options = StepOptions { taps: Taps::All, ..StepOptions::new(case.spec.kind, case.query) };
    let run = |layer: &DecoderLayer, step: &synthetic::SyntheticStep| -> Result<(StepOutput, Vec<u8>, Vec<u8>)> {
        let mut cache = step.cache.clone();
        let output = layer.forward_host(&step.input.view(), &mut cache.view(), &options)?;
        Ok((output, cache.k, cache.v))
    };
    step.input.local_start = match case.local_start {
        Some(start) => start,
        None => busiest_start(config, &run(&pair.cuda, &step)?.0.topk_ids),
    };
    let (want, want_k, want_v) = run(&pair.cpu, &step)?;
    let (got, got_k, got_v) = run(&pair.cuda, &step)?;
    let mut faults = Vec::new();

    // Tokens whose experts agree; the others must be near ties.
    let tokens = step.input.positions.len();
    let empty = TapValues::default();
    let (want_taps, got_taps) = (want.taps.as_ref().unwrap_or(&empty), got.taps.as_ref().unwrap_or(&empty));
    let mut agree = vec![true; tokens];
    for t in 0..tokens {
        let row = |ids: &[i32]| {
            let mut ids = ids[t * config.top_k..][..config.top_k].to_vec();
            ids.sort_unstable();
            ids
        };
        let (a, b) = (row(&want.topk_ids), row(&got.topk_ids));
        if a == b {
            continue;
        }
        agree[t] = false;
        let biased = |id: i32| {
            let logit = want_taps.router_logits[t * config.n_experts + id as usize];
            route_score(config, logit.into()) + pair.bias[id as usize]
        };
        let lowest = a.iter().map(|id| biased(*id)).fold(f32::INFINITY, f32::min);
        if let Some(id) = b.iter().find(|id| !a.contains(id) && biased(**id) < lowest - TIE) {
            faults.push(format!("token {t} chose expert {id}, {} below the 8th", lowest - biased(*id)));
        }
    }
    let near_ties = agree.iter().filter(|a| !**a).count();
    if near_ties > NEAR_TIES + tokens / 20 {
        faults.push(format!("{near_ties} of {tokens} tokens chose other experts"));
    }
    let kept = |values: &[f32]| -> Vec<f32> {
        let width = values.len() / tokens.max(1);
        (0..tokens).filter(|t| agree[*t]).flat_map(|t| values[t * width..][..width].iter().copied()).collect()
    };

    let mut taps = Vec::new();
    let ranked = by_expert(&got_taps.topk_scores, &got.topk_ids, &want.topk_ids, config.top_k);
    for (((name, want), (_, got)), (_, bound)) in want_taps.named().into_iter().zip(got_taps.named()).zip(BOUNDS) {
        let got = if name == "topk_scores" { &ranked } else { got };
        let distance = if want.len() == got.len() { relative_l2(&kept(got), &kept(want)) } else { f64::INFINITY };
        if distance.is_nan() || distance > bound {
            faults.push(format!("{name} {distance:.4} > {bound}"));
        }
        taps.push((name, distance));
    }
    let update = |stream: &[f32]| -> Vec<f32> {
        let carried = pair.carried.iter().cycle();
        stream.iter().zip(&step.input.stream).zip(carried).map(|((new, old), c)| new - c * old).collect()
    };
    let floats = |hidden: &[half::bf16]| -> Vec<f32> { hidden.iter().map(|h| h.to_f32()).collect() };
    let update = relative_l2(&kept(&update(&got.stream)), &kept(&update(&want.stream)));
    let hidden = relative_l2(&kept(&floats(&got.hidden)), &kept(&floats(&want.hidden)));
    for (name, distance) in [("update", update), ("hidden", hidden)] {
        if distance.is_nan() || distance > OUTPUT_BOUND {
            faults.push(format!("{name} {distance:.4} > {OUTPUT_BOUND}"));
        }
    }
    for (name, got, want, old) in
        [("k_cache", &got_k, &want_k, &step.cache.k), ("v_cache", &got_v, &want_v, &step.cache.v)]
    {
        faults.extend(cache_fault(config, name, got, want, old));
    }
    Ok(Outcome { case: case.name.clone(), ok: faults.is_empty(), update, hidden, taps, near_ties, faults })
}

/// `scores` of the experts `ids` (both `[T, top_k]`) in the order of `wanted`: two experts of nearly equal score may
/// come in either order. 0 where an expert is not among `ids`.
fn by_expert(scores: &[f32], ids: &[i32], wanted: &[i32], top_k: usize) -> Vec<f32> {
    let rows = scores.chunks(top_k).zip(ids.chunks(top_k)).zip(wanted.chunks(top_k));
    rows.flat_map(|((scores, ids), wanted)| {
        wanted.iter().map(|w| ids.iter().position(|id| id == w).map_or(0.0, |at| scores[at]))
    })
    .collect()
}

/// Only the step's rows changed, and they hold the reference's entries up to roundings of ties.
fn cache_fault(config: &LayerConfig, name: &str, got: &[u8], want: &[u8], old: &[u8]) -> Option<String> {
    let row = config.kv_size();
    let float =
        |bytes: &[u8]| -> Vec<f32> { bytes.iter().map(|b| muse_spark_layer::numerics::e4m3_to_f32(*b)).collect() };
    let (mut new_got, mut new_want) = (Vec::new(), Vec::new());
    for ((g, w), o) in got.chunks(row).zip(want.chunks(row)).zip(old.chunks(row)) {
        if w == o && g != o {
            return Some(format!("{name}: a row outside the step's slots changed"));
        }
        if w != o {
            new_got.extend(float(g));
            new_want.extend(float(w));
        }
    }
    let distance = relative_l2(&new_got, &new_want);
    (distance.is_nan() || distance > 0.02).then(|| format!("{name}: new entries {distance:.4} > 0.02"))
}

#[cfg(test)]
mod tests {
    use super::by_expert;

    #[test]
    fn scores_are_compared_by_expert() {
        let ranked = by_expert(&[0.5, 0.4, 0.9, 0.1], &[7, 3, 1, 2], &[3, 7, 1, 4], 2);
        assert_eq!(ranked, [0.4, 0.5, 0.9, 0.0]);
    }
}
