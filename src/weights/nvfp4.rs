//! NVFP4 as checkpoints hold it: E2M1 codes two to a byte (low nibble first, so the even k), one E4M3
//! scale per block of 16 along K, an FP32 global scale. `value = code * block scale * global scale`.
//!
//! A code times a block scale needs at most 6 significant bits: it is exact in BF16 and FP32. The
//! global scale belongs after the sum over K.

use crate::error::{Error, Result};
use crate::numerics::{e2m1_to_f32, e4m3_to_f32, f32_to_e2m1, f32_to_e4m3, E2M1_MAX, E4M3_MAX};
use once_cell::sync::Lazy;

/// Values that share a block scale.
pub const BLOCK: usize = 16;

/// The two values of every byte of codes.
static PAIRS: Lazy<[[f32; 2]; 256]> =
    Lazy::new(|| std::array::from_fn(|b| [e2m1_to_f32(b as u8), e2m1_to_f32(b as u8 >> 4)]));

/// Packs codes (low nibbles of `codes`, an even number) two to a byte.
pub fn pack_codes(codes: &[u8]) -> Vec<u8> {
    codes.chunks_exact(2).map(|c| (c[0] & 15) | (c[1] << 4)).collect()
}

/// One code a byte from packed codes.
pub fn unpack_codes(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|&b| [b & 15, b >> 4]).collect()
}

/// `code * block scale` of one row: `packed` `[k / 2]`, `scales` `[k / 16]` E4M3 into `out` `[k]`. Exact.
/// The global scale is not applied.
#[inline]
pub fn decode_row(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    let pairs: &[[f32; 2]; 256] = &PAIRS;
    for ((codes, &scale), values) in packed.chunks_exact(BLOCK / 2).zip(scales).zip(out.chunks_exact_mut(BLOCK)) {
        let scale = e4m3_to_f32(scale);
        for (&byte, pair) in codes.iter().zip(values.chunks_exact_mut(2)) {
            let [a, b] = pairs[byte as usize];
            pair[0] = a * scale;
            pair[1] = b * scale;
        }
    }
}

/// All values `[n, k]` of a matrix: `packed` `[n, k / 2]`, `scales` `[n, k / 16]`, one global scale.
pub fn dequantize(packed: &[u8], scales: &[u8], global_scale: f32, k: usize) -> Vec<f32> {
    let mut out = vec![0.0; packed.len() * 2];
    for ((row, codes), sf) in
        out.chunks_exact_mut(k).zip(packed.chunks_exact(k / 2)).zip(scales.chunks_exact(k / BLOCK))
    {
        decode_row(codes, sf, row);
        row.iter_mut().for_each(|v| *v *= global_scale);
    }
    out
}

/// A quantised matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// `[n, k / 2]`.
    pub packed: Vec<u8>,
    /// `[n, k / 16]` E4M3.
    pub scales: Vec<u8>,
    /// FP32.
    pub global_scale: f32,
}

/// Quantises `values` `[n, k]`, `k` a multiple of 16. The global scale maps the largest magnitude to
/// the largest code times the largest scale, unless given; a block whose scale rounds to 0 becomes 0.
pub fn quantize(values: &[f32], k: usize, global_scale: Option<f32>) -> Quantized {
    assert!(k > 0 && k % BLOCK == 0 && values.len() % k == 0, "{} values in rows of {k}", values.len());
    let amax = |x: &[f32]| x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let global_scale = global_scale.unwrap_or_else(|| amax(values) / (E2M1_MAX * E4M3_MAX));
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(values.len() / BLOCK);
    for block in values.chunks_exact(BLOCK) {
        let wanted = amax(block) / E2M1_MAX / global_scale;
        let scale = if wanted.is_nan() { 0 } else { f32_to_e4m3(wanted) };
        let step = e4m3_to_f32(scale) * global_scale;
        scales.push(scale);
        codes.extend(block.iter().map(|v| if step > 0.0 { f32_to_e2m1(v / step.max(1e-30)) } else { 0 }));
    }
    Quantized { packed: pack_codes(&codes), scales, global_scale }
}

/// Checks that no block scale is NaN; `tensor` names them in the error.
pub fn check_scales(tensor: &str, scales: &[u8]) -> Result<()> {
    // The common case in one pass that vectorises: no byte is 0x7f once the sign is dropped.
    if scales.iter().fold(false, |bad, &b| bad | (b & 0x7f == 0x7f)) {
        let index = scales.iter().position(|&b| b & 0x7f == 0x7f).unwrap_or(0);
        return Err(Error::NanScale { tensor: tensor.into(), index });
    }
    Ok(())
}
