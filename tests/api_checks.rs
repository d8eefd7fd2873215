//! Bad input of every kind gives its named error before anything is launched: no device is needed.
#![allow(unsafe_code)]

use muse_spark_layer::scheduler::Lengths;
use muse_spark_layer::step::{
    check_attention_block, check_ffn_block, check_final_block, check_moe_block, check_step, check_unpool_block,
};
use muse_spark_layer::step::{AttentionInput, FfnInput, FinalInput, FinalOutput, MoeInput, MoeOutput};
use muse_spark_layer::{
    AttentionEngine, DType, DeviceInput, DeviceOutput, DeviceTaps, DeviceTensor, Error, PagedKvCache, Plan, PlanKey,
    QueryPrecision, SchedulerMetadata, Stream, Tap, Taps, WeightKind,
};
use rstest::rstest;

const T: usize = 12;
const B: usize = 3;
const WIDTH: usize = 40;

/// Addresses far apart, never touched.
fn fake(slot: u64, dtype: DType, shape: &[usize]) -> DeviceTensor {
    // SAFETY: checks look at addresses and never follow them.
    unsafe { DeviceTensor::contiguous(0x7000_0000_0000 + (slot << 32), dtype, shape) }
}

fn strided(slot: u64, dtype: DType, shape: &[usize], strides: &[i64]) -> DeviceTensor {
    // SAFETY: as in `fake`.
    unsafe { DeviceTensor::strided(0x7000_0000_0000 + (slot << 32), dtype, shape, strides) }
}

fn at(address: u64, dtype: DType, shape: &[usize]) -> DeviceTensor {
    // SAFETY: as in `fake`.
    unsafe { DeviceTensor::contiguous(address, dtype, shape) }
}

fn plan() -> Plan {
    let key = PlanKey { page_size: 16, taps: Taps::All, ..PlanKey::block(B as u32, 4, WIDTH as u32) };
    Plan::new(key, WeightKind::Nvfp4, 132).unwrap()
}

fn input() -> DeviceInput {
    let pool = [7, 16, 2, 64];
    DeviceInput {
        attention: AttentionInput {
            attn_input: fake(1, DType::Bf16, &[T, 8192]),
            positions: fake(2, DType::I64, &[T]),
            cache_loc: fake(3, DType::I64, &[T]),
            cu_seqlens_q: fake(4, DType::I32, &[B + 1]),
            cache_seqlens: fake(5, DType::I32, &[B]),
            page_table: strided(6, DType::I32, &[B, WIDTH], &[100, 1]),
            k_scale: fake(7, DType::F32, &[]),
            v_scale: fake(8, DType::F32, &[1]),
            cache: PagedKvCache::new(fake(9, DType::E4m3, &pool), fake(10, DType::E4m3, &pool)).unwrap(),
            scheduler_metadata: None,
        },
        stream: fake(11, DType::F32, &[T, 8192]),
        local_start: fake(12, DType::I32, &[1]),
        num_tokens_non_padded: None,
    }
}

fn output() -> DeviceOutput {
    DeviceOutput {
        hidden: Some(fake(20, DType::Bf16, &[T, 8192])),
        stream: fake(21, DType::F32, &[T, 8192]),
        topk_ids: fake(22, DType::I32, &[T, 8]),
        taps: DeviceTaps::default(),
    }
}

type Change = fn(&mut DeviceInput, &mut DeviceOutput);

fn refused(change: Change) -> Error {
    let (mut i, mut o) = (input(), output());
    change(&mut i, &mut o);
    check_step(&plan(), &i, &o, true).map(|_| ()).expect_err("accepted")
}

#[test]
fn a_good_step_is_accepted() {
    let mut o = output();
    for (n, &tap) in Tap::ALL.iter().enumerate() {
        o.taps.set(tap, fake(30 + n as u64, tap.dtype(), &tap.shape(T)));
    }
    let mut i = input();
    i.num_tokens_non_padded = Some(fake(50, DType::I32, &[1]));
    check_step(&plan(), &i, &o, true).unwrap();
}

