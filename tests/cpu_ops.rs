//! Each operation of the CPU layer against plain FP64 formulas, on its own inputs, over a pairwise set of
//! steps at small dimensions.

mod cpu_common;

use cpu_common::naive;
use cpu_common::pairwise::{self, pairwise, Row, ROWS};
use cpu_common::{close, layer, widen};
use half::bf16;
use muse_spark_layer::backend::cpu::{self, CpuLayer, CpuWeights, StepOptions};
use muse_spark_layer::numerics::e4m3_to_f32;
use muse_spark_layer::routing::{self, ExpertLists, TopK};
use muse_spark_layer::synthetic::{self, SyntheticStep};
use muse_spark_layer::{LayerConfig, LayerKind, QueryPrecision, WeightKind};
use rstest::rstest;
use std::collections::BTreeSet;

/// Relative L2 error of an FP32 operation at these sizes.
const FP32: f64 = 2e-6;

/// A row's layer, step and every operation's result, each computed from the previous one's.
struct Chain {
    layer: CpuLayer<'static>,
    step: SyntheticStep,
    before: SyntheticStep,
    kind: LayerKind,
    x: Vec<f32>,
    qkv: Vec<f32>,
    queries: cpu::Queries,
    core: Vec<f32>,
    gated: Vec<f32>,
    attn_out: Vec<f32>,
    boundary: cpu::AttnBoundary,
    logits: Vec<f64>,
    topk: TopK,
    lists: ExpertLists,
    pooled: Vec<f32>,
    expert_input: Vec<f32>,
    inter: Vec<f32>,
    y: Vec<f32>,
    mix: Vec<f32>,
    ffn_out: Vec<f32>,
}

fn chain(row: &Row) -> Chain {
    let spec = pairwise::spec(row);
    let seed = ROWS.iter().position(|r| r == row).unwrap() as u64;
    let experts = if seed % 5 == 4 { WeightKind::Bf16 } else { WeightKind::Nvfp4 };
    chain_with(layer(&LayerConfig { experts, ..LayerConfig::small() }, seed), &spec, seed, QueryPrecision::Fp32)
}

fn chain_with(layer: CpuLayer<'static>, spec: &synthetic::StepSpec, seed: u64, query: QueryPrecision) -> Chain {
    let (c, w, kind) = (layer.config().clone(), layer.weights(), spec.kind);
    let mut step = synthetic::step(&c, spec, seed).unwrap();
    let before = step.clone();
    let x = widen(&step.input.attn_input);
    let qkv = cpu::qkv_gate(&c, w, &x);
    let SyntheticStep { input, cache } = &mut step;
    let batch = input.view().batch;
    let queries = cpu::qk_norm_rope_append(&c, &qkv, &batch, &mut cache.view(), kind, query, false);
    let core = cpu::attention(&c, &queries.q, &batch, &cache.view(), kind);
    let gated = cpu::out_norm_gate(&c, &core, &queries.gate);
    let attn_out = cpu::o(&c, w, &gated);
    let boundary = cpu::attn_boundary(&c, w, &input.stream, &attn_out);
    let logits = cpu::router(&c, w, &boundary.ffn_input);
    let topk = cpu::router_topk(&c, w, &logits);
    let start = routing::busiest_start(&c, &topk.ids);
    let lists = ExpertLists::new(&c, &topk.ids, start, usize::MAX);
    let pooled = cpu::pooler(&c, w, &boundary.ffn_input);
    let expert_input = cpu::pre_expert_norm(&c, w, &pooled);
    let inter = cpu::w13(&c, w, &expert_input, &lists);
    let y = cpu::w2(&c, w, &inter, &lists);
    let mix = cpu::combine(&c, w, &y, &topk.scores, &lists);
    let ffn_out = cpu::unpooler(&c, w, &mix, 0);
    Chain {
        step,
        before,
        kind,
        x,
        qkv,
        queries,
        core,
        gated,
        attn_out,
        boundary,
        logits,
        topk,
        lists,
        pooled,
        expert_input,
        inter,
        y,
        mix,
        ffn_out,
        layer,
    }
}

fn bf16s<'a>(w: &'a CpuWeights, name: &str) -> &'a [bf16] {
    w.tensors().get(name).unwrap().as_bf16(name).unwrap()
}

fn f32s<'a>(w: &'a CpuWeights, name: &str) -> &'a [f32] {
    w.tensors().get(name).unwrap().as_f32(name).unwrap()
}

