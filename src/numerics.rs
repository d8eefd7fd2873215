//! The small number formats: E4M3 (bytes), E2M1 (4-bit codes) and conversions to and from FP32.
//!
//! BF16 and FP16 come from the `half` crate (round to nearest, ties to even).

use once_cell::sync::Lazy;

/// The largest finite E4M3 magnitude.
pub const E4M3_MAX: f32 = 448.0;
/// The largest E2M1 magnitude.
pub const E2M1_MAX: f32 = 6.0;
/// Magnitudes of the E2M1 codes 0..=7; codes 8..=15 are their negatives.
pub const E2M1_MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Values of all E4M3 bytes: 4 exponent bits with bias 7, 3 mantissa bits, no infinities; 0x7f and
/// 0xff are NaN.
pub static E4M3_VALUES: Lazy<[f32; 256]> = Lazy::new(|| {
    std::array::from_fn(|i| {
        let (sign, exponent, mantissa) = (i >> 7, (i >> 3) & 15, i & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, m) => m as f32 * 2f32.powi(-9),
            (e, m) => (8 + m) as f32 * 2f32.powi(e as i32 - 10),
        };
        if sign == 1 {
            -magnitude
        } else {
            magnitude
        }
    })
});

/// The value of an E4M3 byte, exact.
#[inline]
pub fn e4m3_to_f32(byte: u8) -> f32 {
    E4M3_VALUES[byte as usize]
}

/// Rounds to E4M3, to nearest with ties to even, saturating at ±448 (infinities too). NaN gives 0x7f
/// with the sign of the NaN. PyTorch's cast differs above 464: it gives NaN there.
#[inline]
pub fn f32_to_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = ((bits >> 24) & 0x80) as u8;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7f;
    }
    if magnitude >= 0x43e0_0000 {
        return sign | 0x7e; // 448 and above
    }
    if magnitude < 0x3c80_0000 {
        // Below 2^-6: subnormal, steps of 2^-9. Adding 2^14 leaves exactly that step in an FP32 sum.
        let sum = f32::from_bits(magnitude) + 16384.0;
        return sign | (sum.to_bits() - 16384f32.to_bits()) as u8;
    }
    let lsb = (magnitude >> 20) & 1;
    let rounded = magnitude + 0x7_ffff + lsb;
    // Exponent bias 127 -> 7. Up to 448 nothing rounds past 0x7e.
    sign | (((rounded >> 20) - (120 << 3)) as u8).min(0x7e)
}

/// The value of the low four bits as an E2M1 code, exact.
#[inline]
pub fn e2m1_to_f32(code: u8) -> f32 {
    let magnitude = E2M1_MAGNITUDES[(code & 7) as usize];
    if code & 8 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// Rounds to an E2M1 code, saturating at ±6. At a midpoint the smaller magnitude wins, as in the
/// reference's `quantize` (`bucketize` with open lower bounds). NaN gives 6.
#[inline]
pub fn f32_to_e2m1(x: f32) -> u8 {
    let magnitude = x.abs();
    let mut code = 0;
    for i in 0..7 {
        let bound = (E2M1_MAGNITUDES[i] + E2M1_MAGNITUDES[i + 1]) / 2.0;
        code += u8::from(magnitude.total_cmp(&bound).is_gt()); // the total order puts NaN last
    }
    if x < 0.0 {
        code | 8
    } else {
        code
    }
}

/// `1 / (1 + e^-x)`.
#[inline]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `||got - want|| / ||want||` over all elements, in FP64. Not finite when an element of `got` is not.
pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let mut sums = (0f64, 0f64);
    for (&g, &w) in got.iter().zip(want) {
        let (g, w) = (f64::from(g), f64::from(w));
        sums.0 += (g - w) * (g - w);
        sums.1 += w * w;
    }
    if sums.0 == 0.0 {
        return 0.0;
    }
    sums.0.sqrt() / sums.1.sqrt().max(1e-30)
}