#[test]
fn a_bad_step_is_refused_by_name() {
    let cases: &[(Change, &str)] = &[
        (
            |i, _| i.attention.attn_input = fake(1, DType::Bf16, &[T, 4096]),
            "attn_input: wanted shape [12, 8192], got [12, 4096]",
        ),
        (|i, _| i.stream = fake(11, DType::F32, &[T + 1, 8192]), "stream: wanted shape [12, 8192], got [13, 8192]"),
        (|i, _| i.attention.positions = fake(2, DType::I32, &[T]), "positions: wanted i64, got i32"),
        (|i, _| i.attention.attn_input = fake(1, DType::F16, &[T, 8192]), "attn_input: wanted bf16, got f16"),
        (|i, _| i.attention.cu_seqlens_q = fake(4, DType::I32, &[B]), "cu_seqlens_q: wanted shape [4], got [3]"),
        (|i, _| i.attention.k_scale = fake(7, DType::F32, &[2]), "k_scale: wanted shape [1], got [2]"),
        (|i, _| i.local_start = fake(12, DType::I64, &[1]), "local_start: wanted i32, got i64"),
        (|i, _| i.stream = strided(11, DType::F32, &[T, 8192], &[16384, 1]), "stream: wanted a contiguous tensor"),
        (
            |i, _| i.attention.page_table = strided(6, DType::I32, &[B, WIDTH], &[100, 2]),
            "page_table: wanted columns next to each other",
        ),
        (
            |i, _| i.attention.page_table = strided(6, DType::I32, &[B, WIDTH], &[39, 1]),
            "page_table: wanted columns next to each other",
        ),
        (
            |i, _| i.attention.page_table = fake(6, DType::I32, &[B, 41]),
            "page_table: wanted shape [3, 40], got [3, 41]",
        ),
        (
            |i, _| i.stream = at(0x7000_0000_0008, DType::F32, &[T, 8192]),
            "stream: wanted an address aligned to 16 bytes",
        ),
        (
            |i, _| i.attention.cache_loc = at(0x7000_0000_0004, DType::I64, &[T]),
            "cache_loc: wanted an address aligned to 8 bytes",
        ),
        (|i, _| i.local_start = at(0, DType::I32, &[1]), "local_start: null pointer"),
        (|_, o| o.topk_ids = at(0, DType::I32, &[T, 8]), "topk_ids: null pointer"),
        (|i, o| o.stream = i.stream.clone(), "stream (output) overlaps stream"),
        (|_, o| o.hidden = Some(at(o.stream.ptr() + 16, DType::Bf16, &[T, 8192])), "stream (output) overlaps hidden"),
        (|i, o| o.stream = at(i.attention.cache.k().ptr(), DType::F32, &[T, 8192]), "stream (output) overlaps k_cache"),
        (|_, o| o.hidden = None, "hidden: missing"),
        (|_, o| o.taps.set(Tap::MoeMix, fake(30, DType::Bf16, &[T, 8192])), "moe_mix: wanted shape [12, 4096]"),
        (|_, o| o.taps.set(Tap::FfnOut, fake(30, DType::Bf16, &[T, 8192])), "ffn_out: wanted f32, got bf16"),
    ];
    for (change, wanted) in cases {
        let text = refused(*change).to_string();
        assert!(text.starts_with(wanted), "{text}\n wanted: {wanted}");
    }
}

#[test]
fn taps_need_a_plan_with_taps() {
    let key = PlanKey { taps: Taps::None, ..plan().key };
    let plan = Plan::new(key, WeightKind::Nvfp4, 132).unwrap();
    let mut o = output();
    o.taps.set(Tap::AttnOut, fake(30, DType::Bf16, &[T, 8192]));
    let error = check_step(&plan, &input(), &o, true).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "plan: taps was planned as none, the call has attn_out");
}

#[test]
fn the_cache_is_the_planned_one() {
    let mut i = input();
    let pool = [7, 64, 2, 64];
    i.attention.cache = PagedKvCache::new(fake(9, DType::U8, &pool), fake(10, DType::U8, &pool)).unwrap();
    let error = check_step(&plan(), &i, &output(), true).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "plan: page_size was planned as 16, the call has 64");
}

#[rstest]
#[case::page([4, 3, 2, 64], DType::E4m3, "page_size: wanted a power of two from 1 to 256, got 3")]
#[case::page_512([4, 512, 2, 64], DType::E4m3, "page_size: wanted a power of two")]
#[case::dtype([4, 16, 2, 64], DType::Bf16, "k_cache: wanted e4m3, got bf16")]
fn a_bad_cache_is_refused(#[case] shape: [usize; 4], #[case] dtype: DType, #[case] wanted: &str) {
    let text = PagedKvCache::new(fake(1, dtype, &shape), fake(2, dtype, &shape)).unwrap_err().to_string();
    assert!(text.starts_with(wanted), "{text}");
}

