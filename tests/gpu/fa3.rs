//! FlashAttention-3 as the engine: against the CPU reference with E4M3 queries and against the own engine,
//! by metadata of its own, of the caller and of other lengths, captured and replayed, over all splits, at the
//! window's edges, and its documented limits. Its probabilities are E4M3, so its error is that format's.

use crate::capture::replay;
use crate::harness::{assert_bits, assert_rows, gpu, relative_l2, spec, step_key, words, DeviceStep, Gpu};
use crate::memory::{Banded, Scratch};
use muse_spark_layer::backend::cpu;
use muse_spark_layer::backend::cuda::graph::OwnedStream;
use muse_spark_layer::numerics::{e4m3_to_f32, f32_to_e4m3};
use muse_spark_layer::scheduler::Lengths;
use muse_spark_layer::synthetic::{StepSpec, SyntheticStep};
use muse_spark_layer::workspace::Layout;
use muse_spark_layer::{
    AttentionEngine, DType, Error, LayerKind, Plan, PlanKey, QueryPrecision, SchedulerMetadata, Stream, Taps,
};
use rstest::rstest;

/// Of a head's row, and of all rows together: probabilities are rounded to 4 bits, the output to 8.
const ROW: f64 = 0.06;
const ALL: f64 = 0.03;

/// A step in device memory and what its calls need.
struct Attention {
    on: DeviceStep,
    metadata: Banded,
    scratch: Scratch,
    plan: Plan,
}

fn fa3(key: PlanKey) -> PlanKey {
    PlanKey { engine: AttentionEngine::Fa3, query: QueryPrecision::E4m3, taps: Taps::All, ..key }
}

fn prepare(plan: &Plan, on: &DeviceStep, memory: &Banded, stream: Stream) -> SchedulerMetadata {
    let lengths = Lengths {
        cu_seqlens_q: on.input.attention.cu_seqlens_q.clone(),
        cache_seqlens: on.input.attention.cache_seqlens.clone(),
        memory: memory.view(DType::I32, &[SchedulerMetadata::words(plan)]),
    };
    SchedulerMetadata::prepare(plan, &lengths, stream).expect("metadata")
}

impl Attention {
    fn new(gpu: &Gpu, step: &SyntheticStep, plan: Plan) -> Attention {
        let metadata = Banded::new(&gpu.device, 4 * SchedulerMetadata::words(&plan) as u64);
        let (on, scratch) = (DeviceStep::with_taps(gpu, step, Taps::All), Scratch::new(gpu, &plan));
        Attention { on, metadata, scratch, plan }
    }

    /// Of `step`, as planned.
    fn of(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind) -> Attention {
        Attention::new(gpu, step, gpu.plan(fa3(step_key(step, kind))))
    }

    /// Prepares metadata from the step's lengths.
    fn prepare(&self, stream: Stream) -> SchedulerMetadata {
        prepare(&self.plan, &self.on, &self.metadata, stream)
    }

    fn forward(&mut self, gpu: &Gpu, metadata: Option<&SchedulerMetadata>) -> Result<(), Error> {
        self.on.input.attention.scheduler_metadata = metadata.cloned();
        gpu.cuda.forward(&self.plan, self.scratch.workspace(), &self.on.input, &self.on.output, Stream::LEGACY)
    }

    /// The attention's own output.
    fn core(&self, gpu: &Gpu) -> Vec<f32> {
        self.on.output(gpu).taps.expect("taps").attn_core
    }

    /// The E4M3 queries of the last run, from its scratch: `[T][16][64]`.
    fn queries(&self) -> Vec<u8> {
        let regions = Layout::regions(&self.plan, 0);
        let queries = regions.iter().find(|region| region.name == "fa3_q").expect("queries");
        self.scratch.read_at(queries.begin, queries.bytes)
    }

    /// The same for `step`, on poisoned scratch and outputs.
    fn run(&mut self, gpu: &Gpu, step: &SyntheticStep, metadata: Option<&SchedulerMetadata>) -> Vec<f32> {
        self.on.overwrite(step);
        self.scratch.poison();
        self.forward(gpu, metadata).expect("forward");
        gpu.device.synchronize().expect("the step");
        self.scratch.intact();
        self.on.intact();
        self.core(gpu)
    }
}

