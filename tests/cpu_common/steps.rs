//! Steps made from others: some requests, some tokens, pages under other names. The GPU suite shares this file.

use muse_spark_layer::synthetic::SyntheticStep;
use std::ops::Range;

/// The rows of `x` (each `width` wide) in the order `rows`.
pub fn rows<T: Copy>(x: &[T], width: usize, rows: &[usize]) -> Vec<T> {
    rows.iter().flat_map(|&r| x[r * width..(r + 1) * width].iter().copied()).collect()
}

/// The tokens of request `b`.
pub fn tokens(step: &SyntheticStep, b: usize) -> Range<usize> {
    step.input.cu_seqlens_q[b] as usize..step.input.cu_seqlens_q[b + 1] as usize
}

/// The rows `of` of everything that has a row a token.
fn take(step: &SyntheticStep, of: &[usize]) -> SyntheticStep {
    let (mut out, x) = (step.clone(), &step.input);
    let hidden = x.stream.len() / x.positions.len().max(1);
    out.input.stream = rows(&x.stream, hidden, of);
    out.input.attn_input = rows(&x.attn_input, hidden, of);
    out.input.positions = rows(&x.positions, 1, of);
    out.input.cache_loc = rows(&x.cache_loc, 1, of);
    out
}

/// Some requests of a step, in this order, on the whole pool; and which of the step's tokens these are.
pub fn only(step: &SyntheticStep, requests: &[usize]) -> (SyntheticStep, Vec<usize>) {
    let of: Vec<usize> = requests.iter().flat_map(|&b| tokens(step, b)).collect();
    let (mut out, x) = (take(step, &of), &step.input);
    out.input.page_table = rows(&x.page_table, x.table_width, requests);
    out.input.cache_seqlens = rows(&x.cache_seqlens, 1, requests);
    out.input.cu_seqlens_q = vec![0];
    let mut end = 0;
    for &b in requests {
        end += tokens(step, b).len() as i32;
        out.input.cu_seqlens_q.push(end);
    }
    (out, of)
}

/// Some tokens of request `b`, as a step that ends with the last of them, on the whole pool.
pub fn part(step: &SyntheticStep, b: usize, of: Range<usize>) -> SyntheticStep {
    let (mut out, x) = (take(step, &of.clone().collect::<Vec<_>>()), &step.input);
    out.input.cu_seqlens_q = vec![0, of.len() as i32];
    out.input.cache_seqlens = vec![x.cache_seqlens[b] - (tokens(step, b).end - of.end) as i32];
    out.input.page_table = rows(&x.page_table, x.table_width, &[b]);
    out
}

/// The same step with page `id` at `to(id)`, a permutation; a cached row of keys, or of values, takes `row` bytes.
pub fn with_pages_renamed(step: &SyntheticStep, row: usize, to: impl Fn(usize) -> usize) -> SyntheticStep {
    let (mut out, page) = (step.clone(), step.cache.page_size);
    let bytes = page * row;
    for (new, old) in [(&mut out.cache.k, &step.cache.k), (&mut out.cache.v, &step.cache.v)] {
        for (id, content) in old.chunks_exact(bytes).enumerate() {
            new[to(id) * bytes..][..bytes].copy_from_slice(content);
        }
    }
    out.input.page_table.iter_mut().filter(|id| **id >= 0).for_each(|id| *id = to(*id as usize) as i32);
    out.input.cache_loc.iter_mut().for_each(|at| {
        *at = (to(*at as usize / page) * page + *at as usize % page) as i64;
    });
    out
}