#[test]
fn caches_do_not_overlap_and_agree() {
    let shape = [4, 16, 2, 64];
    let k = fake(1, DType::E4m3, &shape);
    let text = PagedKvCache::new(k.clone(), at(k.ptr() + 4096, DType::E4m3, &shape)).unwrap_err().to_string();
    assert!(text.starts_with("k_cache overlaps v_cache"), "{text}");
    let text = PagedKvCache::new(k, fake(2, DType::E4m3, &[5, 16, 2, 64])).unwrap_err().to_string();
    assert!(text.starts_with("v_cache: wanted shape [4, 16, 2, 64], got [5, 16, 2, 64]"), "{text}");
    let big = [1 << 30, 256, 2, 64];
    let v = at(0x3000_0000_0000_0000, DType::E4m3, &big);
    let text = PagedKvCache::new(fake(1, DType::E4m3, &big), v).unwrap_err().to_string();
    assert!(text.starts_with("cache rows (pages * page_size)"), "{text}");
}

#[test]
fn pools_past_two_to_the_31_bytes_are_fine() {
    let pool = [1 << 26, 1, 2, 64];
    let v = at(0x3000_0000_0000_0000, DType::E4m3, &pool);
    assert_eq!(PagedKvCache::new(fake(1, DType::E4m3, &pool), v).unwrap().pages(), 1 << 26);
}

#[test]
fn an_empty_step_needs_no_memory() {
    let key = PlanKey { tokens: 0, max_q_len: 0, page_size: 16, ..PlanKey::decode(B as u32, WIDTH as u32) };
    let plan = Plan::new(key, WeightKind::Nvfp4, 132).unwrap();
    let mut i = input();
    let none = |dtype, shape: &[usize]| at(0, dtype, shape);
    i.attention.attn_input = none(DType::Bf16, &[0, 8192]);
    i.attention.positions = none(DType::I64, &[0]);
    i.attention.cache_loc = none(DType::I64, &[0]);
    i.stream = none(DType::F32, &[0, 8192]);
    let o = DeviceOutput {
        hidden: Some(none(DType::Bf16, &[0, 8192])),
        stream: none(DType::F32, &[0, 8192]),
        topk_ids: none(DType::I32, &[0, 8]),
        taps: DeviceTaps::default(),
    };
    check_step(&plan, &i, &o, true).unwrap();
}

#[test]
fn segments_check_their_borders() {
    let plan = plan();
    let refused = |text: String, wanted: &str| assert!(text.starts_with(wanted), "{text}");
    let wide = |slot, dtype| fake(slot, dtype, &[T, 8192]);

    let i = input().attention;
    check_attention_block(&plan, &i, &wide(20, DType::Bf16)).unwrap();
    let e = check_attention_block(&plan, &i, &wide(20, DType::F32)).map(|_| ()).unwrap_err();
    refused(e.to_string(), "attn_out: wanted bf16, got f32");
    let e = check_attention_block(&plan, &i, &i.attn_input).map(|_| ()).unwrap_err();
    refused(e.to_string(), "attn_out overlaps attn_input");

    let moe_in = MoeInput {
        stream: wide(1, DType::F32),
        attn_out: wide(2, DType::Bf16),
        local_start: fake(3, DType::I32, &[1]),
        num_tokens_non_padded: None,
    };
    let moe_out = MoeOutput {
        stream_after_attn: wide(4, DType::F32),
        topk_ids: fake(5, DType::I32, &[T, 8]),
        moe_mix: fake(6, DType::Bf16, &[T, 4096]),
    };
    check_moe_block(&plan, &moe_in, &moe_out).unwrap();
    let bad = MoeOutput { moe_mix: wide(6, DType::Bf16), ..moe_out.clone() };
    refused(
        check_moe_block(&plan, &moe_in, &bad).map(|_| ()).unwrap_err().to_string(),
        "moe_mix: wanted shape [12, 4096]",
    );
    let bad = MoeOutput { stream_after_attn: moe_in.stream.clone(), ..moe_out.clone() };
    let e = check_moe_block(&plan, &moe_in, &bad).map(|_| ()).unwrap_err();
    refused(e.to_string(), "stream_after_attn overlaps stream");

    let last_in = FinalInput { stream_after_attn: moe_out.stream_after_attn, moe_mix: moe_out.moe_mix };
    let last_out = FinalOutput { hidden: Some(wide(7, DType::Bf16)), stream: wide(8, DType::F32) };
    check_final_block(&plan, &last_in, &last_out, true).unwrap();
    // A last layer gives the stream only, and is not asked for more.
    let e = check_final_block(&plan, &last_in, &last_out, false).map(|_| ()).unwrap_err();
    refused(e.to_string(), "hidden: wanted none: the layer has no next_pre_attn_norm");
    check_final_block(&plan, &last_in, &FinalOutput { hidden: None, ..last_out }, false).unwrap();
}

