//! `plan`: what a step launches, what each operation must move and compute, and how long that should take. No GPU.

use crate::args::PlanArgs;
use crate::bench::floor::{self, Load, BYTES_PER_US, FLOPS_PER_US};
use crate::bench::kernels::{self, Keys};
use crate::report;
use muse_spark_layer::backend::cuda::heuristics::ROUTER_CLUSTER_TOKENS;
use muse_spark_layer::plan::{AttentionPlan, DensePlan, RouterForm};
use muse_spark_layer::{AttentionEngine, LayerConfig, Plan, Result};

/// What the operations of a chain reach, fitted to the recorded cases: memory, tensor cores (their times add up: an
/// operation near the roof's ridge overlaps them badly), and what a stage costs beyond both.
const REACHED_BYTES_PER_US: f64 = 0.94 * BYTES_PER_US;
const REACHED_FLOPS_PER_US: f64 = 0.80 * FLOPS_PER_US;
const STAGE_US: f64 = 1.8;
/// Routes a token that the busiest of eight ranks gets from the synthetic router.
const ROUTES_A_TOKEN: f64 = 2.55;

/// An operation's share of a step.
#[derive(serde::Serialize)]
struct Row {
    operation: &'static str,
    /// The kernel's file under csrc/; a pattern where the launcher chooses among several.
    file: &'static str,
    /// Tiles, splits, passes.
    how: String,
    mb: f64,
    gflop: f64,
    floor_us: f64,
    predicted_us: f64,
}

#[derive(serde::Serialize)]
struct PlanReport<'a> {
    plan: &'a Plan,
    routes: f64,
    experts: f64,
    operations: Vec<Row>,
    floor_us: f64,
    predicted_us: f64,
}

/// The plan's operations in order, each with its kernel's file and its launch form.
fn operations(plan: &Plan) -> Vec<(&'static str, &'static str, String)> {
    let (l, none) = (&plan.launches, String::new);
    let file = |tile_rows: u32, tile_n: u32| match (tile_rows, tile_n) {
        (0, 0) => "gemm/tiled.cuh",
        (0, _) => "gemm/skinny.cuh",
        _ => "gemm/wide.cuh",
    };
    let dense = |d: &DensePlan| (file(d.tile_rows, d.tile_n), d.to_string());
    let with = |name, (file, how)| (name, file, how);
    let attention = |a: &AttentionPlan, decode: bool| match (a.tiled, decode) {
        (true, _) => ("attention/attention_tiled_kernel.cuh", "tiled".to_string()),
        (false, true) => ("attention/attention_decode.cuh", format!("splits {}", a.splits)),
        (false, false) => ("attention/attention_verify*.cuh", format!("splits {}", a.splits)),
    };
    let decode = plan.key.max_q_len <= 1;
    let mut list = vec![with("qkv_gate", dense(&l.qkv_gate))];
    if l.attention.append {
        list.push(with("append_attention", attention(&l.attention, decode)));
    } else {
        list.push(("qk_norm_rope_append", "attention/qk_norm_rope_append.cuh", none()));
        match l.attention.engine {
            AttentionEngine::Own => list.push(with("attention", attention(&l.attention, decode))),
            AttentionEngine::Fa3 => list.extend([
                ("fa3_schedule", "attention/fa3/fa3_schedule.cu", none()),
                ("fa3_attention", "attention/fa3/fa3_forward.cu", format!("splits {}", l.attention.splits)),
            ]),
        }
    }
    let r = &l.router;
    let router = match r.form {
        RouterForm::Rows => ("moe/router.cuh", format!("FP32 rows, splits {}", r.splits)),
        RouterForm::Tiled if plan.key.tokens <= ROUTER_CLUSTER_TOKENS => {
            ("moe/router_cluster.cuh", format!("clusters, FP16 halves, splits {}", r.splits))
        }
        RouterForm::Tiled => ("moe/router_tiled.cuh", format!("tiled, FP16 halves, splits {}", r.splits)),
    };
    let e = &l.experts;
    let experts = |splits: u32| {
        let (file, form) = match e.few {
            true => ("moe/expert_gemm_few.cuh", "few-token"),
            false => ("moe/expert_gemm.cuh", "many-token"),
        };
        let passes = if e.passes > 1 { format!(", {} passes of {} routes", e.passes, e.route_bound) } else { none() };
        (file, format!("{form}, {}, splits {splits}{passes}", e.weight_kind))
    };
    // The tiled attention does its work itself.
    if !l.attention.tiled || l.short_attention.is_some() {
        list.push(("out_norm_gate", "attention/out_norm_gate.cuh", none()));
    }
    list.push(with("o", dense(&l.o)));
    let (topk, pooler) = (("router_topk", "moe/router_topk*.cuh", none()), with("pooler", dense(&l.pooler)));
    if r.boundary {
        list.push(("boundary_router", "moe/boundary_router.cuh", router.1));
        list.push(("boundary_topk", "moe/boundary_router.cuh", none()));
        list.push(pooler);
    } else {
        list.push(("attn_boundary", "residual/boundary*.cuh", none()));
        list.push(with("router", router));
        list.extend(if r.topk_behind { [pooler, topk] } else { [topk, pooler] });
    }
    list.extend([
        ("pre_expert_norm", "moe/pre_expert_norm*.cuh", none()),
        with("w13", experts(1)),
        with("w2", experts(e.w2_splits)),
        ("combine", "moe/combine*.cuh", none()),
        with("unpooler", dense(&l.unpooler)),
        ("ffn_boundary", "residual/boundary*.cuh", none()),
    ]);
    list
}