/// The CPU's attention over the E4M3 queries and entries of the run before: both are the CPU's own but for a few that
/// round to the neighbour, which would move a head by percents.
fn reference(gpu: &Gpu, run: &Attention, step: &SyntheticStep, kind: LayerKind) -> Vec<f32> {
    let (mut cache, factor) = (step.cache.clone(), gpu.config.qk_scale_factor);
    let want: Vec<u8> = gpu
        .cpu_queries(step, &mut cache, kind, QueryPrecision::E4m3)
        .q
        .iter()
        .map(|q| f32_to_e4m3(q / factor))
        .collect();
    let [k, v] = run.on.caches();
    for (what, got, want) in [("queries", &run.queries(), &want), ("keys", &k, &cache.k), ("values", &v, &cache.v)] {
        let off: Vec<u8> = got.iter().zip(want).filter(|(g, w)| g != w).map(|(g, w)| g.abs_diff(*w)).collect();
        let entries = step.input.positions.len() * if what == "queries" { 1024 } else { 128 };
        assert!(off.len() * 200 <= entries.max(400), "{what}: {} of {entries} differ", off.len());
        assert!(off.iter().all(|d| *d == 1 || *d >= 0x80), "{what} that are no neighbours");
    }
    (cache.k, cache.v) = (k, v);
    let q: Vec<f32> = run.queries().iter().map(|code| e4m3_to_f32(*code) * factor).collect();
    cpu::attention(&gpu.config, &q, &step.input.view().batch, &cache.view(), kind)
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    assert_rows(what, got, want, 64, ROW);
    let distance = relative_l2(got, want);
    assert!(distance < ALL, "{what}: {distance:.3e} from the reference");
}

#[rstest]
fn is_the_reference_and_the_own_engine(
    #[values(
        "decode-1",
        "decode-1-empty",
        "decode-3",
        "decode-8",
        "decode-9",
        "decode-33",
        "decode-64",
        "decode-130",
        "verify-1",
        "verify-3",
        "verify-17",
        "verify-20",
        "block-3",
        "prefill-65",
        "prefill-200",
        "prefill-333",
        "prefill-1000",
        "ragged"
    )]
    name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("fa3::is_the_reference_and_the_own_engine") else { return };
    let step = gpu.step(&spec(name, kind), 11);
    let mut fa3 = Attention::of(&gpu, &step, kind);
    let own = gpu.plan(PlanKey { engine: AttentionEngine::Own, ..fa3.plan.key.clone() });
    let mut own = Attention::new(&gpu, &step, own);
    let (got, want) = (fa3.run(&gpu, &step, None), own.run(&gpu, &step, None));
    assert!(fa3.on.output(&gpu).stream.iter().all(|v| v.is_finite()));
    assert_eq!(fa3.on.caches(), own.on.caches(), "the engines append the same entries");
    close("the CPU reference", &got, &reference(&gpu, &fa3, &step, kind));
    close("the own engine", &got, &want);
}

#[rstest]
fn pages_of_every_size(
    #[values(1, 2, 4, 8, 16, 32, 64, 128, 256)] page_size: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("fa3::pages_of_every_size") else { return };
    let spec = StepSpec { page_size, q_lens: vec![1, 0, 5, 30], ..StepSpec::new(4, 1, 2300, kind) };
    let step = gpu.step(&spec, 12);
    let mut attention = Attention::of(&gpu, &step, spec.kind);
    let got = attention.run(&gpu, &step, None);
    close("attn_core", &got, &reference(&gpu, &attention, &step, kind));
}

/// Any bound from 1 to the most there is: each request gets as many splits as the metadata says, or fewer.
#[rstest]
fn splits(#[values(1, 8)] q_len: usize, #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind) {
    let Some(gpu) = gpu("fa3::splits") else { return };
    let spec = StepSpec { page_size: 16, ..StepSpec::new(1, q_len, 9300, kind) };
    let step = gpu.step(&spec, 13);
    let planned = gpu.plan(fa3(step_key(&step, kind)));
    let mut first = Attention::new(&gpu, &step, planned.clone());
    first.run(&gpu, &step, None);
    let want = reference(&gpu, &first, &step, kind);
    for bound in 1..=64 {
        let mut launches = planned.launches.clone();
        launches.attention.splits = bound;
        let plan = Plan::with_launches(planned.key.clone(), launches, planned.sm_count);
        let mut attention = Attention::new(&gpu, &step, plan);
        close(&format!("{bound} splits"), &attention.run(&gpu, &step, None), &want);
        attention.prepare(Stream::LEGACY);
        let splits = words(&attention.metadata.read())[0];
        // One request has 132 SMs to itself: a split for each of its 59 tiles of 160 keys.
        assert_eq!(splits, bound.min(59) as i32);
    }
    // One more is an error of the call, and the process goes on.
    let mut launches = planned.launches.clone();
    launches.attention.splits = 65;
    let plan = Plan::with_launches(planned.key.clone(), launches, planned.sm_count);
    let mut attention = Attention::new(&gpu, &step, plan);
    let error = attention.forward(&gpu, None).unwrap_err();
    assert!(matches!(&error, Error::Cuda { call, code: 1, .. } if call.starts_with("fa3_")), "{error}");
    close("after the error", &Attention::of(&gpu, &step, spec.kind).run(&gpu, &step, None), &want);
}