/// The two halves of the third segment: up to 8 tokens only, slices of one rank and of all.
#[test]
fn sliced_blocks_check_their_borders() {
    let few = Plan::new(PlanKey::decode(3, 64), WeightKind::Nvfp4, 132).unwrap();
    let refused = |result: Result<(), Error>, wanted: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.starts_with(wanted), "{text}");
    };
    let mix = |t| fake(1, DType::Bf16, &[t, 4096]);
    let slice = |t| fake(2, DType::F32, &[t, 1024]);
    check_unpool_block(&few, &mix(3), &slice(3)).unwrap();
    refused(check_unpool_block(&few, &mix(3), &slice(4)).map(|_| ()), "slice: wanted shape [3, 1024], got [4, 1024]");
    refused(check_unpool_block(&few, &mix(3), &fake(1, DType::F32, &[3, 1024])).map(|_| ()), "slice overlaps moe_mix");
    let not_sliced = "plan: tokens was planned as 12 (the unpooler is not sliced)";
    refused(check_unpool_block(&plan(), &mix(T), &slice(T)).map(|_| ()), not_sliced);

    let input = |ranks| FfnInput {
        stream_after_attn: fake(3, DType::F32, &[3, 8192]),
        slices: fake(4, DType::F32, &[ranks, 3, 1024]),
    };
    let output =
        FinalOutput { hidden: Some(fake(5, DType::Bf16, &[3, 8192])), stream: fake(6, DType::F32, &[3, 8192]) };
    for ranks in [1, 2, 8] {
        check_ffn_block(&few, &input(ranks), &output, true).unwrap();
    }
    refused(check_ffn_block(&few, &input(9), &output, true).map(|_| ()), "slices: wanted shape [8, 3, 1024]");
    refused(check_ffn_block(&few, &input(0), &output, true).map(|_| ()), "slices: wanted shape [1, 3, 1024]");
    refused(check_ffn_block(&few, &input(8), &output, false).map(|_| ()), "hidden: wanted none");
    refused(check_ffn_block(&plan(), &input(8), &output, true).map(|_| ()), not_sliced);
}

/// Scheduler metadata is checked before anything is queued.
#[test]
fn metadata_is_checked_by_name() {
    let own = PlanKey { query: QueryPrecision::E4m3, ..PlanKey::decode(6, 100) };
    let plan = |key: PlanKey| Plan::new(key, WeightKind::Nvfp4, 0).unwrap();
    let fa3 = plan(PlanKey { engine: AttentionEngine::Fa3, ..own.clone() });
    let own = plan(own);
    assert_eq!((SchedulerMetadata::words(&own), SchedulerMetadata::words(&fa3)), (0, 36));
    let lengths = || Lengths {
        cu_seqlens_q: fake(1, DType::I32, &[7]),
        cache_seqlens: fake(2, DType::I32, &[6]),
        memory: fake(3, DType::I32, &[36]),
    };
    let refused = |plan: &Plan, change: fn(&mut Lengths)| {
        let mut lengths = lengths();
        change(&mut lengths);
        SchedulerMetadata::prepare(plan, &lengths, Stream::LEGACY).map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&own, |_| {}),
        "plan: engine was planned as own, the call has scheduler metadata, which fa3 has"
    );
    for (change, text) in [
        (
            (|l| l.cu_seqlens_q = fake(1, DType::I32, &[6])) as fn(&mut Lengths),
            "cu_seqlens_q: wanted shape [7], got [6]",
        ),
        (|l| l.cache_seqlens = fake(2, DType::I64, &[6]), "cache_seqlens: wanted i32, got i64"),
        (|l| l.memory = fake(3, DType::I32, &[35]), "memory: wanted shape [36], got [35]"),
        (|l| l.memory = at(0x7000_0000_0008, DType::I32, &[36]), "memory: wanted an address aligned to 16 bytes"),
        (|l| l.memory = fake(2, DType::I32, &[36]), "memory overlaps cache_seqlens"),
    ] {
        let got = refused(&fa3, change);
        assert!(got.starts_with(text), "{got}");
    }
}
