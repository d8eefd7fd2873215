//! A serving runtime's batches at full size: mixed and empty requests, padding rows of graphs, sinks, strides,
//! far positions, long lengths, large pools, shared pages, verify blocks at edges, rejected drafts. What may be
//! compared bit for bit is: a row's bits depend on its own request and the plan only.

use crate::harness::{assert_rows, gpu, spec, DeviceStep, Gpu, Reference};
use half::bf16;
use muse_spark_layer::backend::cpu::{self, StepInput, StepOptions, StepOutput, TapValues};
use muse_spark_layer::backend::cuda::Buffer;
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::{DType, DeviceTensor, LayerKind, PagedKvCache, PlanKey, QueryPrecision, Stream, Taps};
use rstest::rstest;

/// What a step gave, and the caches after it.
struct Done {
    out: StepOutput,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Done {
    fn taps(&self) -> &TapValues {
        self.out.taps.as_ref().expect("taps")
    }
}

fn options(kind: LayerKind) -> StepOptions {
    StepOptions { taps: Taps::All, ..StepOptions::new(kind, QueryPrecision::Fp16) }
}

fn run_with(gpu: &Gpu, step: &SyntheticStep, options: &StepOptions, change: impl FnOnce(&mut StepInput)) -> Done {
    let mut cache = step.cache.clone();
    let mut input = step.input.view();
    change(&mut input);
    let out = gpu.cuda.forward_host(&input, &mut cache.view(), options).expect("forward");
    Done { out, k: cache.k, v: cache.v }
}

fn run(gpu: &Gpu, step: &SyntheticStep, kind: LayerKind) -> Done {
    run_with(gpu, step, &options(kind), |_| {})
}

/// The step with a page in front of the pool that no request owns: the sink of runtimes that pad with slot 0.
fn with_sink(mut step: SyntheticStep, gpu: &Gpu) -> SyntheticStep {
    let page = step.cache.page_size;
    step.input.page_table.iter_mut().filter(|id| **id >= 0).for_each(|id| *id += 1);
    step.input.cache_loc.iter_mut().for_each(|loc| *loc += page as i64);
    for bytes in [&mut step.cache.k, &mut step.cache.v] {
        bytes.splice(0..0, vec![0x7f; page * gpu.config.kv_size()]);
    }
    step
}

/// Asserts that the first `tokens` rows of everything a step gives are the same bits.
#[track_caller]
fn assert_same_rows(gpu: &Gpu, what: &str, got: &Done, want: &Done, tokens: usize) {
    let bits = |x: &[f32], width: usize| x[..tokens * width].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let (c, g, w) = (&gpu.config, got.taps(), want.taps());
    for (name, width, g, w) in [
        ("attn_core", c.q_size(), &g.attn_core, &w.attn_core),
        ("router_logits", c.n_experts, &g.router_logits, &w.router_logits),
        ("moe_mix", c.expert_dim, &g.moe_mix, &w.moe_mix),
        ("stream", c.hidden, &got.out.stream, &want.out.stream),
    ] {
        assert!(bits(g, width) == bits(w, width), "{what}: {name} of other rows changed");
    }
    assert!(got.out.topk_ids[..tokens * c.top_k] == want.out.topk_ids[..tokens * c.top_k], "{what}: topk_ids");
    assert!(got.out.hidden[..tokens * c.hidden] == want.out.hidden[..tokens * c.hidden], "{what}: hidden");
}

/// Rows of the pool that differ.
fn changed_rows(gpu: &Gpu, a: &[u8], b: &[u8]) -> Vec<i64> {
    let row = gpu.config.kv_size();
    a.chunks(row).zip(b.chunks(row)).enumerate().filter(|(_, (x, y))| x != y).map(|(r, _)| r as i64).collect()
}

/// Rows of graph padding: length 1, no slot or the sink, no page, page 0 or stale ones, any activations.
struct Padding {
    name: &'static str,
    cache_loc: i64,
    page: fn(&SyntheticStep) -> i32,
    activation: f32,
    position: i64,
    /// Whether the plan skips slot 0 and the device scalar says how many tokens are none of it.
    skips: bool,
}

const PADDINGS: [Padding; 5] = [
    padding("sink, no page, NaN", 0, |_| -1, f32::NAN, 0, false),
    padding("no slot, page 0, inf", -1, |_| 0, f32::INFINITY, 1 << 20, true),
    padding("sink, stale page", 0, |s| s.input.page_table[0], 7.0, -1, false),
    // Numbers, so that a row that is stored in the sink shows there.
    padding("sink, page past the pool", 0, |_| i32::MAX, 3.0, 0, true),
    padding("sink, stale page, NaN", 0, |s| s.input.page_table[0], f32::NAN, 0, true),
];

const fn padding(
    name: &'static str,
    cache_loc: i64,
    page: fn(&SyntheticStep) -> i32,
    activation: f32,
    position: i64,
    skips: bool,
) -> Padding {
    Padding { name, cache_loc, page, activation, position, skips }
}

/// The last `requests` requests as padding.
fn padded(step: &SyntheticStep, requests: usize, padding: &Padding) -> SyntheticStep {
    let mut out = step.clone();
    let x = &mut out.input;
    let first = x.cache_seqlens.len() - requests;
    let tokens = x.cu_seqlens_q[first] as usize..x.positions.len();
    let hidden = x.stream.len() / x.positions.len();
    x.cache_seqlens[first..].fill(1);
    x.page_table[first * x.table_width..].fill((padding.page)(step));
    x.cache_loc[tokens.clone()].fill(padding.cache_loc);
    x.positions[tokens.clone()].fill(padding.position);
    x.stream[tokens.start * hidden..].fill(padding.activation);
    x.attn_input[tokens.start * hidden..].fill(bf16::from_f32(padding.activation));
    out
}

#[rstest]
#[case("decode-8", LayerKind::Full)]
#[case("decode-9", LayerKind::Sliding)]
#[case("decode-33", LayerKind::Sliding)]
#[case("decode-130", LayerKind::Full)]
#[case("verify-3", LayerKind::Full)]
#[case("verify-17", LayerKind::Sliding)]
#[case("prefill-333", LayerKind::Full)]
#[case("mixed", LayerKind::Sliding)]
#[case("behind", LayerKind::Full)]
fn padding_rows_touch_nobody(#[case] name: &str, #[case] kind: LayerKind) {
    let Some(gpu) = gpu("batch::padding_rows_touch_nobody") else { return };
    let gpu = &*gpu;
    let step = with_sink(synthetic::step(&gpu.config, &spec(name, kind), 81).expect("a step"), gpu);
    let requests = (step.input.cache_seqlens.len() / 2).clamp(1, 3);
    let real = step.input.cu_seqlens_q[step.input.cache_seqlens.len() - requests] as usize;
    let want = run(gpu, &step, kind);
    let mut own = step.input.cache_loc[..real].to_vec();
    own.sort_unstable();
    for padding in &PADDINGS {
        let step = padded(&step, requests, padding);
        let skip_slot_zero = padding.skips;
        let options = StepOptions { skip_slot_zero, ..options(kind) };
        let limit = skip_slot_zero.then_some(real);
        let got = run_with(gpu, &step, &options, |input| input.num_tokens_non_padded = limit);
        assert_same_rows(gpu, padding.name, &got, &want, real);
        for ids in got.out.topk_ids.chunks(gpu.config.top_k) {
            let mut ids = ids.to_vec();
            ids.sort_unstable();
            ids.dedup();
            assert!(ids.len() == 8 && ids.iter().all(|id| (0..256).contains(id)), "{}: {ids:?}", padding.name);
        }
        if limit.is_some() {
            let mix = &got.taps().moe_mix[real * gpu.config.expert_dim..];
            assert!(mix.iter().all(|v| v.to_bits() == 0), "{}: padding has routes", padding.name);
        }
        let slots: Vec<i64> =
            (padding.cache_loc == 0 && !skip_slot_zero).then_some(0).into_iter().chain(own.clone()).collect();
        for (half, before, after) in [("k", &step.cache.k, &got.k), ("v", &step.cache.v, &got.v)] {
            let changed = changed_rows(gpu, before, after);
            assert!(changed.iter().all(|r| slots.contains(r)), "{}: {half}_cache rows {changed:?}", padding.name);
        }
    }
}

/// Tokens past `cu_seqlens_q`'s end belong to nobody: no key, and the others' bits stay.
#[rstest]
fn tokens_of_no_request(
    #[values("decode-33", "verify-17", "prefill-333", "mixed", "behind", "padded-2600")] name: &str,
) {
    let Some(gpu) = gpu("batch::tokens_of_no_request") else { return };
    let kind = LayerKind::Full;
    let mut step = synthetic::step(&gpu.config, &spec(name, kind), 82).expect("a step");
    let want = run(&gpu, &step, kind);
    let b = step.input.cache_seqlens.len();
    let real = step.input.cu_seqlens_q[b - 1] as usize;
    // The last request has no token; its tokens have no request. Behind long requests alone it keeps some, which are not
    // looked at: none would make it a short one, and the plan another.
    let end = real + if name == "prefill-333" { 17 } else { 0 };
    step.input.cu_seqlens_q[b] = end as i32;
    step.input.cache_loc[end..].fill(-1);
    let got = run_with(&gpu, &step, &options(kind), |input| input.num_tokens_non_padded = Some(end));
    assert_same_rows(&gpu, name, &got, &want, real);
    let core = &got.taps().attn_core[end * gpu.config.q_size()..];
    assert!(core.iter().all(|v| *v == 0.0), "tokens of no request see no key");
}

/// Zero-length requests anywhere, whatever their length and pages, change nobody's bits; nor does an empty step
/// write anything.
#[rstest]
fn zero_length_requests_are_nothing(
    #[values(&[1, 0, 1, 1, 0], &[0, 0, 8, 8], &[8, 0, 0, 3, 0], &[0, 40, 0, 1, 200, 0])] q_lens: &[usize],
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("batch::zero_length_requests_are_nothing") else { return };
    let spec = StepSpec { q_lens: q_lens.to_vec(), page_size: 16, ..StepSpec::new(1, 1, 300, kind) };
    let mut step = synthetic::step(&gpu.config, &spec, 83).expect("a step");
    let want = run(&gpu, &step, kind);
    let width = step.input.table_width;
    for (length, page) in [(0, -1), (-5, i32::MAX), (1 << 20, 0), (1, i32::MIN)] {
        for b in (0..q_lens.len()).filter(|b| q_lens[*b] == 0) {
            step.input.cache_seqlens[b] = length;
            step.input.page_table[b * width..(b + 1) * width].fill(page);
        }
        let got = run(&gpu, &step, kind);
        assert_same_rows(&gpu, "zero-length requests", &got, &want, step.input.positions.len());
        assert!(got.k == want.k && got.v == want.v, "caches");
    }
}

#[rstest]
fn an_empty_step_is_nothing(#[values(0, 3)] requests: usize) {
    let Some(gpu) = gpu("batch::an_empty_step_is_nothing") else { return };
    let spec = StepSpec { q_lens: vec![0; requests], ..StepSpec::new(1, 1, 30, LayerKind::Full) };
    let step = synthetic::step(&gpu.config, &spec, 84).expect("a step");
    let done = run(&gpu, &step, LayerKind::Full);
    assert!(done.out.stream.is_empty() && done.out.topk_ids.is_empty());
    assert!(done.k == step.cache.k && done.v == step.cache.v);
}

/// Slot 0 is a slot like any other unless the plan says that it is a sink.
#[rstest]
fn slot_zero_is_skipped_by_choice(#[values("decode-8", "verify-3", "prefill-65")] name: &str) {
    let Some(gpu) = gpu("batch::slot_zero_is_skipped_by_choice") else { return };
    let kind = LayerKind::Full;
    let mut step = with_sink(synthetic::step(&gpu.config, &spec(name, kind), 85).expect("a step"), &gpu);
    step.input.cache_loc[1] = 0;
    for skip_slot_zero in [false, true] {
        let done = run_with(&gpu, &step, &StepOptions { skip_slot_zero, ..options(kind) }, |_| {});
        let changed = changed_rows(&gpu, &step.cache.k, &done.k);
        assert_eq!(changed.contains(&0), !skip_slot_zero);
        assert!(changed.len() + usize::from(skip_slot_zero) == step.input.positions.len(), "{changed:?}");
    }
}

/// Rows of the page table further apart than its width, anything between them.
#[rstest]
fn table_rows_may_be_apart(#[values("decode-33", "verify-3", "prefill-333", "behind")] name: &str) {
    let Some(gpu) = gpu("batch::table_rows_may_be_apart") else { return };
    let kind = LayerKind::Sliding;
    let mut step = synthetic::step(&gpu.config, &spec(name, kind), 86).expect("a step");
    let want = run(&gpu, &step, kind);
    let (width, stride) = (step.input.table_width, step.input.table_width + 37);
    step.input.page_table = step
        .input
        .page_table
        .chunks(width)
        .flat_map(|row| row.iter().copied().chain((0..37).map(|i| if i % 2 == 0 { i32::MIN } else { 0 })))
        .collect();
    let got = run_with(&gpu, &step, &options(kind), |input| input.batch.table_stride = stride);
    assert_same_rows(&gpu, "a stride", &got, &want, step.input.positions.len());
    assert!(got.k == want.k);
}

/// Positions up to 1,048,575: what is rotated is the reference's.
#[rstest]
fn far_positions(#[values("decode-8", "verify-3", "prefill-65")] name: &str) {
    let Some(gpu) = gpu("batch::far_positions") else { return };
    let kind = LayerKind::Sliding;
    let mut step = synthetic::step(&gpu.config, &spec(name, kind), 87).expect("a step");
    let last = *step.input.positions.iter().max().expect("tokens");
    step.input.positions.iter_mut().for_each(|p| *p += 1_048_575 - last);
    let got = run(&gpu, &step, kind);
    let core = cpu_core(&gpu, &mut step, kind, &got);
    assert_rows("attn_core", &got.taps().attn_core, &core, gpu.config.head_dim, 4e-3);
}

/// Attention by the reference over the cache that the GPU left; `step` gets the reference's own entries.
fn cpu_core(gpu: &Reference, step: &mut SyntheticStep, kind: LayerKind, done: &Done) -> Vec<f32> {
    let x: Vec<f32> = step.input.attn_input.iter().map(|v| v.to_f32()).collect();
    let qkv = cpu::qkv_gate(&gpu.config, gpu.cpu.weights(), &x);
    let batch = step.input.view().batch;
    let query = QueryPrecision::Fp16;
    let q = cpu::qk_norm_rope_append(&gpu.config, &qkv, &batch, &mut step.cache.view(), kind, query, false).q;
    // Neighbouring E4M3 values have neighbouring codes: roundings of ties may differ, nothing else.
    for (name, got, want) in [("k_cache", &done.k, &step.cache.k), ("v_cache", &done.v, &step.cache.v)] {
        let off: Vec<u8> = got.iter().zip(want).filter(|(g, w)| g != w).map(|(g, w)| g.abs_diff(*w)).collect();
        let entries = (step.input.positions.len() * gpu.config.kv_size()).max(400);
        assert!(off.len() * 200 <= entries, "{name}: {} of {entries} entries differ", off.len());
        assert!(off.iter().all(|d| *d == 1 || *d >= 0x80), "{name}: entries that are no neighbours");
    }
    let mut cache = step.cache.clone();
    cache.k.clone_from(&done.k);
    cache.v.clone_from(&done.v);
    let batch = step.input.view().batch;
    cpu::attention(&gpu.config, &q, &batch, &cache.view(), kind)
}

/// A request of a million tokens, its page table read to the end.
#[rstest]
#[case(1, 1)]
#[case(64, 8)]
fn a_million_tokens(#[case] page_size: usize, #[case] q_len: usize) {
    let Some(gpu) = gpu("batch::a_million_tokens") else { return };
    let spec = StepSpec { page_size, ..StepSpec::new(1, q_len, 1_048_575 - q_len, LayerKind::Full) };
    let mut step = synthetic::step(&gpu.config, &spec, 88).expect("a step");
    let got = [LayerKind::Full, LayerKind::Sliding].map(|kind| (kind, run(&gpu, &step, kind)));
    let reference = gpu.reference.clone();
    // The GPU is the next test's while the CPU computes.
    drop(gpu);
    for (kind, got) in got {
        let want = cpu_core(&reference, &mut step, kind, &got);
        assert_rows("attn_core", &got.taps().attn_core, &want, reference.config.head_dim, 6e-3);
    }
}

/// Pages beyond 2^31 bytes of a pool, at both page sizes, in every form of the attention: the bits of a small pool.
#[rstest]
fn pools_past_two_gib(#[values(1, 64)] page_size: usize) {
    let Some(gpu) = gpu("batch::pools_past_two_gib") else { return };
    let (device, c, kind) = (&gpu.device, &gpu.config, LayerKind::Full);
    let pages = ((1usize << 31) + (1 << 28)) / (page_size * c.kv_size());
    let pool: [Buffer; 2] = [0, 1].map(|_| device.allocate((pages * page_size * c.kv_size()) as u64).expect("a pool"));
    for (n, q_lens) in [vec![1; 3], vec![8, 8], vec![100, 1]].into_iter().enumerate() {
        let spec = StepSpec { q_lens, page_size, ..StepSpec::new(1, 1, 500, kind) };
        let step = synthetic::step(c, &spec, 89).expect("a step");
        let key = PlanKey {
            tokens: step.input.positions.len() as u32,
            max_q_len: spec.q_lens[0] as u32,
            page_size: page_size as u32,
            ..PlanKey::decode(spec.q_lens.len() as u32, step.input.table_width as u32)
        };
        let plan = gpu.cuda.plan(key).expect("a plan");
        let mut workspace = gpu.cuda.workspace(&plan).expect("a workspace");
        let small = DeviceStep::new(&gpu, &step);
        gpu.cuda.forward(&plan, &mut workspace, &small.input, &small.output, Stream::LEGACY).expect("forward");
        device.synchronize().expect("the step");
        let want = small.results();

        let own = step.cache.k.len() / (page_size * c.kv_size());
        let first = pages - own;
        let mut moved = step.clone();
        moved.input.page_table.iter_mut().filter(|id| **id >= 0).for_each(|id| *id += first as i32);
        moved.input.cache_loc.iter_mut().for_each(|loc| *loc += (first * page_size) as i64);
        let offset = (first * page_size * c.kv_size()) as u64;
        assert!(offset > 1 << 31);
        pool.iter().for_each(|buffer| buffer.fill(0x7f).expect("fill"));
        pool[0].write_at(offset, &step.cache.k).expect("write");
        pool[1].write_at(offset, &step.cache.v).expect("write");
        let mut large = DeviceStep::new(&gpu, &moved);
        let shape = [pages, page_size, c.kv_heads, c.head_dim];
        // SAFETY: both pools hold `shape` bytes and outlive the step.
        let [k, v] = [0, 1].map(|i: usize| unsafe { DeviceTensor::contiguous(pool[i].ptr(), DType::E4m3, &shape) });
        large.input.attention.cache = PagedKvCache::new(k, v).expect("a cache");
        workspace.poison(device).expect("poison");
        gpu.cuda.forward(&plan, &mut workspace, &large.input, &large.output, Stream::LEGACY).expect("forward");
        device.synchronize().expect("the step");
        assert!(large.results()[..3] == want[..3], "outputs of {:?}", spec.q_lens);
        if n < 2 {
            continue; // The next step overwrites these keys, and reading the pool takes a second.
        }
        let mut whole = vec![0; pool[0].bytes() as usize];
        pool[0].read(&mut whole).expect("read");
        assert!(whole[offset as usize..] == want[3], "the new keys of {:?}", spec.q_lens);
        assert!(whole[..offset as usize].iter().all(|b| *b == 0x7f), "nothing else was written");
    }
}

/// Requests that list the same pages of a common prefix: the bits of requests with copies of them.
#[rstest]
fn shared_prefix_pages(
    #[values(1, 16)] page_size: usize,
    #[values(&[1, 1, 1], &[8, 8], &[40, 1])] q_lens: &[usize],
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("batch::shared_prefix_pages") else { return };
    let spec = StepSpec { q_lens: q_lens.to_vec(), page_size, ..StepSpec::new(1, 1, 320, kind) };
    let mut copies = synthetic::step(&gpu.config, &spec, 90).expect("a step");
    let (width, bytes, shared) = (copies.input.table_width, page_size * gpu.config.kv_size(), 256 / page_size);
    let mut sharing = copies.clone();
    for b in 1..q_lens.len() {
        for p in 0..shared {
            let (from, to) = (copies.input.page_table[p] as usize, copies.input.page_table[b * width + p] as usize);
            for pool in [&mut copies.cache.k, &mut copies.cache.v] {
                pool.copy_within(from * bytes..(from + 1) * bytes, to * bytes);
            }
            sharing.input.page_table[b * width + p] = from as i32;
        }
    }
    let (got, want) = (run(&gpu, &sharing, kind), run(&gpu, &copies, kind));
    assert_same_rows(&gpu, "a shared prefix", &got, &want, copies.input.positions.len());
}

/// A verify block over a page edge and the window's edge, at every phase of both: the reference's attention, and
/// each row the decode step at its position.
#[rstest]
fn verify_over_edges(
    #[values(16, 64)] page_size: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("batch::verify_over_edges") else { return };
    for before in 1..=7 {
        // The block crosses a page's end after `before` rows; all of it, some or none is past the window.
        for ctx in [2048 - before, 2048 + page_size - before, page_size - before] {
            let spec = StepSpec { page_size, ..StepSpec::new(2, 8, ctx, kind) };
            let mut step = synthetic::step(&gpu.config, &spec, 91 + before as u64).expect("a step");
            let got = run(&gpu, &step, kind);
            let want = cpu_core(&gpu, &mut step, kind, &got);
            assert_rows("attn_core", &got.taps().attn_core, &want, gpu.config.head_dim, 4e-3);
        }
    }
}

/// Drafts that were rejected are overwritten by the next step: whatever they stored has no effect.
#[rstest]
fn rejected_drafts_leave_no_trace(
    #[values(1, 16)] page_size: usize,
    #[values(0, 3, 7)] accepted: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("batch::rejected_drafts_leave_no_trace") else { return };
    let spec = StepSpec { page_size, ..StepSpec::new(2, 16, 2040, kind) };
    let all = synthetic::step(&gpu.config, &spec, 99).expect("a step");
    let hidden = gpu.config.hidden;
    // 8 of each request's 16 tokens, from `first` on.
    let block = |first: usize, cache: &synthetic::SyntheticCache| {
        let mut step = all.clone();
        let tokens: Vec<usize> = (0..2).flat_map(|b| b * 16 + first..b * 16 + first + 8).collect();
        step.input.stream = tokens.iter().flat_map(|t| all.input.stream[t * hidden..][..hidden].to_vec()).collect();
        step.input.attn_input =
            tokens.iter().flat_map(|t| all.input.attn_input[t * hidden..][..hidden].to_vec()).collect();
        step.input.positions = tokens.iter().map(|t| all.input.positions[*t]).collect();
        step.input.cache_loc = tokens.iter().map(|t| all.input.cache_loc[*t]).collect();
        step.input.cu_seqlens_q = vec![0, 8, 16];
        step.input.cache_seqlens = vec![(2040 + first + 8) as i32; 2];
        step.cache = cache.clone();
        step
    };
    let drafted = run(&gpu, &block(0, &all.cache), kind);
    let mut cache = all.cache.clone();
    (cache.k, cache.v) = (drafted.k, drafted.v);
    let next = accepted + 1;
    let got = run(&gpu, &block(next, &cache), kind);
    // As if the rejected ones had never been: NaN where they stored.
    for b in 0..2 {
        for loc in &all.input.cache_loc[b * 16 + next..b * 16 + 8] {
            let row = *loc as usize * gpu.config.kv_size();
            cache.k[row..row + gpu.config.kv_size()].fill(0x7f);
            cache.v[row..row + gpu.config.kv_size()].fill(0xff);
        }
    }
    let want = run(&gpu, &block(next, &cache), kind);
    assert_same_rows(&gpu, "rejected drafts", &got, &want, 16);
    assert!(got.k == want.k && got.v == want.v, "every slot of theirs is written again");
}

/// The form of the expert lists beyond 1024 tokens drops padding's routes too.
#[test]
fn many_tokens_of_padding_take_no_route() {
    let Some(gpu) = gpu("batch::many_tokens_of_padding_take_no_route") else { return };
    let (kind, width) = (LayerKind::Full, gpu.config.expert_dim);
    let step = synthetic::step(&gpu.config, &StepSpec::new(1, 1300, 20, kind), 92).expect("a step");
    let (whole, real) = (run(&gpu, &step, kind), 1100);
    let got = run_with(&gpu, &step, &options(kind), |input| input.num_tokens_non_padded = Some(real));
    assert_same_rows(&gpu, "padding", &got, &whole, real);
    assert!(got.taps().moe_mix[real * width..].iter().all(|v| v.to_bits() == 0), "padding has no routes");
}
