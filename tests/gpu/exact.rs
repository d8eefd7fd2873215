//! What can be exact is: packing and dequantisation of every code and scale, rounding to E4M3 at every boundary, top 8
//! against brute force with ties, infinities and NaN. Single operations, by the bridge.

use crate::harness::{floats, gpu, halves, words};
use crate::memory::Banded;
use crate::single::{
    expert, expert_params, launch, le, one_hot, pack, pack_projection, projection, put, Projected, DIM,
};
use half::bf16;
use muse_spark_layer::backend::cuda::bridge;
use muse_spark_layer::backend::cuda::params::*;
use muse_spark_layer::backend::cuda::tiles::WIDE;
use muse_spark_layer::numerics::{e2m1_to_f32, e4m3_to_f32, f32_to_e4m3};
use muse_spark_layer::routing::{self, ExpertLists};
use muse_spark_layer::synthetic::Random;
use rstest::rstest;
use std::ffi::c_void;

/// All 16 codes times all 254 scales that are numbers: a one in the input brings out one weight, exactly.
#[rstest]
fn every_code_times_every_scale(#[values(1, 8, 16, 64, 200)] routes: usize, #[values(false, true)] few: bool) {
    let Some(gpu) = gpu("exact::every_code_times_every_scale") else { return };
    if few && routes > 8 {
        return; // the few-token kernel takes 8 of an expert
    }
    // Row n has scale byte n mod 256 and code (k + n / 256) mod 16 in column k.
    let byte = |n: usize| if n % 128 == 127 { 0 } else { (n % 256) as u8 };
    let code = |n: usize, k: usize| ((k + n / 256) % 16) as u8;
    let codes: Vec<u8> = (0..DIM * DIM / 2)
        .map(|i| (i / (DIM / 2), 2 * (i % (DIM / 2))))
        .map(|(n, k)| code(n, k) | code(n, k + 1) << 4)
        .collect();
    let scales: Vec<u8> = (0..DIM * DIM / 16).map(|i| byte(i / (DIM / 16))).collect();
    let matrix = pack(&gpu, &codes, &scales, &[0.5], DIM);
    // 16 neighbouring columns have all codes; then columns all over the matrix.
    let columns: Vec<usize> = (0..routes).map(|r| if r < 16 { 1040 + r } else { (r * 389) % DIM }).collect();
    let got = expert(&gpu, &matrix, &one_hot(&columns), few);
    for (r, &k) in columns.iter().enumerate() {
        for n in 0..DIM {
            let want = 0.5 * e2m1_to_f32(code(n, k)) * e4m3_to_f32(byte(n));
            assert_eq!(got[r * DIM + n], want, "row {n}, column {k}: code {}, scale {:#04x}", code(n, k), byte(n));
        }
    }
}

/// The identity in, the whole matrix out: every weight of a random matrix is where it belongs.
#[test]
fn packing_an_expert_round_trips() {
    let Some(gpu) = gpu("exact::packing_an_expert_round_trips") else { return };
    let random = Random::new(1, "codes");
    let codes: Vec<u8> = (0..DIM * DIM / 2).map(|i| random.byte(i as u64)).collect();
    let random = Random::new(1, "scales");
    let scales: Vec<u8> =
        (0..DIM * DIM / 16).map(|i| random.byte(i as u64)).map(|b| if b & 0x7f == 0x7f { 1 } else { b }).collect();
    let matrix = pack(&gpu, &codes, &scales, &[1.0], DIM);
    let got = expert(&gpu, &matrix, &one_hot(&(0..DIM).collect::<Vec<_>>()), false);
    let want = muse_spark_layer::weights::nvfp4::dequantize(&codes, &scales, 1.0, DIM);
    for n in 0..DIM {
        for k in 0..DIM {
            assert_eq!(got[k * DIM + n], want[n * DIM + k], "row {n}, column {k}");
        }
    }
}

