//! The number formats and NVFP4: every code, every scale, every rounding boundary.

mod cpu_common;

use cpu_common::naive::nearest_e4m3;
use half::bf16;
use muse_spark_layer::numerics::*;
use muse_spark_layer::weights::nvfp4;
use muse_spark_layer::Error;
use proptest::prelude::*;
use rstest::rstest;

fn is_nan(byte: u8) -> bool {
    byte & 0x7f == 0x7f
}

#[test]
fn e4m3_values_are_the_format() {
    for byte in 0..=255u8 {
        let (sign, exponent, mantissa) = (byte >> 7, i32::from((byte >> 3) & 15), f64::from(byte & 7));
        let magnitude = if exponent == 0 {
            mantissa / 8.0 * 2f64.powi(-6)
        } else {
            (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
        };
        let value = e4m3_to_f32(byte);
        assert_eq!(value.is_nan(), is_nan(byte));
        if !is_nan(byte) {
            assert_eq!(f64::from(value), if sign == 1 { -magnitude } else { magnitude });
            assert_eq!(f32_to_e4m3(value), byte, "{byte:#04x} comes back");
        }
    }
    assert_eq!(e4m3_to_f32(0x7e), E4M3_MAX);
    assert_eq!(e4m3_to_f32(1), 2f32.powi(-9));
}

/// At each midpoint the even byte wins; one FP32 step to either side decides.
#[rstest]
fn e4m3_rounds_to_nearest_even(#[values(1.0, -1.0)] sign: f32) {
    for low in 0..0x7eu8 {
        let high = low + 1;
        let middle = (e4m3_to_f32(low) + e4m3_to_f32(high)) / 2.0;
        let byte = |b: u8| if sign < 0.0 { b | 0x80 } else { b };
        assert_eq!(f32_to_e4m3(sign * middle), byte(if low % 2 == 0 { low } else { high }));
        assert_eq!(f32_to_e4m3(sign * f32::from_bits(middle.to_bits() - 1)), byte(low));
        assert_eq!(f32_to_e4m3(sign * f32::from_bits(middle.to_bits() + 1)), byte(high));
    }
}

#[rstest]
#[case(448.0, 0x7e)]
#[case(464.0, 0x7e)]
#[case(464.0001, 0x7e)]
#[case(480.0, 0x7e)]
#[case(1e30, 0x7e)]
#[case(f32::INFINITY, 0x7e)]
#[case(f32::NEG_INFINITY, 0xfe)]
#[case(-500.0, 0xfe)]
#[case(0.0, 0)]
#[case(-0.0, 0x80)]
#[case(f32::MIN_POSITIVE, 0)]
#[case(f32::NAN, 0x7f)]
#[case(-f32::NAN, 0xff)]
fn e4m3_saturates(#[case] x: f32, #[case] byte: u8) {
    assert_eq!(f32_to_e4m3(x), byte);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn e4m3_is_the_nearest_of_all(x in prop_oneof![-500f32..500.0, -1f32..1.0, -0.02f32..0.02]) {
        prop_assert_eq!(e4m3_to_f32(f32_to_e4m3(x)), nearest_e4m3(f64::from(x)));
    }

    #[test]
    fn e2m1_is_the_nearest_of_all(x in -8f32..8.0) {
        let got = e2m1_to_f32(f32_to_e2m1(x));
        let best = (0..16).map(|c| (e2m1_to_f32(c) - x).abs()).fold(f32::INFINITY, f32::min);
        prop_assert_eq!((got - x).abs(), best);
    }
}

/// Codes 8..=15 are the negatives of 0..=7; a midpoint goes to the smaller magnitude.
#[test]
fn e2m1_codes() {
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for (code, m) in magnitudes.into_iter().enumerate() {
        let code = code as u8;
        assert_eq!(e2m1_to_f32(code), m);
        assert_eq!(e2m1_to_f32(code | 8), -m);
        assert_eq!(f32_to_e2m1(m), code);
        if code > 0 {
            assert_eq!(f32_to_e2m1(-m), code | 8);
            let middle = (m + magnitudes[code as usize - 1]) / 2.0;
            assert_eq!(f32_to_e2m1(middle), code - 1);
            assert_eq!(f32_to_e2m1(middle * 1.0001), code);
        }
    }
    assert_eq!(f32_to_e2m1(1e9), 7);
    assert_eq!(f32_to_e2m1(f32::NEG_INFINITY), 15);
}

/// Every code times every scale is what the formats say, exactly, and exact in BF16 as well.
#[test]
fn every_code_times_every_scale_is_exact() {
    for scale in (0..=255u8).filter(|&b| !is_nan(b)) {
        let codes: Vec<u8> = (0..16).collect();
        let mut row = [0f32; 16];
        nvfp4::decode_row(&nvfp4::pack_codes(&codes), &[scale], &mut row);
        for (code, &got) in codes.iter().zip(&row) {
            let want = f64::from(e2m1_to_f32(*code)) * f64::from(e4m3_to_f32(scale));
            assert_eq!(f64::from(got), want, "code {code}, scale {scale:#04x}");
            assert_eq!(bf16::from_f32(got).to_f32(), got);
        }
    }
}

/// The low nibble is the even column; a scale serves 16 columns of its own row.
#[test]
fn natural_layout() {
    let (n, k) = (3, 48);
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 % 16) as u8).collect();
    let scales: Vec<u8> = (0..n * k / 16).map(|i| 0x30 + 3 * i as u8).collect();
    let packed = nvfp4::pack_codes(&codes);
    assert_eq!(packed[0], codes[0] | codes[1] << 4);
    assert_eq!(nvfp4::unpack_codes(&packed), codes);
    let values = nvfp4::dequantize(&packed, &scales, 0.37, k);
    for r in 0..n {
        for c in 0..k {
            let want = e2m1_to_f32(codes[r * k + c]) * e4m3_to_f32(scales[r * k / 16 + c / 16]) * 0.37;
            assert_eq!(values[r * k + c], want, "row {r}, column {c}");
        }
    }
}