/// Routes and touched experts of the busiest rank, as the synthetic router gives them to `tokens` tokens.
fn usual_load(config: &LayerConfig, tokens: f64) -> Load {
    let experts = (3.0 + 1.6 * tokens.max(1.0).log2()).min(20.0).min(config.local_experts as f64);
    Load { routes: ROUTES_A_TOKEN * tokens, experts: if tokens > 0.0 { experts } else { 0.0 } }
}

fn rows(config: &LayerConfig, plan: &Plan, load: Load, keys: Keys) -> Vec<Row> {
    let row = |(operation, file, how)| {
        let cost = kernels::cost(config, plan, load, keys, operation);
        Row {
            operation,
            file,
            how,
            mb: cost.bytes * 1e-6,
            gflop: cost.flops * 1e-9,
            floor_us: floor::microseconds(cost.bytes, cost.flops),
            predicted_us: STAGE_US + cost.bytes / REACHED_BYTES_PER_US + cost.flops / REACHED_FLOPS_PER_US,
        }
    };
    operations(plan).into_iter().map(row).collect()
}

/// What a step launches.
pub fn plan(args: &PlanArgs) -> Result<bool> {
    let config = LayerConfig::muse_spark_tp8();
    let plan = Plan::new(args.step.key(), config.experts, args.sms)?;
    let usual = usual_load(&config, f64::from(plan.key.tokens));
    let load = Load { routes: args.routes.unwrap_or(usual.routes), experts: args.experts.unwrap_or(usual.experts) };
    let keys = Keys::of(&config, args.step.kind, (0..args.step.batch).map(|_| (args.step.ctx, args.step.q_len)));
    let operations = rows(&config, &plan, load, keys);
    let sum = |f: fn(&Row) -> f64| operations.iter().map(f).sum::<f64>();
    let (floor_us, predicted_us) = (sum(|r| r.floor_us), sum(|r| r.predicted_us));
    let usual = args.routes.is_none() && args.experts.is_none();
    let report =
        PlanReport { plan: &plan, routes: load.routes, experts: load.experts, operations, floor_us, predicted_us };
    report::show(args.json, &report, |r| text(r, usual))?;
    Ok(true)
}

fn text(r: &PlanReport, usual: bool) -> String {
    let mut table = report::table(&["operation", "csrc/", "how", "MB", "GFLOP", "floor us", "predicted us"]);
    for row in &r.operations {
        let gflop = if row.gflop > 0.0 { format!("{:.2}", row.gflop) } else { String::new() };
        table.add_row([
            row.operation.to_string(),
            row.file.to_string(),
            row.how.clone(),
            format!("{:.2}", row.mb),
            gflop,
            format!("{:.2}", row.floor_us),
            format!("{:.1}", row.predicted_us),
        ]);
    }
    let sum = |f: fn(&Row) -> f64| r.operations.iter().map(f).sum::<f64>();
    table.add_row([
        "sum".to_string(),
        String::new(),
        String::new(),
        format!("{:.1}", sum(|r| r.mb)),
        format!("{:.1}", sum(|r| r.gflop)),
        format!("{:.1}", r.floor_us),
        format!("{:.1}", r.predicted_us),
    ]);
    let head = r.plan.to_string().lines().take(2).collect::<Vec<_>>().join("\n");
    let whose = if usual { " (the synthetic router's busiest rank)" } else { "" };
    format!("{head}\n{:.0} routes on {:.1} experts of this rank{whose}\n{table}", r.routes, r.experts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{cases, results};
    use muse_spark_layer::WeightKind;

    /// The prediction is worth its place: on every recorded case it is within a fifth, on the mean within a tenth.
    #[test]
    fn predictions_are_near_what_was_measured() {
        let judge = results::judge();
        let config = LayerConfig::muse_spark_tp8();
        let mut logs = Vec::new();
        for case in cases::timed() {
            let Some(measured) = judge.timed.iter().find(|t| t.case == case.name) else { continue };
            let plan = Plan::new(case.key(), WeightKind::Nvfp4, 132).unwrap();
            let keys = Keys::of(&config, case.kind, (0..case.batch).map(|_| (case.ctx, case.q_len)));
            let predicted: f64 = rows(&config, &plan, measured.load(), keys).iter().map(|r| r.predicted_us).sum();
            let ratio = predicted / measured.us;
            println!("{:26} {predicted:8.1} predicted {:8.1} measured {ratio:.2}", case.name, measured.us);
            assert!((0.83..1.2).contains(&ratio), "{}: {predicted} against {}", case.name, measured.us);
            logs.push(ratio.ln());
        }
        assert_eq!(logs.len(), 40);
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        assert!((0.9..1.1).contains(&mean), "{mean}");
    }

    #[test]
    fn the_usual_load_grows_with_the_tokens() {
        let config = LayerConfig::muse_spark_tp8();
        let loads: Vec<Load> = [0.0, 1.0, 64.0, 1e6].map(|t| usual_load(&config, t)).to_vec();
        assert_eq!(loads[0], Load { routes: 0.0, experts: 0.0 });
        assert!(loads.windows(2).all(|w| w[0].experts < w[1].experts && w[0].routes < w[1].routes));
        assert!(loads[3].experts <= 32.0);
    }
}