/// Twice the up projection's global scale is twice the first product, exactly, and the gate's is another matter.
#[rstest]
fn global_scales_multiply_once(#[values(1, 40)] routes: usize) {
    let Some(gpu) = gpu("exact::global_scales_multiply_once") else { return };
    let random = Random::new(2, "codes");
    let codes: Vec<u8> = (0..DIM * DIM).map(|i| random.byte(i as u64)).collect();
    let scales: Vec<u8> = (0..DIM * DIM / 8).map(|i| 0x30 + (random.byte(i as u64) & 15)).collect();
    let random = Random::new(2, "x");
    let x: Vec<bf16> = (0..routes * DIM).map(|i| bf16::from_f32(random.normal(i as u64))).collect();
    let with = |gs: &[f32]| expert(&gpu, &pack(&gpu, &codes, &scales, gs, 2 * DIM), &x, false);
    let base = with(&[1e-3, 1e-3]);
    assert!(base.iter().any(|v| *v != 0.0));
    assert_eq!(with(&[1e-3]), base, "one scale is both");
    assert_eq!(with(&[1e-3, 2e-3]), base.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    assert_ne!(with(&[2e-3, 1e-3]), base);
}

/// CTAs that get equal runs of all k steps, and hand the sums of a cut unit on, leave the bits of those that take whole
/// units, and every flag cleared.
#[rstest]
fn handed_on_sums_are_the_same_bits(#[values(32, 128, 400, 600)] tokens: usize, #[values(false, true)] swiglu: bool) {
    let Some(gpu) = gpu("exact::handed_on_sums_are_the_same_bits") else { return };
    // More blocks of 256 rows than multiprocessors.
    let (rows, experts) = if swiglu { (2 * DIM, 5) } else { (DIM, 10) };
    let random = Random::new(3, "codes");
    let codes: Vec<u8> = (0..experts * rows * DIM / 16).flat_map(|i| random.bits(i as u64).to_le_bytes()).collect();
    let random = Random::new(3, "scales");
    let scales: Vec<u8> = (0..experts * rows * DIM / 128)
        .flat_map(|i| ((random.bits(i as u64) & 0x0f0f_0f0f_0f0f_0f0f) | 0x3030_3030_3030_3030).to_le_bytes())
        .collect();
    let matrix = pack(&gpu, &codes, &scales, &vec![1e-3; experts], rows);
    let counts: Vec<usize> = [17, 1, 32, 9, 24, 3, 8, 25, 2, 16].map(|n| n * tokens / 32)[..experts].to_vec();
    let routes: usize = counts.iter().sum();
    let offsets: Vec<i32> = (0..33).map(|e| counts.iter().take(e).sum::<usize>() as i32).collect();
    let x: Vec<bf16> = (0..routes * DIM).map(|i| bf16::from_f32(random.normal(i as u64))).collect();
    let (x, offsets) = (put(&gpu, &le(&x, bf16::to_le_bytes)), put(&gpu, &le(&offsets, i32::to_le_bytes)));
    let sms = gpu.device.sm_count() as usize;
    let chunk = match tokens {
        0..=32 => 32,
        33..=128 => 64,
        _ => 128,
    };
    let words = sms * 256 * chunk;
    let (carry, flags) = (Banded::new(&gpu.device, 4 * words as u64), put(&gpu, &vec![0; 4 * sms]));
    let out = Banded::new(&gpu.device, (routes * DIM * 2) as u64);
    let run = |carry_words: usize| {
        out.fill(0xFF);
        let params = ExpertGemmParams {
            carry: carry.ptr() as *mut f32,
            carry_flags: flags.ptr() as *mut u32,
            max_routes_per_expert: tokens as i32,
            carry_words: carry_words as i32,
            ..expert_params([&matrix.weight, &matrix.scale, &x, &out, &offsets], swiglu, routes)
        };
        let _current = gpu.device.make_current().expect("a context");
        let operation = if swiglu { bridge::w13 } else { bridge::w2 };
        // SAFETY: as in `pack`.
        unsafe { operation(&params, &launch(&gpu, false)) }.expect("the experts");
        out.intact("the experts' output", 0xFF);
        out.read()
    };
    let whole = run(0);
    assert!(halves(&whole).iter().all(|v| v.is_finite()) && halves(&whole).iter().any(|v| *v != bf16::ZERO));
    carry.fill(0xFF);
    for _ in 0..5 {
        assert!(run(words) == whole, "other bits");
        assert!(flags.read().iter().all(|b| *b == 0), "a flag is left");
    }
    assert!(carry.read().iter().any(|b| *b != 0xFF), "nothing was handed on");
    carry.intact("what is handed on", 0xFF);
}

/// A NaN scale anywhere is found and named: first, last, of either sign.
#[test]
fn nan_scales_are_found() {
    let Some(gpu) = gpu("exact::nan_scales_are_found") else { return };
    let codes = put(&gpu, &vec![0x21; DIM * DIM / 2]);
    let (gs, weight) =
        (put(&gpu, &1f32.to_le_bytes()), Banded::new(&gpu.device, (DIM / 64 * (DIM / 64) * 2304) as u64));
    let scale = Banded::new(&gpu.device, 4);
    for (at, byte) in [(0, 0x7f), (DIM * DIM / 16 - 1, 0xff), (70_001, 0x7f)] {
        let mut scales = vec![0x38; DIM * DIM / 16];
        scales[at] = byte;
        let (scales, bad) = (put(&gpu, &scales), put(&gpu, &[0; 4]));
        let params = PackExpertsParams {
            codes: codes.ptr() as *const c_void,
            block_scale: scales.ptr() as *const c_void,
            global_scale: gs.ptr() as *const f32,
            dst: weight.ptr() as *mut c_void,
            scale: scale.ptr() as *mut f32,
            bad_scale: bad.ptr() as *mut i32,
            experts: 1,
            rows: DIM as i32,
            k: DIM as i32,
            swiglu: 0,
            weight_kind: 0,
            scales_per_expert: 1,
        };
        let _current = gpu.device.make_current().expect("a context");
        // SAFETY: as in `pack`.
        unsafe { bridge::pack_experts(&params, &launch(&gpu, false)) }.expect("pack_experts");
        assert_eq!(words(&bad.read()), [at as i32 + 1]);
    }
}

/// Dense weights: a one in the input brings out a column of the packed matrix, in each kernel and tile width.
#[rstest]
fn packing_a_projection_round_trips(
    #[values((1, 8), (8, 8), (13, 16), (32, 32), (50, 64), (90, 96), (128, 128), (300, 0))] shape: (usize, i32),
    #[values(1, 3)] splits: i32,
) {
    let Some(gpu) = gpu("exact::packing_a_projection_round_trips") else { return };
    let of = Projected { tokens: shape.0, tile: (0, shape.1), splits, ..Projected::new(&gpu) };
    projection(&gpu, &pack_projection(&gpu), of).run(&gpu);
}

/// The same of the wide kernel's tiles, both output types: less than a tile of tokens, a little more, and several a SM.
#[rstest]
fn wide_projections_round_trip(#[values((1, false), (1, true), (3, true))] form: (i32, bool)) {
    let Some(gpu) = gpu("exact::wide_projections_round_trip") else { return };
    let (packed, (splits, out_f32)) = (pack_projection(&gpu), form);
    for (i, (rows, width)) in WIDE.into_iter().enumerate() {
        for tokens in [width as usize - 9, if i % 4 == 0 { 1999 } else { width as usize + 5 }] {
            let of = Projected { tokens, tile: (rows as i32, width as i32), splits, out_f32, ..Projected::new(&gpu) };
            projection(&gpu, &packed, of).run(&gpu);
        }
    }
}

/// Values at every rounding boundary of E4M3, one FP32 step to either side, past the largest, infinite and NaN: the
/// bytes that are appended are those of the CPU.
#[rstest]
fn e4m3_rounds_at_every_boundary(#[values(1.0, 0.5, 4.0)] scale: f32) {
    let Some(gpu) = gpu("exact::e4m3_rounds_at_every_boundary") else { return };
    let mut values = vec![0.0f32, f32::MIN_POSITIVE, 448.0, 464.0, 465.0, 480.0, 1e30, f32::INFINITY, f32::NAN];
    for low in 0..0x7e_u8 {
        let middle = (e4m3_to_f32(low) + e4m3_to_f32(low + 1)) / 2.0;
        values.extend([
            middle,
            f32::from_bits(middle.to_bits() - 1),
            f32::from_bits(middle.to_bits() + 1),
            e4m3_to_f32(low),
        ]);
    }
    let values: Vec<f32> = values.iter().flat_map(|v| [*v, -v]).collect();
    let tokens = values.len().div_ceil(128);
    // q, k and gate are ones; v, the 128 columns from 1152 on, has the values times the scale.
    let mut qkv = vec![1f32; tokens * 2304];
    values.iter().enumerate().for_each(|(i, v)| qkv[i / 128 * 2304 + 1152 + i % 128] = v * scale);
    let qkv = put(&gpu, &le(&qkv, f32::to_le_bytes));
    let positions = put(&gpu, &le(&vec![0i64; tokens], i64::to_le_bytes));
    let slots = put(&gpu, &le(&(0..tokens as i64).collect::<Vec<_>>(), i64::to_le_bytes));
    let (k_scale, v_scale) = (put(&gpu, &1f32.to_le_bytes()), put(&gpu, &scale.to_le_bytes()));
    let [k_cache, v_cache] = [0, 1].map(|_| Banded::new(&gpu.device, (tokens * 128) as u64));
    let (q, gate) =
        (Banded::new(&gpu.device, (tokens * 2048) as u64), Banded::new(&gpu.device, (tokens * 4096) as u64));
    let params = QkNormRopeAppendParams {
        qkv: qkv.ptr() as *const f32,
        positions: positions.ptr() as *const i64,
        cache_loc: slots.ptr() as *const i64,
        k_scale: k_scale.ptr() as *const f32,
        v_scale: v_scale.ptr() as *const f32,
        inv_freq: std::ptr::null(),
        k_cache: k_cache.ptr() as *mut c_void,
        v_cache: v_cache.ptr() as *mut c_void,
        q: q.ptr() as *mut c_void,
        gate: gate.ptr() as *mut f32,
        cache_rows: tokens as i64,
        tokens: tokens as i32,
        splits: 1,
        e4m3_query: 0,
        skip_slot_zero: 0,
    };
    let _current = gpu.device.make_current().expect("a context");
    // SAFETY: as in `pack`.
    unsafe { bridge::qk_norm_rope_append(&params, &launch(&gpu, false)) }.expect("append");
    let got = v_cache.read();
    for (i, v) in values.iter().enumerate() {
        let want = f32_to_e4m3(v * scale / scale);
        // The splits' sum starts from +0, so -0 may lose its sign.
        let same = got[i] == want || (got[i] | want) & 0x7f == 0 || (v.is_nan() && got[i] & 0x7f == 0x7f);
        assert!(same, "{v:e} became {:#04x}, wanted {want:#04x}", got[i]);
    }
    k_cache.intact("k_cache", 0xFF);
    v_cache.intact("v_cache", 0xFF);
}

/// Logits and biases from a few values that are far apart, infinities and NaN among them: many ties, no near ones.
fn logit(random: Random, i: usize, odd: bool) -> f32 {
    const ODD: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
    match random.below(2 * i as u64, 16) {
        n @ 12.. if odd => ODD[n as usize - 12],
        n => (n % 12) as f32 * 1.5 - 6.0,
    }
}

/// Ids, weights and expert lists against brute force, for each form of the kernel.
#[rstest]
fn top_8_is_brute_force(
    #[values(1, 5, 8, 9, 16, 17, 39, 64, 65, 256, 1024, 1500)] tokens: usize,
    #[values(0, 1, 2)] odd: u32,
    #[values(1, 16)] splits: usize,
) {
    let Some(gpu) = gpu("exact::top_8_is_brute_force") else { return };
    let (config, random) = (&gpu.config, Random::new(u64::from(odd), "logits"));
    // Plain values; some not finite; a row of nothing else.
    let value = |i: usize| match odd {
        2 if i / 256 % 3 == 0 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i / 768 % 3],
        _ => logit(random, i, odd > 0),
    };
    let logits: Vec<f32> = (0..tokens * 256).map(value).collect();
    let bias: Vec<f32> = (0..256).map(|e| [0.0, 0.0, 0.03125, 2.0][random.below(7 * e + 1, 4) as usize]).collect();
    // The splits add up exactly: the value, and zeros.
    let parts: Vec<f32> =
        (0..splits).flat_map(|s| logits.iter().map(move |v| if s == splits / 2 { *v } else { 0.0 })).collect();
    let (start, limit) = (240, tokens - tokens / 5);
    let put_f32 = |v: &[f32]| put(&gpu, &le(v, f32::to_le_bytes));
    let put_i32 = |v: &[i32]| put(&gpu, &le(v, i32::to_le_bytes));
    let (parts, biases, start_at, padded) =
        (put_f32(&parts), put_f32(&bias), put_i32(&[start]), put_i32(&[limit as i32]));
    let out = |words: usize| Banded::new(&gpu.device, 4 * words as u64);
    let (ids, scores, tap) = (out(tokens * 8), out(tokens * 8), out(tokens * 256));
    let (offsets, route_token, token_route) = (out(33), out(tokens * 8), out(tokens * 8));
    let (counts, counters) = (out(tokens.div_ceil(32) * 32), put(&gpu, &[0; 256]));
    let params = RouterTopkParams {
        logits: parts.ptr() as *const f32,
        bias: biases.ptr() as *const f32,
        local_start: start_at.ptr() as *const i32,
        topk_ids: ids.ptr() as *mut i32,
        topk_scores: scores.ptr() as *mut f32,
        router_logits: tap.ptr() as *mut f32,
        expert_offsets: offsets.ptr() as *mut i32,
        route_token: route_token.ptr() as *mut i32,
        token_route: token_route.ptr() as *mut i32,
        token_masks: counts.ptr() as *mut u32,
        counters: counters.ptr() as *mut u32,
        num_tokens_non_padded: padded.ptr() as *const i32,
        tokens: tokens as i32,
        splits: splits as i32,
        behind: 0,
    };
    let _current = gpu.device.make_current().expect("a context");
    // SAFETY: as in `pack`.
    unsafe { bridge::router_topk(&params, &launch(&gpu, false)) }.expect("router_topk");
    let wide: Vec<f64> = logits.iter().map(|v| f64::from(*v)).collect();
    let want = routing::router_topk(config, &wide, &bias);
    let got = words(&ids.read());
    for (t, (g, w)) in got.chunks(8).zip(want.ids.chunks(8)).enumerate() {
        assert_eq!(g, w, "token {t}");
    }
    for (g, w) in floats(&scores.read()).iter().zip(&want.scores) {
        assert!((g - w).abs() < 1e-5 || (g.is_nan() && w.is_nan()), "{g} for {w}");
    }
    let lists = ExpertLists::new(config, &got, start, limit);
    let as_words = |v: &[usize]| v.iter().map(|n| *n as i32).collect::<Vec<_>>();
    assert_eq!(words(&offsets.read()), as_words(&lists.offsets));
    assert_eq!(words(&route_token.read())[..lists.routes()], as_words(&lists.route_token)[..]);
    let routes: Vec<i32> = lists.token_route.iter().map(|r| r.map_or(-1, |r| r as i32)).collect();
    assert_eq!(words(&token_route.read()), routes);
    assert!(counters.read().iter().all(|b| *b == 0), "the counters are left zero");
    for (memory, name) in [(&ids, "ids"), (&scores, "scores"), (&tap, "tap"), (&offsets, "offsets")] {
        memory.intact(name, 0xFF);
    }
    route_token.intact("route_token", 0xFF);
    token_route.intact("token_route", 0xFF);
}