proptest! {
    #[test]
    fn quantising_keeps_values_within_half_a_code(seed in 0u64..1000, spread in 0.01f32..100.0) {
        let stream = muse_spark_layer::synthetic::Random::new(seed, "values");
        let values: Vec<f32> = (0..128).map(|i| stream.normal(i) * spread).collect();
        let q = nvfp4::quantize(&values, 32, None);
        let back = nvfp4::dequantize(&q.packed, &q.scales, q.global_scale, 32);
        for (i, (v, b)) in values.iter().zip(&back).enumerate() {
            // The widest gap between codes is 2 steps; the scale itself rounds by up to 1/16.
            let step = e4m3_to_f32(q.scales[i / 16]) * q.global_scale;
            prop_assert!((v - b).abs() <= step * 1.001 + v.abs() / 15.0, "{} came back as {}", v, b);
        }
    }

    #[test]
    fn quantising_what_was_dequantised_changes_nothing(seed in 0u64..1000) {
        let stream = muse_spark_layer::synthetic::Random::new(seed, "codes");
        // The largest code in each block, so that the scale is found again.
        let codes: Vec<u8> = (0..64).map(|i| if i % 16 == 0 { 7 } else { stream.byte(i) & 15 }).collect();
        let codes: Vec<u8> = codes.iter().map(|&c| if c == 8 { 0 } else { c }).collect();
        let scales: Vec<u8> = (0..4).map(|i| 0x20 + (stream.byte(100 + i) & 63)).collect();
        let packed = nvfp4::pack_codes(&codes);
        let values = nvfp4::dequantize(&packed, &scales, 0.5, 32);
        let q = nvfp4::quantize(&values, 32, Some(0.5));
        prop_assert_eq!(q, nvfp4::Quantized { packed, scales, global_scale: 0.5 });
    }
}

#[test]
fn blocks_that_round_to_nothing_become_zero() {
    let mut values = vec![0f32; 32];
    values[0] = 1.0;
    values[16] = 1e-9;
    let q = nvfp4::quantize(&values, 32, None);
    assert_eq!(q.scales[1], 0);
    assert!(nvfp4::dequantize(&q.packed, &q.scales, q.global_scale, 32)[16..].iter().all(|&v| v == 0.0));
    let zeros = nvfp4::quantize(&[0.0; 16], 16, None);
    assert_eq!(nvfp4::dequantize(&zeros.packed, &zeros.scales, zeros.global_scale, 16), [0.0; 16]);
}

#[rstest]
#[case(0x7f)]
#[case(0xff)]
fn a_nan_scale_is_named(#[case] byte: u8) {
    let mut scales = vec![0x7e; 70];
    nvfp4::check_scales("w13_sf", &scales).unwrap();
    scales[67] = byte;
    match nvfp4::check_scales("w13_sf", &scales) {
        Err(Error::NanScale { tensor, index: 67 }) => assert_eq!(tensor, "w13_sf"),
        other => panic!("{other:?}"),
    }
}
