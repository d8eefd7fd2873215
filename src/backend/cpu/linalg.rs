//! `y = x W^T` for weights in any stored form: rows are decoded to FP32 (or FP64) as they are used, so
//! the weights stay in their compact form.
#![allow(unsafe_code)] // one call of the `gemm` crate, which takes raw pointers

use half::bf16;
use rayon::prelude::*;

/// Rows of weights decoded at a time when many tokens share them: `[TILE, k]` FP32 stays in L2.
const TILE: usize = 32;
/// Up to this many tokens each row is met by plain dot products.
const FEW: usize = 3;

/// FP32 or FP64 elements.
pub(super) trait Element: Copy + Default + Send + Sync + 'static {
    const ONE: Self;
    fn multiply_add(self, a: Self, b: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

macro_rules! element {
    ($($t:ty),*) => {$(
        impl Element for $t {
            const ONE: Self = 1.0;
            #[inline(always)]
            fn multiply_add(self, a: Self, b: Self) -> Self {
                self + a * b
            }
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }
        }
    )*};
}
element!(f32, f64);

/// Dot product with 16 running sums, added in a fixed order.
#[inline]
pub(super) fn dot<E: Element>(a: &[E], b: &[E]) -> E {
    const LANES: usize = 16;
    let mut sums = [E::default(); LANES];
    let (a_main, a_rest) = a.split_at(a.len() / LANES * LANES);
    let (b_main, b_rest) = b.split_at(a_main.len());
    for (x, y) in a_main.chunks_exact(LANES).zip(b_main.chunks_exact(LANES)) {
        for i in 0..LANES {
            sums[i] = sums[i].multiply_add(x[i], y[i]);
        }
    }
    for (i, (&x, &y)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] = sums[i].multiply_add(x, y);
    }
    sums.into_iter().fold(E::default(), E::plus)
}

/// `out[i, j] = sum_k a[i, k] * b[j, k]`: `a` `[m, k]`, `b` `[n, k]`, `out` `[m, n]`.
pub(super) fn gemm_nt<E: Element>(a: &[E], b: &[E], k: usize, out: &mut [E]) {
    if out.is_empty() {
        return;
    }
    assert!(k > 0 && a.len() % k == 0 && b.len() % k == 0);
    let (m, n) = (a.len() / k, b.len() / k);
    assert_eq!(m * n, out.len());
    // SAFETY: the asserts above bound every element that the strides reach; out is not shared.
    unsafe { raw_gemm(m, n, k, out, a, (1, k), b, (k, 1)) }
}

/// `out[i, j] = sum_k a[i, k] * b[k, j]`: `a` `[m, k]`, `b` `[k, n]`, `out` `[m, n]`.
pub(super) fn gemm_nn<E: Element>(a: &[E], b: &[E], k: usize, out: &mut [E]) {
    if out.is_empty() || k == 0 {
        out.fill(E::default());
        return;
    }
    assert!(a.len() % k == 0 && b.len() % k == 0);
    let (m, n) = (a.len() / k, b.len() / k);
    assert_eq!(m * n, out.len());
    // SAFETY: as above.
    unsafe { raw_gemm(m, n, k, out, a, (1, k), b, (1, n)) }
}

/// Strides are (column, row); `out` is row-major `[m, n]`.
///
/// # Safety
/// The strides must stay within `a` and `b`.
#[allow(clippy::too_many_arguments)]
unsafe fn raw_gemm<E: Element>(
    m: usize,
    n: usize,
    k: usize,
    out: &mut [E],
    a: &[E],
    a_strides: (usize, usize),
    b: &[E],
    b_strides: (usize, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.as_ptr(),
            a_strides.0 as isize,
            a_strides.1 as isize,
            b.as_ptr(),
            b_strides.0 as isize,
            b_strides.1 as isize,
            E::default(),
            E::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `x` `[T, k]` times the transpose of a weight `[rows, k]` whose row `r` is written by
/// `decode(r, &mut [k])`: `[T, rows]`.
pub(super) fn project<E: Element>(x: &[E], k: usize, rows: usize, decode: impl Fn(usize, &mut [E]) + Sync) -> Vec<E> {
    let tokens = x.len() / k;
    if tokens == 0 || rows == 0 {
        return Vec::new();
    }
    // Transposed, so that each task owns a contiguous part.
    let mut by_row = vec![E::default(); rows * tokens];
    if tokens <= FEW {
        by_row.par_chunks_mut(TILE * tokens).enumerate().for_each(|(tile, part)| {
            let mut weights = vec![E::default(); k];
            for (r, out) in part.chunks_exact_mut(tokens).enumerate() {
                decode(tile * TILE + r, &mut weights);
                for (y, token) in out.iter_mut().zip(x.chunks_exact(k)) {
                    *y = dot(&weights, token);
                }
            }
        });
    } else {
        by_row.par_chunks_mut(TILE * tokens).enumerate().for_each(|(tile, part)| {
            let rows = part.len() / tokens;
            let mut weights = vec![E::default(); rows * k];
            for (r, row) in weights.chunks_exact_mut(k).enumerate() {
                decode(tile * TILE + r, row);
            }
            gemm_nt(&weights, x, k, part);
        });
    }
    transpose(&by_row, rows, tokens)
}

/// `[rows, columns]` to `[columns, rows]`.
fn transpose<E: Element>(x: &[E], rows: usize, columns: usize) -> Vec<E> {
    if columns == 1 {
        return x.to_vec();
    }
    let mut out = vec![E::default(); x.len()];
    out.par_chunks_mut(rows).enumerate().for_each(|(c, row)| {
        for (r, v) in row.iter_mut().enumerate() {
            *v = x[r * columns + c];
        }
    });
    out
}

/// Widens BF16, exactly.
#[inline]
pub(super) fn widen(src: &[bf16], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = f32::from_bits(u32::from(s.to_bits()) << 16);
    }
}

/// `x` `[T, k]` times the transpose of rows `rows` of a BF16 weight `[.., k]`: `[T, rows]`.
pub(super) fn project_bf16(x: &[f32], k: usize, weight: &[bf16], rows: std::ops::Range<usize>) -> Vec<f32> {
    project(x, k, rows.len(), |r, out| widen(&weight[(rows.start + r) * k..][..k], out))
}

/// `x / sqrt(mean(x^2) + eps)`, row by row, in place.
pub(super) fn rms_norm(x: &mut [f32], width: usize, eps: f32) {
    for row in x.chunks_exact_mut(width) {
        let mean = dot(row, row) / width as f32;
        let inverse = 1.0 / (mean + eps).sqrt();
        row.iter_mut().for_each(|v| *v *= inverse);
    }
}