/// One expert's matrix as a function of (row, column).
fn expert<'a>(c: &'a LayerConfig, w: &'a CpuWeights, name: &str, e: usize) -> Box<dyn Fn(usize, usize) -> f64 + 'a> {
    let dim = c.expert_dim;
    let rows = if name == "w13" { 2 * dim } else { dim };
    if c.experts == WeightKind::Bf16 {
        return Box::new(naive::element(&bf16s(w, name)[e * rows * dim..][..rows * dim], dim));
    }
    let scales = format!("{name}_sf");
    let codes = &w.tensors().get(name).unwrap().as_u8(name).unwrap()[e * rows * dim / 2..][..rows * dim / 2];
    let sf = &w.tensors().get(&scales).unwrap().as_e4m3(&scales).unwrap()[e * rows * dim / 16..][..rows * dim / 16];
    let gs = f32s(w, &format!("{name}_gs"));
    let wide = rows / dim; // w13: a scale for the gate, one for up
    Box::new(naive::nvfp4(codes, sf, move |r| gs[e * wide + r / dim], dim))
}

#[test]
fn every_two_values_of_every_two_factors_meet() {
    let texts = |r: &Row| {
        [
            format!("{:?}", r.0),
            format!("{:?}", r.1),
            format!("{:?}", r.2),
            format!("{:?}", r.3),
            format!("{:?}", r.4),
            format!("{:?}", r.5),
            format!("{:?}", r.6),
            format!("{:?}", r.7),
        ]
    };
    let rows: Vec<[String; 8]> = ROWS.iter().map(texts).collect();
    for a in 0..8 {
        for b in 0..a {
            let values = |f: usize| rows.iter().map(|r| r[f].clone()).collect::<BTreeSet<_>>();
            for x in values(a) {
                for y in values(b) {
                    assert!(rows.iter().any(|r| r[a] == x && r[b] == y), "{x} never meets {y}");
                }
            }
        }
    }
}

pairwise!(qkv_gate, |row| {
    let s = chain(row);
    let c = s.layer.config();
    let w = bf16s(s.layer.weights(), "qkv_gate");
    close("qkv_gate", &s.qkv, &naive::project(&s.x, c.hidden, c.qkv_rows(), naive::element(w, c.hidden)), FP32);
});

pairwise!(qk_norm_rope_append, |row| check_append(row, QueryPrecision::Fp32));

#[rstest]
fn qk_norm_rope_append_rounds_queries(
    #[values(QueryPrecision::Bf16, QueryPrecision::Fp16, QueryPrecision::E4m3)] precision: QueryPrecision,
    #[values(4, 11, 17)] row: usize,
) {
    check_append(&ROWS[row], precision);
}

fn check_append(row: &Row, precision: QueryPrecision) {
    let seed = ROWS.iter().position(|r| r == row).unwrap() as u64;
    let s = chain_with(layer(&LayerConfig::small(), seed), &pairwise::spec(row), seed, precision);
    let c = s.layer.config();
    let (q, kv, width) = (c.q_size(), c.kv_size(), c.qkv_rows());
    let (mut want_q, mut want_gate) = (Vec::new(), Vec::new());
    let mut cache = s.before.cache.clone();
    for (t, row) in s.qkv.chunks_exact(width).enumerate() {
        let position = s.before.input.positions[t];
        let round = |v: &f64| naive::round_query(*v, precision, c.qk_scale_factor) as f32;
        want_q.extend(naive::norm_rope(c, &row[..q], s.kind, position).iter().map(round));
        want_gate.extend_from_slice(&row[q + 2 * kv..]);
        let k = naive::norm_rope(c, &row[q..q + kv], s.kind, position);
        let slot = s.before.input.cache_loc[t] as usize * kv;
        for i in 0..kv {
            let v = f64::from(row[q + kv + i]) / f64::from(cache.v_scale);
            for (what, bytes, got, want) in [
                ("k", &mut cache.k, s.step.cache.k[slot + i], k[i] / f64::from(cache.k_scale)),
                ("v", &mut cache.v, s.step.cache.v[slot + i], v),
            ] {
                // The nearest value, or one as near but for FP32 rounding of the quotient.
                let distance = |x: f32| (f64::from(x) - want).abs();
                let (got_distance, best) = (distance(e4m3_to_f32(got)), distance(naive::nearest_e4m3(want)));
                assert!(
                    got_distance <= best + want.abs() * 1e-6,
                    "{what} of token {t}, element {i}: {got:#04x} for {want}"
                );
                bytes[slot + i] = got;
            }
        }
    }
    // A rounding may fall the other way where the FP32 value is next to a midpoint.
    let bound = match precision {
        QueryPrecision::Fp32 => FP32,
        QueryPrecision::Bf16 | QueryPrecision::Fp16 => 1e-4,
        QueryPrecision::E4m3 => 2e-3,
    };
    close("q", &s.queries.q, &want_q, bound);
    assert_eq!(s.queries.gate, want_gate);
    // Nothing else in the cache changed.
    assert_eq!(cache, s.step.cache);
}

