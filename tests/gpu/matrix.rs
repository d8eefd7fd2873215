//! The judge's cases at full size, operation by operation: the step runs whole on the GPU, and the CPU follows a sample
//! of its tokens, each from the GPU's own previous result (a token's attention from the GPU's own cache). Cases whose
//! inputs alone take seconds to make wait for MUSE_SPARK_LAYER_LONG=1.

use crate::harness::{asked, gpu, step_key, Reference, Run};
use crate::operations::CHECKS;
use muse_spark_layer::backend::cpu::{StepOutput, TapValues};
use muse_spark_layer::routing::busiest_start;
use muse_spark_layer::synthetic::{Dist, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::{LayerKind, PlanKey, QueryPrecision, Stream, Taps};
use rstest::rstest;

use crate::harness::DeviceStep;
use crate::memory::Scratch;

/// Tokens that the CPU follows in a step of more: above 8, as the unpooler's form depends on their number.
const SAMPLE: usize = 12;
const ROW: usize = 128;

/// The step `name` of the judge: what, how many requests, the context, and what is special.
fn spec(name: &str, kind: LayerKind) -> StepSpec {
    let mut words = name.split('-');
    let what = words.next().unwrap();
    let number = |word: &str| -> usize {
        let digits = word.trim_matches(|c: char| !c.is_ascii_digit());
        digits.parse::<usize>().unwrap() * if word.ends_with('k') { 1024 } else { 1 }
    };
    let (first, ctx) = (number(words.next().unwrap()), number(words.next().unwrap()));
    let (batch, q_len) = match what {
        "decode" => (first, 1),
        "verify" => (first, 8),
        "block3" => (first, 3),
        "prefill" => (1, first),
        "prefills2" => (2, first),
        "prefills3" => (3, first),
        other => panic!("{other}"),
    };
    let mut spec = StepSpec::new(batch, q_len, ctx, kind);
    for word in words {
        match word {
            "agentic" => spec.spread = Spread::Agentic,
            "mixed" => spec.spread = Spread::Mixed,
            "soft" => spec.dist = Dist::Soft,
            "outliers" => spec.dist = Dist::Outliers,
            "page16" => spec.page_size = 16,
            "page64" => spec.page_size = 64,
            "half" => (spec.k_scale, spec.v_scale) = (0.5, 0.5),
            "two" => (spec.k_scale, spec.v_scale) = (2.0, 2.0),
            "scales" => (spec.k_scale, spec.v_scale) = (0.37, 2.9),
            "wrap" => spec.local_start = 240,
            other => panic!("{other}"),
        }
    }
    spec
}

/// Tokens `of` of a run, each as a request of its own.
fn sample(
    gpu: &Reference,
    step: &SyntheticStep,
    output: &StepOutput,
    caches: [Vec<u8>; 2],
    of: &[usize],
    kind: LayerKind,
) -> Run {
    fn rows<T: Copy>(x: &[T], tokens: usize, of: &[usize]) -> Vec<T> {
        let width = x.len() / tokens;
        of.iter().flat_map(|&t| x[t * width..(t + 1) * width].iter().copied()).collect()
    }
    let (x, tokens) = (&step.input, step.input.positions.len());
    let mut small = step.clone();
    let s = &mut small.input;
    (s.stream, s.attn_input) = (rows(&x.stream, tokens, of), rows(&x.attn_input, tokens, of));
    (s.positions, s.cache_loc) = (rows(&x.positions, tokens, of), rows(&x.cache_loc, tokens, of));
    s.cu_seqlens_q = (0..=of.len() as i32).collect();
    (s.cache_seqlens, s.page_table) = (Vec::new(), Vec::new());
    for &t in of {
        let b = x.cu_seqlens_q.iter().rposition(|begin| *begin as usize <= t).unwrap();
        let after = x.cu_seqlens_q[b + 1] as usize - 1 - t; // tokens of its request that it does not see
        s.cache_seqlens.push(x.cache_seqlens[b] - after as i32);
        s.page_table.extend(&x.page_table[b * x.table_width..(b + 1) * x.table_width]);
    }
    let taps = output.taps.as_ref().unwrap();
    let of_tap = |x: &[f32]| rows(x, tokens, of);
    let output = StepOutput {
        hidden: rows(&output.hidden, tokens, of),
        stream: of_tap(&output.stream),
        topk_ids: rows(&output.topk_ids, tokens, of),
        topk_scores: of_tap(&output.topk_scores),
        taps: Some(TapValues {
            attn_core: of_tap(&taps.attn_core),
            attn_out: of_tap(&taps.attn_out),
            stream_after_attn: of_tap(&taps.stream_after_attn),
            ffn_input: of_tap(&taps.ffn_input),
            router_logits: of_tap(&taps.router_logits),
            topk_ids: rows(&taps.topk_ids, tokens, of),
            topk_scores: of_tap(&taps.topk_scores),
            expert_input: of_tap(&taps.expert_input),
            moe_mix: of_tap(&taps.moe_mix),
            ffn_out: of_tap(&taps.ffn_out),
        }),
    };
    let mut cpu_cache = step.cache.clone();
    let queries = gpu.cpu_queries(&small, &mut cpu_cache, kind, QueryPrecision::Fp16);
    let [k_cache, v_cache] = caches;
    Run { step: small, output, k_cache, v_cache, queries, cpu_cache, slots: step.input.cache_loc.clone() }
}

fn check(test: &str, name: &str, kind: LayerKind) {
    let Some(gpu) = gpu(test) else { return };
    let spec = spec(name, kind);
    let mut step = gpu.step(&spec, 141);
    let plan = gpu.plan(PlanKey { taps: Taps::All, ..step_key(&step, kind) });
    let on = DeviceStep::with_taps(&gpu, &step, Taps::All);
    let mut scratch = Scratch::new(&gpu, &plan);
    if spec.local_start == 0 {
        // The busiest range, as a rank of the deployment may meet it.
        gpu.forward(&plan, scratch.workspace(), &on, Stream::LEGACY);
        step.input.local_start = busiest_start(&gpu.config, &on.output(&gpu).topk_ids);
    }
    on.overwrite(&step);
    scratch.poison();
    gpu.forward(&plan, scratch.workspace(), &on, Stream::LEGACY);
    gpu.device.synchronize().expect("the step");
    scratch.intact();
    on.intact();
    let (output, tokens) = (on.output(&gpu), step.input.positions.len());
    let of: Vec<usize> = match tokens {
        0..=SAMPLE => (0..tokens).collect(),
        // The first and last rows of the first and last tiles, and some between.
        _ => (0..SAMPLE).map(|i| i * (tokens - 1) / (SAMPLE - 1)).collect(),
    };
    let (caches, reference) = (on.caches(), gpu.reference.clone());
    drop((on, scratch));
    // The GPU is the next test's while the CPU computes.
    drop(gpu);
    let run = sample(&reference, &step, &output, caches, &of, kind);
    assert_eq!(run.step.cache.k.len() % ROW, 0);
    for (operation, check) in CHECKS {
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&reference, &run, kind))).is_err() {
            panic!("{name}, {kind}: {operation}");
        }
    }
}