/// Present or absent: the same bits, layer after layer. Of other cache lengths: the same within rounding.
#[rstest]
fn metadata(
    #[values("decode-1", "decode-33", "verify-3", "prefill-333", "ragged")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("fa3::metadata") else { return };
    let spec = spec(name, kind);
    let step = gpu.step(&spec, 14);
    let mut attention = Attention::of(&gpu, &step, spec.kind);
    let absent = attention.run(&gpu, &step, None);
    let metadata = attention.prepare(Stream::LEGACY);
    for layer in 0..3 {
        assert_bits(&format!("layer {layer}"), &attention.run(&gpu, &step, Some(&metadata)), &absent, 64);
    }
    let mut stale = step.clone();
    for (b, length) in stale.input.cache_seqlens.iter_mut().enumerate() {
        *length = if b % 2 == 0 { *length / 3 + 1 } else { *length + 700 };
    }
    attention.on.overwrite(&stale);
    let metadata = attention.prepare(Stream::LEGACY);
    gpu.device.synchronize().expect("metadata");
    close("stale metadata", &attention.run(&gpu, &step, Some(&metadata)), &absent);
}

/// Captured with its metadata at a context of 256, replayed at 128k and back: eager bits, with and without
/// dependent launch.
#[rstest]
fn captured_at_256_replays_at_128k(
    #[values(1, 8)] q_len: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(false, true)] shared: bool,
) {
    let Some(gpu) = gpu("fa3::captured_at_256_replays_at_128k") else { return };
    let spec = StepSpec::new(1, q_len, 131_072, kind);
    let long = gpu.step(&spec, 15);
    let mut short = long.clone();
    short.input.cache_seqlens[0] = 256 + q_len as i32;
    for i in 0..q_len {
        short.input.positions[i] = 256 + i as i64;
        short.input.cache_loc[i] = i64::from(short.input.page_table[256 + i]);
    }
    let Attention { on, metadata, mut scratch, plan } = Attention::of(&gpu, &short, kind);
    let plain = gpu.plan(PlanKey { dependent_launch: false, ..plan.key.clone() });
    let mut plain = Attention::new(&gpu, &short, plain);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let mut workspace = scratch.another(&gpu);
    let graph = own.capture(|stream| {
        let mut input = on.input.clone();
        if shared {
            input.attention.scheduler_metadata = Some(prepare(&plan, &on, &metadata, stream));
        }
        gpu.cuda.forward(&plan, &mut workspace, &input, &on.output, stream)
    });
    let graph = graph.expect("a graph");
    for step in [&long, &short, &long] {
        let want = plain.run(&gpu, step, None);
        for _ in 0..3 {
            on.overwrite(step);
            scratch.poison();
            replay(&own, &graph);
            scratch.intact();
            assert!(on.results() == plain.on.results(), "replay at {}", step.input.cache_seqlens[0]);
        }
        close("attn_core", &want, &reference(&gpu, &plain, step, kind));
    }
}

/// Overwrites the cached key and value of a request's position, E4M3 bytes.
fn plant(step: &mut SyntheticStep, position: usize, key: u8, value: u8) {
    let page = step.cache.page_size;
    let row = step.input.page_table[position / page] as usize * page + position % page;
    step.cache.k[row * 128..][..128].fill(key);
    step.cache.v[row * 128..][..128].fill(value);
}

/// 1.5 in E4M3.
const FINITE: u8 = 0x3c;
const NAN: u8 = 0x7f;