pairwise!(attention, |row| {
    let mut s = chain(row);
    let want =
        naive::attention(s.layer.config(), &s.queries.q, &s.step.input.view().batch, &s.step.cache.view(), s.kind);
    close("attn_core", &s.core, &want, FP32);
});

pairwise!(out_norm_gate, |row| {
    let s = chain(row);
    close("out_norm_gate", &s.gated, &naive::out_norm_gate(s.layer.config(), &s.core, &s.queries.gate), FP32);
});

pairwise!(o, |row| {
    let s = chain(row);
    let c = s.layer.config();
    let w = bf16s(s.layer.weights(), "o");
    close(
        "attn_out",
        &s.attn_out,
        &naive::project(&s.gated, c.q_size(), c.hidden, naive::element(w, c.q_size())),
        FP32,
    );
});

/// Checks the first boundary for `branch`, `factor` times the usual one (small: the epsilon counts).
fn check_attn_boundary(s: &Chain, factor: f32) {
    let (c, w) = (s.layer.config(), s.layer.weights());
    let branch: Vec<f32> = s.attn_out.iter().map(|v| v * factor).collect();
    let got = cpu::attn_boundary(c, w, &s.before.input.stream, &branch);
    let wide: Vec<f64> = branch.iter().map(|&v| f64::from(v)).collect();
    let stream = naive::join(c, &s.before.input.stream, &wide, bf16s(w, "attn_residual_gate"));
    close("stream_after_attn", &got.stream_after_attn, &stream, FP32);
    let input = naive::norm(&got.stream_after_attn, bf16s(w, "pre_ffn_norm"), c.rms_eps);
    close("ffn_input", &got.ffn_input, &input, FP32);
}

pairwise!(attn_boundary, |row| check_attn_boundary(&chain(row), 1.0));

pairwise!(router, |row| {
    let s = chain(row);
    let (c, w) = (s.layer.config(), s.layer.weights());
    let router = f32s(w, "router");
    for (t, x) in s.boundary.ffn_input.chunks_exact(c.hidden).enumerate() {
        for e in 0..c.n_experts {
            let want: f64 = (0..c.hidden).map(|i| f64::from(x[i]) * f64::from(router[e * c.hidden + i])).sum();
            let got = s.logits[t * c.n_experts + e];
            assert!((got - want).abs() <= 1e-12 * (1.0 + want.abs()), "token {t}, expert {e}: {got} for {want}");
        }
    }
});

pairwise!(router_topk, |row| {
    let s = chain(row);
    let c = s.layer.config();
    let bias = f32s(s.layer.weights(), "router_bias");
    for (t, logits) in s.logits.chunks_exact(c.n_experts).enumerate() {
        let (scores, biased) = naive::scores(c, logits, bias);
        let mut order: Vec<usize> = (0..c.n_experts).collect();
        order.sort_by(|&a, &b| biased[b].total_cmp(&biased[a]).then(a.cmp(&b)));
        let want: Vec<i32> = order[..c.top_k].iter().map(|&e| e as i32).collect();
        assert_eq!(&s.topk.ids[t * c.top_k..][..c.top_k], want, "token {t}");
        let total: f64 = order[..c.top_k].iter().map(|&e| f64::from(scores[e])).sum();
        let want: Vec<f32> = order[..c.top_k].iter().map(|&e| (f64::from(scores[e]) / total) as f32).collect();
        close("topk_scores", &s.topk.scores[t * c.top_k..][..c.top_k], &want, 1e-6);
    }
    // The lists hold each local route once, by expert and then token.
    let mut seen = Vec::new();
    for e in 0..c.local_experts {
        for r in s.lists.offsets[e]..s.lists.offsets[e + 1] {
            seen.push((e, s.lists.route_token[r]));
        }
    }
    let start = routing::busiest_start(c, &s.topk.ids);
    let mut want: Vec<(usize, usize)> = Vec::new();
    for (i, &id) in s.topk.ids.iter().enumerate() {
        if (start..start + c.local_experts as i32).contains(&id) {
            want.push(((id - start) as usize, i / c.top_k));
        }
    }
    want.sort_unstable();
    assert_eq!(seen, want);
});