#[rstest]
fn usual(
    #[values(
        "decode-1-8k",
        "decode-2-8k-agentic",
        "decode-4-8k-agentic",
        "decode-8-8k-agentic",
        "decode-16-8k-agentic",
        "decode-3-777-mixed",
        "decode-9-3000-mixed",
        "decode-33-1500-mixed",
        "decode-1-0",
        "decode-4-2047",
        "decode-4-2048",
        "decode-5-4000-mixed-page64",
        "decode-5-4000-mixed-page16",
        "decode-4-4096-half",
        "decode-4-4096-two",
        "decode-8-4096-outliers",
        "decode-8-8k-soft",
        "decode-4-3000-mixed-scales",
        "decode-6-5000-mixed",
        "decode-20-600-wrap",
        "verify-1-8k",
        "verify-4-8k-agentic",
        "verify-16-8k-agentic",
        "verify-1-5",
        "verify-2-3000-mixed-page64",
        "verify-8-8k-soft",
        "verify-2-2500-scales",
        "verify-3-4089",
        "verify-2-4089-page64",
        "block3-7-1000-mixed",
        "prefill-200-8k",
        "prefill-512-8k",
        "prefill-200-0",
        "prefills3-333-500-mixed",
        "prefills2-600-3000-half",
        "prefill-300-700-scales"
    )]
    name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    check("matrix::usual", name, kind);
}

#[rstest]
fn long(
    #[values(
        "decode-32-8k-agentic",
        "decode-64-8k-agentic",
        "decode-128-8k-agentic",
        "decode-256-8k-agentic",
        "decode-1-128k",
        "decode-2-128k-agentic",
        "decode-16-128k-agentic",
        "decode-64-32k-agentic",
        "verify-32-8k-agentic",
        "verify-1-128k-soft",
        "prefills2-1000-3000-mixed-page64",
        "prefill-2048-8k",
        "prefill-2048-4096-soft",
        "prefill-2048-4096-outliers",
        "prefill-8192-8k",
        "prefill-16384-8k",
        "prefill-8192-0"
    )]
    name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    if asked("matrix::long", "MUSE_SPARK_LAYER_LONG") {
        check("matrix::long", name, kind);
    }
}