/// The oldest key that a token sees changes its output; the one before it does not change a bit.
#[rstest]
fn window_edges(
    #[values(1, 8)] q_len: usize,
    #[values(1, 64)] page_size: usize,
    #[values(2047, 2048, 5000)] ctx: usize,
) {
    let Some(gpu) = gpu("fa3::window_edges") else { return };
    let spec = StepSpec { page_size, ..StepSpec::new(1, q_len, ctx, LayerKind::Sliding) };
    let step = gpu.step(&spec, 16);
    let mut attention = Attention::of(&gpu, &step, spec.kind);
    let base = attention.run(&gpu, &step, None);
    close("attn_core", &base, &reference(&gpu, &attention, &step, LayerKind::Sliding));
    let token = |core: &[f32], t: usize| core[t * 1024..][..1024].to_vec();
    for t in 0..q_len {
        let Some(oldest) = (ctx + t).checked_sub(2047) else { continue };
        let mut changed = step.clone();
        plant(&mut changed, oldest, FINITE, 0x7e);
        assert!(token(&attention.run(&gpu, &changed, None), t) != token(&base, t), "token {t} sees {oldest}");
        if oldest > 0 {
            let mut changed = step.clone();
            plant(&mut changed, oldest - 1, FINITE, 0x7e);
            assert!(
                token(&attention.run(&gpu, &changed, None), t) == token(&base, t),
                "token {t} does not see {}",
                oldest - 1
            );
        }
    }
}

/// What FlashAttention-3 need not be given: ids and bytes past a request's length, and before the first block
/// of 160 keys in which a token sees one. Padding rows give zeros.
#[test]
fn stale_ids_and_dead_bytes_outside_the_visible_blocks() {
    let Some(gpu) = gpu("fa3::stale_ids_and_dead_bytes_outside_the_visible_blocks") else { return };
    for kind in [LayerKind::Full, LayerKind::Sliding] {
        let spec = StepSpec::new(1, 8, 5000, kind);
        let mut step = gpu.step(&spec, 17);
        // Room in the table past the request, and a request of 5 tokens in a step of 8.
        step.input.cache_seqlens[0] = 5005;
        step.input.cu_seqlens_q[1] = 5;
        let mut attention =
            Attention::new(&gpu, &step, gpu.plan(PlanKey { max_q_len: 8, ..fa3(step_key(&step, kind)) }));
        let base = attention.run(&gpu, &step, None);
        assert!(base[5 * 1024..].iter().all(|v| *v == 0.0), "rows of no request");
        close("attn_core", &base, &reference(&gpu, &attention, &step, kind));
        let first_block = if kind == LayerKind::Sliding { (5000 - 2047) / 160 * 160 } else { 0 };
        let mut changed = step.clone();
        for position in (0..first_block).chain(5005..5008) {
            plant(&mut changed, position, NAN, NAN);
        }
        for entry in (0..first_block).chain(5005..5008) {
            changed.input.page_table[entry] = [-1, i32::MAX, 0, i32::MIN][entry % 4];
        }
        // The step's own slots past the request hold their entries, wherever the table points.
        assert!(attention.run(&gpu, &changed, None) == base, "{kind}");
    }
}

/// The documented limits: a NaN before the window, but in the first visible block, spreads (the own engine does
/// not see it); metadata of another batch is refused, as are 16-bit queries.
#[test]
fn documented_limits() {
    let Some(gpu) = gpu("fa3::documented_limits") else { return };
    let spec = StepSpec::new(1, 1, 5000, LayerKind::Sliding);
    let mut step = gpu.step(&spec, 18);
    let oldest = 5000 - 2047;
    assert!(oldest % 160 > 0, "a position before the window in its block");
    plant(&mut step, oldest - 1, FINITE, NAN);
    let mut attention = Attention::of(&gpu, &step, spec.kind);
    assert!(attention.run(&gpu, &step, None).iter().any(|v| v.is_nan()), "masked, and multiplied by 0 all the same");
    let own = gpu.plan(PlanKey { engine: AttentionEngine::Own, ..attention.plan.key.clone() });
    let mut own = Attention::new(&gpu, &step, own);
    assert!(own.run(&gpu, &step, None).iter().all(|v| v.is_finite()));

    let metadata = attention.prepare(Stream::LEGACY);
    let error = own.forward(&gpu, Some(&metadata)).unwrap_err();
    assert!(matches!(error, Error::Plan { field: "scheduler_metadata", .. }), "{error}");
    let two = StepSpec::new(2, 1, 5000, LayerKind::Sliding);
    let step = gpu.step(&two, 18);
    let mut other = Attention::of(&gpu, &step, two.kind);
    let error = other.forward(&gpu, Some(&metadata)).unwrap_err();
    assert!(matches!(error, Error::Plan { field: "scheduler_metadata", .. }), "{error}");
    let fp16 = PlanKey { query: QueryPrecision::Fp16, ..other.plan.key.clone() };
    assert!(matches!(gpu.cuda.plan(fp16).unwrap_err(), Error::Unsupported { .. }));
}