pairwise!(pooler, |row| {
    let s = chain(row);
    let c = s.layer.config();
    let w = bf16s(s.layer.weights(), "pooler");
    let want = naive::project(&s.boundary.ffn_input, c.hidden, c.expert_dim, naive::element(w, c.hidden));
    close("pooler", &s.pooled, &want, FP32);
});

pairwise!(pre_expert_norm, |row| {
    let s = chain(row);
    let c = s.layer.config();
    let want = naive::norm(&s.pooled, bf16s(s.layer.weights(), "pre_expert_norm"), c.rms_eps);
    close("expert_input", &s.expert_input, &want, FP32);
});

pairwise!(w13, |row| {
    let s = chain(row);
    let (c, w) = (s.layer.config(), s.layer.weights());
    let dim = c.expert_dim;
    let mut want = Vec::new();
    for e in 0..c.local_experts {
        for r in s.lists.offsets[e]..s.lists.offsets[e + 1] {
            let x = &s.expert_input[s.lists.route_token[r] * dim..][..dim];
            want.extend(naive::swiglu(&naive::project(x, dim, 2 * dim, expert(c, w, "w13", e))));
        }
    }
    close("w13", &s.inter, &want, FP32);
});

pairwise!(w2, |row| {
    let s = chain(row);
    let (c, w) = (s.layer.config(), s.layer.weights());
    let dim = c.expert_dim;
    let mut want = Vec::new();
    for e in 0..c.local_experts {
        let x = &s.inter[s.lists.offsets[e] * dim..s.lists.offsets[e + 1] * dim];
        want.extend(naive::project(x, dim, dim, expert(c, w, "w2", e)));
    }
    close("w2", &s.y, &want, FP32);
});

pairwise!(combine, |row| {
    let s = chain(row);
    let (c, w) = (s.layer.config(), s.layer.weights());
    let dim = c.expert_dim;
    let norm = bf16s(w, "post_expert_norm");
    let start = routing::busiest_start(c, &s.topk.ids) as usize;
    let mut want = vec![0f64; s.expert_input.len()];
    for t in 0..s.expert_input.len() / dim {
        for slot in t * c.top_k..(t + 1) * c.top_k {
            let Some(e) = (s.topk.ids[slot] as usize).checked_sub(start).filter(|&e| e < c.local_experts) else {
                continue;
            };
            let of_expert = s.lists.offsets[e]..s.lists.offsets[e + 1];
            let route = of_expert.clone().find(|&r| s.lists.route_token[r] == t).unwrap();
            let row = naive::post_expert_norm(c, &s.y[route * dim..][..dim], norm);
            for (sum, v) in want[t * dim..][..dim].iter_mut().zip(row) {
                *sum += v * f64::from(s.topk.scores[slot]);
            }
        }
    }
    let want: Vec<f32> = want.iter().map(|&v| v as f32).collect();
    close("moe_mix", &s.mix, &want, FP32);
});

pairwise!(unpooler, |row| {
    let s = chain(row);
    let c = s.layer.config();
    let w = bf16s(s.layer.weights(), "unpooler");
    let tokens = s.mix.len() / c.expert_dim;
    let whole = naive::project(&s.mix, c.expert_dim, c.hidden, naive::element(w, c.expert_dim));
    close("ffn_out", &cpu::unpooler(c, s.layer.weights(), &s.mix, 0), &s.ffn_out, 0.0);
    for rank in 0..c.ranks() {
        let first = rank * c.unpool_slice;
        let own = |i: usize| (first..first + c.unpool_slice).contains(&(i % c.hidden));
        let kept = |i: usize, v: &f32| if tokens > 8 || own(i) { *v } else { 0.0 };
        let want: Vec<f32> = whole.iter().enumerate().map(|(i, v)| kept(i, v)).collect();
        let got = cpu::unpooler(c, s.layer.weights(), &s.mix, rank);
        close("ffn_out", &got, &want, FP32);
        assert!(tokens > 8 || got.iter().enumerate().all(|(i, v)| own(i) || *v == 0.0));
    }
});

/// Checks the second boundary for `factor` times the usual branch.
fn check_ffn_boundary(s: &Chain, factor: f32) {
    let (c, w) = (s.layer.config(), s.layer.weights());
    let branch: Vec<f32> = s.ffn_out.iter().map(|v| v * factor).collect();
    let got = cpu::ffn_boundary(c, w, &s.boundary.stream_after_attn, &branch);
    let weighed = naive::weigh(&branch, bf16s(w, "post_ffn_norm"));
    let stream = naive::join(c, &s.boundary.stream_after_attn, &weighed, bf16s(w, "ffn_residual_gate"));
    close("stream", &got.stream, &stream, FP32);
    close("hidden", &got.hidden, &naive::norm(&got.stream, bf16s(w, "next_pre_attn_norm"), c.rms_eps), FP32);
}

pairwise!(ffn_boundary, |row| check_ffn_boundary(&chain(row), 1.0));

/// Gates at the clamp, norm weights far from 1, branches where the epsilons count, subnormal scales.
#[rstest]
fn stressed_operations(#[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind, #[values(1, 4)] q_len: usize) {
    let c = LayerConfig::small();
    let mut weights = synthetic::weights(&c, 77).unwrap();
    synthetic::stress(&c, &mut weights).unwrap();
    let spec = synthetic::StepSpec { v_scale: 2f32.powi(-8), ..synthetic::StepSpec::new(3, q_len, 30, kind) };
    let s = chain_with(CpuLayer::new(c, weights).unwrap(), &spec, 77, QueryPrecision::Fp32);
    for factor in [1.0, 1e-2, 1e-4] {
        check_attn_boundary(&s, factor);
        check_ffn_boundary(&s, factor);
    }
    let (c, w) = (s.layer.config(), s.layer.weights());
    let dim = c.expert_dim;
    close("out_norm_gate", &s.gated, &naive::out_norm_gate(c, &s.core, &s.queries.gate), FP32);
    close("expert_input", &s.expert_input, &naive::norm(&s.pooled, bf16s(w, "pre_expert_norm"), c.rms_eps), FP32);
    for e in 0..c.local_experts {
        let x = &s.inter[s.lists.offsets[e] * dim..s.lists.offsets[e + 1] * dim];
        let want = naive::project(x, dim, dim, expert(c, w, "w2", e));
        close("w2", &s.y[s.lists.offsets[e] * dim..s.lists.offsets[e + 1] * dim], &want, FP32);
    }
    let norm = bf16s(w, "post_expert_norm");
    for (t, row) in s.mix.chunks_exact(dim).enumerate() {
        let mut want = vec![0f64; dim];
        for slot in t * c.top_k..(t + 1) * c.top_k {
            if let Some(r) = s.lists.token_route[slot] {
                let y = naive::post_expert_norm(c, &s.y[r * dim..][..dim], norm);
                want.iter_mut().zip(y).for_each(|(sum, v)| *sum += v * f64::from(s.topk.scores[slot]));
            }
        }
        close("moe_mix", row, &want.iter().map(|&v| v as f32).collect::<Vec<_>>(), FP32);
    }
}

// `forward` is the chain of the operations.
pairwise!(forward, |row| {
    let s = chain(row);
    let mut step = s.before.clone();
    step.input.local_start = routing::busiest_start(s.layer.config(), &s.topk.ids);
    let options = StepOptions { taps: muse_spark_layer::Taps::All, ..StepOptions::new(s.kind, QueryPrecision::Fp32) };
    let out = cpu_common::run(&s.layer, &mut step, &options);
    let end = cpu::ffn_boundary(s.layer.config(), s.layer.weights(), &s.boundary.stream_after_attn, &s.ffn_out);
    assert_eq!(out.stream, end.stream);
    assert_eq!(widen(&out.hidden), end.hidden.iter().map(|v| bf16::from_f32(*v).to_f32()).collect::<Vec<_>>());
    assert_eq!((&out.topk_ids, &out.topk_scores), (&s.topk.ids, &s.topk.scores));
    assert_eq!(step.cache, s.step.cache);
    let taps = out.taps.unwrap();
    let logits: Vec<f32> = s.logits.iter().map(|&l| l as f32).collect();
    let want: [&[f32]; 9] = [
        &s.core,
        &s.attn_out,
        &s.boundary.stream_after_attn,
        &s.boundary.ffn_input,
        &logits,
        &s.topk.scores,
        &s.expert_input,
        &s.mix,
        &s.ffn_out,
    ];
    for ((name, got), want) in taps.named().into_iter().zip(want) {
        assert_eq!(got, want, "{name}");
    }
});
