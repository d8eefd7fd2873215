//! Weights and inputs from integers: the same bits in every language, on every machine.
//!
//! Element `i` of the array called `name` comes from `mix(base + (i + 1) * GOLDEN)` with
//! `base = mix(seed ^ mix(fnv1a(name)))`, where `mix` is the finaliser of splitmix64. A normal variate
//! is the sum of the word's four 16-bit fields, centred and scaled to unit variance: one exact integer
//! and one FP32 product. Everything after that uses single FP32 operations in a stated order, or FP64
//! sums in index order, so that `tests/golden/generator.py` repeats it bit for bit.
//!
//! The distributions follow the reference's: a residual stream with a fixed mean direction and
//! low-rank shared structure, a router with a component along that mean (so that a few experts take
//! most tokens), scattered page tables, unit keys or keys that share a direction, per-expert global
//! scales. Experts are made as codes and scales, never quantised from wider values.

mod weights;

pub use weights::{rank_weights, stress, weights, whole_config};

use crate::backend::cpu::{Batch, Cache, StepInput};
use crate::config::{LayerConfig, LayerKind};
use crate::error::{Error, Result};
use crate::numerics::f32_to_e4m3;
use crate::tensor::NamedTensors;
use half::bf16;
use rayon::prelude::*;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// The standard deviation of the sum of four uniform 16-bit integers, inverted.
const NORMAL: f32 = (1.0 / 37_837.227_237_206_48f64) as f32;
/// Seed of the stream's mean and shared directions, the same for all weights and inputs.
const STREAM_SEED: u64 = 5354;
const STREAM_MEAN: f32 = 0.7;
const STREAM_SHARED: f64 = 0.9;
const STREAM_RANK: usize = 4;
/// Rows after the first of a short block of queries keep this part of the shared structure.
const DRAFT_SHARE: f64 = 0.6;
/// Elements a parallel task makes.
const CHUNK: usize = 1 << 16;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// The random numbers of one named array.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    base: u64,
}

impl Random {
    /// The array `name` under `seed`.
    pub fn new(seed: u64, name: &str) -> Random {
        Random { base: mix(seed ^ mix(fnv1a(name))) }
    }

    /// 64 random bits for index `i`.
    #[inline]
    pub fn bits(self, i: u64) -> u64 {
        mix(self.base.wrapping_add((i + 1).wrapping_mul(GOLDEN)))
    }

    /// The integer behind [`Random::normal`], from -131070 to 131070.
    #[inline]
    pub fn normal_integer(self, i: u64) -> i32 {
        let b = self.bits(i);
        let sum = (b & 0xffff) + ((b >> 16) & 0xffff) + ((b >> 32) & 0xffff) + (b >> 48);
        sum as i32 - 131_070
    }

    /// Mean 0, variance 1, within 3.5.
    #[inline]
    pub fn normal(self, i: u64) -> f32 {
        self.normal_integer(i) as f32 * NORMAL
    }

    /// An integer from 0 to `n - 1`.
    #[inline]
    pub fn below(self, i: u64, n: u64) -> u64 {
        ((self.bits(i) >> 32) * n) >> 32
    }

    /// Byte `i`: the little-endian bytes of the words in order.
    #[inline]
    pub fn byte(self, i: u64) -> u8 {
        self.bits(i / 8).to_le_bytes()[(i % 8) as usize]
    }

    fn fill<T: Send + Copy + Default>(n: usize, f: impl Fn(u64) -> T + Sync) -> Vec<T> {
        let mut out = vec![T::default(); n];
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(c, part)| {
            for (i, v) in part.iter_mut().enumerate() {
                *v = f((c * CHUNK + i) as u64);
            }
        });
        out
    }

    fn normals(self, n: usize) -> Vec<f32> {
        Self::fill(n, |i| self.normal(i))
    }

    /// `n` bytes from byte `first` on.
    fn bytes_from(self, first: usize, n: usize) -> Vec<u8> {
        let mut out = vec![0u8; n];
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(c, part)| {
            let (mut at, mut rest) = ((first + c * CHUNK) as u64, part);
            while !rest.is_empty() {
                let word = &self.bits(at / 8).to_le_bytes()[(at % 8) as usize..];
                let (now, later) = rest.split_at_mut(word.len().min(rest.len()));
                now.copy_from_slice(&word[..now.len()]);
                (at, rest) = (at + now.len() as u64, later);
            }
        });
        out
    }
}

/// The stream's mean direction `[hidden]` and shared directions `[4, hidden]`.
fn stream_basis(hidden: usize) -> (Vec<f32>, Vec<f32>) {
    let mean = Random::new(STREAM_SEED, "mean").normals(hidden);
    (mean, Random::new(STREAM_SEED, "shared").normals(STREAM_RANK * hidden))
}

/// How request lengths spread around [`StepSpec::ctx`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spread {
    /// All `ctx`.
    #[default]
    Fixed,
    /// Uniform within 7.5% of it.
    Agentic,
    /// Many short, a long tail, up to 4 times it.
    Mixed,
}

/// What the inputs look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dist {
    /// Independent keys of unit variance.
    #[default]
    Normal,
    /// Each key/value head's keys share a direction, so that attention spreads over many keys.
    Soft,
    /// One channel of the residual stream in 100 is 10 times larger.
    Outliers,
}

/// Which step to make.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSpec {
    /// New tokens of each request; the requests are as many. 0 is allowed.
    pub q_lens: Vec<usize>,
    /// Tokens in the cache before the step, in the middle.
    pub ctx: usize,
    /// Decides how soft keys are.
    pub kind: LayerKind,
    /// How the cached lengths differ between requests.
    pub spread: Spread,
    /// How activations are distributed.
    pub dist: Dist,
    /// Tokens a page: a power of two from 1 to 256.
    pub page_size: usize,
    /// Scale of the cached keys.
    pub k_scale: f32,
    /// Scale of the cached values.
    pub v_scale: f32,
    /// The first expert of this rank.
    pub local_start: i32,
}

impl StepSpec {
    /// `batch` requests of `q_len` new tokens each after `ctx` cached ones; page size 1, unit scales.
    pub fn new(batch: usize, q_len: usize, ctx: usize, kind: LayerKind) -> StepSpec {
        StepSpec {
            q_lens: vec![q_len; batch],
            ctx,
            kind,
            spread: Spread::Fixed,
            dist: Dist::Normal,
            page_size: 1,
            k_scale: 1.0,
            v_scale: 1.0,
            local_start: 0,
        }
    }

    /// The longest length that can be drawn.
    pub fn longest(&self) -> usize {
        match self.spread {
            Spread::Fixed => self.ctx,
            Spread::Agentic => self.ctx + self.ctx * 75 / 1000,
            Spread::Mixed => 4 * self.ctx,
        }
    }

    /// Cached tokens of each request before the step.
    pub fn lengths(&self, seed: u64) -> Vec<usize> {
        let random = Random::new(seed, "lengths");
        let ctx = self.ctx as u64;
        (0..self.q_lens.len() as u64)
            .map(|b| match self.spread {
                Spread::Fixed => self.ctx,
                Spread::Agentic => {
                    let around = ctx * 75 / 1000;
                    (ctx - around + random.below(b, 2 * around + 1)) as usize
                }
                Spread::Mixed => {
                    let (exponent, mantissa) = (random.below(2 * b, 7), 8 + random.below(2 * b + 1, 8));
                    ((((ctx * mantissa) << exponent) >> 7).max(16).min(4 * ctx)) as usize
                }
            })
            .collect()
    }
}

/// A step's inputs, owned.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticInput {
    /// `[T, hidden]`.
    pub stream: Vec<f32>,
    /// `[T, hidden]`.
    pub attn_input: Vec<bf16>,
    /// `[T]`.
    pub positions: Vec<i64>,
    /// `[T]`.
    pub cache_loc: Vec<i64>,
    /// `[B + 1]`.
    pub cu_seqlens_q: Vec<i32>,
    /// `[B]`.
    pub cache_seqlens: Vec<i32>,
    /// `[B, table_width]`, -1 past a request's last page.
    pub page_table: Vec<i32>,
    /// Columns of the page table.
    pub table_width: usize,
    /// First expert of this rank.
    pub local_start: i32,
}

impl SyntheticInput {
    /// The inputs as the CPU layer takes them.
    pub fn view(&self) -> StepInput<'_> {
        StepInput {
            stream: &self.stream,
            attn_input: &self.attn_input,
            batch: Batch {
                positions: &self.positions,
                cache_loc: &self.cache_loc,
                cu_seqlens_q: &self.cu_seqlens_q,
                cache_seqlens: &self.cache_seqlens,
                page_table: &self.page_table,
                table_width: self.table_width,
                table_stride: self.table_width,
            },
            local_start: self.local_start,
            num_tokens_non_padded: None,
        }
    }
}

/// A paged cache, owned.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticCache {
    /// `[pages, page_size, kv_heads, head_dim]` E4M3.
    pub k: Vec<u8>,
    /// As `k`.
    pub v: Vec<u8>,
    /// Tokens a page holds.
    pub page_size: usize,
    /// Scale of the cached keys.
    pub k_scale: f32,
    /// Scale of the cached values.
    pub v_scale: f32,
}

impl SyntheticCache {
    /// The part of the heads `heads` of `kv_heads`, each of `head_dim`.
    pub fn of_heads(&self, heads: std::ops::Range<usize>, kv_heads: usize, head_dim: usize) -> SyntheticCache {
        let part = |x: &[u8]| -> Vec<u8> {
            let rows = x.chunks(kv_heads * head_dim);
            rows.flat_map(|row| row[heads.start * head_dim..heads.end * head_dim].iter().copied()).collect()
        };
        SyntheticCache { k: part(&self.k), v: part(&self.v), ..*self }
    }

    /// The cache as the CPU layer takes it.
    pub fn view(&mut self) -> Cache<'_> {
        Cache {
            k: &mut self.k,
            v: &mut self.v,
            page_size: self.page_size,
            k_scale: self.k_scale,
            v_scale: self.v_scale,
        }
    }
}

/// A step's inputs and its cache.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticStep {
    /// The step's tensors.
    pub input: SyntheticInput,
    /// The cache before the step.
    pub cache: SyntheticCache,
}

/// Makes the inputs of the step `spec` under `seed`, for a cache of as many pages as the table has entries.
///
/// Errors: [`Error::Config`], [`Error::Value`] for the page size, [`Error::Limit`] for a pool past 2^31 rows.
pub fn input(config: &LayerConfig, spec: &StepSpec, seed: u64) -> Result<SyntheticInput> {
    config.validate()?;
    crate::config::check_page_size(spec.page_size)?;
    let (hidden, page, batch) = (config.hidden, spec.page_size, spec.q_lens.len());
    let lengths = spec.lengths(seed);
    let longest_q = spec.q_lens.iter().copied().max().unwrap_or(0);
    let table_width = (spec.longest() + longest_q).div_ceil(page).max(1);
    let pages = batch * table_width;
    if pages * page > i32::MAX as usize {
        let limit = i32::MAX as u64;
        return Err(Error::Limit { what: "cache rows of the pool".into(), limit, got: (pages * page) as u64 });
    }

    // Pages in a random order, dealt out request by request.
    let mut order: Vec<i32> = (0..pages as i32).collect();
    let shuffle = Random::new(seed, "pages");
    for i in (1..pages).rev() {
        order.swap(i, shuffle.below(i as u64, i as u64 + 1) as usize);
    }
    let mut page_table = vec![-1; pages];
    let (mut positions, mut cache_loc, mut cu_seqlens_q) = (Vec::new(), Vec::new(), vec![0]);
    let mut next = order.iter();
    for (b, (&seq, &q_len)) in lengths.iter().zip(&spec.q_lens).enumerate() {
        let row = &mut page_table[b * table_width..(b + 1) * table_width];
        for (entry, id) in row.iter_mut().zip(next.by_ref().take((seq + q_len).div_ceil(page))) {
            *entry = *id;
        }
        for position in seq..seq + q_len {
            positions.push(position as i64);
            cache_loc.push(i64::from(row[position / page]) * page as i64 + (position % page) as i64);
        }
        cu_seqlens_q.push(positions.len() as i32);
    }
    let cache_seqlens = lengths.iter().zip(&spec.q_lens).map(|(s, q)| (s + q) as i32).collect();
    let (stream, attn_input) = residual_stream(hidden, spec, seed);
    Ok(SyntheticInput {
        stream,
        attn_input,
        positions,
        cache_loc,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        table_width,
        local_start: spec.local_start,
    })
}

/// Makes the step `spec` under `seed`.
///
/// Errors as [`input`].
pub fn step(config: &LayerConfig, spec: &StepSpec, seed: u64) -> Result<SyntheticStep> {
    let input = input(config, spec, seed)?;
    let elements = input.page_table.len() * spec.page_size * config.kv_size();
    Ok(SyntheticStep {
        input,
        cache: SyntheticCache {
            k: cached_keys(config, spec, seed, elements),
            v: {
                let values = Random::new(seed, "v_cache");
                Random::fill(elements, |i| f32_to_e4m3(values.normal(i) / spec.v_scale))
            },
            page_size: spec.page_size,
            k_scale: spec.k_scale,
            v_scale: spec.v_scale,
        },
    })
}

fn cached_keys(config: &LayerConfig, spec: &StepSpec, seed: u64, elements: usize) -> Vec<u8> {
    let keys = Random::new(seed, "k_cache");
    if spec.dist != Dist::Soft {
        return Random::fill(elements, |i| f32_to_e4m3(keys.normal(i) / spec.k_scale));
    }
    let (dim, heads) = (config.head_dim, config.kv_heads);
    let (directions, share) = (Random::new(seed, "soft"), Random::new(seed, "soft/share"));
    let (low, high) = match spec.kind {
        LayerKind::Sliding => (0.3, 0.75),
        LayerKind::Full => (0.5, 0.62),
    };
    let (mut along, mut noise) = (Vec::new(), Vec::new());
    for h in 0..heads {
        let u: Vec<i64> = (0..dim).map(|c| i64::from(directions.normal_integer((h * dim + c) as u64))).collect();
        let squares: i64 = u.iter().map(|n| n * n).sum();
        let c2 = low + (high - low) * (share.below(h as u64, 1 << 24) as f64 / f64::from(1 << 24));
        let unit = c2.sqrt() / (squares as f64 / dim as f64).sqrt();
        along.extend(u.iter().map(|&n| (n as f64 * unit) as f32));
        noise.push((1.0 - c2).sqrt() as f32);
    }
    Random::fill(elements, |i| {
        let column = i as usize % (heads * dim);
        f32_to_e4m3((along[column] + noise[column / dim] * keys.normal(i)) / spec.k_scale)
    })
}

/// The residual stream `[T, hidden]` and its RMS-normalised BF16 form.
fn residual_stream(hidden: usize, spec: &StepSpec, seed: u64) -> (Vec<f32>, Vec<bf16>) {
    let (mean, shared) = stream_basis(hidden);
    let (coefficients, noise) = (Random::new(seed, "coefficients"), Random::new(seed, "stream"));
    let low_rank = (STREAM_SHARED / STREAM_RANK as f64).sqrt() as f32;
    // Row by row: whether it is a draft row of a verify block.
    let draft: Vec<bool> = spec.q_lens.iter().flat_map(|&q| (0..q).map(move |i| i > 0 && q <= 8)).collect();
    let mut outlier = vec![false; hidden];
    if spec.dist == Dist::Outliers {
        let pick = Random::new(seed, "outliers");
        let mut channels: Vec<usize> = (0..hidden).collect();
        for i in 0..(hidden / 100).max(1) {
            channels.swap(i, i + pick.below(i as u64, (hidden - i) as u64) as usize);
            outlier[channels[i]] = true;
        }
    }
    let mut stream = vec![0f32; draft.len() * hidden];
    let mut attn_input = vec![bf16::ZERO; stream.len()];
    stream.par_chunks_mut(hidden).zip(attn_input.par_chunks_mut(hidden)).enumerate().for_each(|(t, (row, normed))| {
        let scale = if draft[t] { DRAFT_SHARE } else { 1.0 };
        let own = (1.0 - STREAM_SHARED * scale * scale).sqrt() as f32;
        let scale = scale as f32;
        let weights: [f32; STREAM_RANK] = std::array::from_fn(|r| coefficients.normal((t * STREAM_RANK + r) as u64));
        let mut squares = 0f64;
        for (i, v) in row.iter_mut().enumerate() {
            let mut along = 0f32;
            for (r, w) in weights.iter().enumerate() {
                along += w * shared[r * hidden + i];
            }
            let structure = STREAM_MEAN * mean[i] + low_rank * along;
            *v = scale * structure + own * noise.normal((t * hidden + i) as u64);
            if outlier[i] {
                *v *= 10.0;
            }
            squares += f64::from(*v) * f64::from(*v);
        }
        let inverse = 1.0 / (squares / hidden as f64 + 1e-5).sqrt();
        for (n, v) in normed.iter_mut().zip(row) {
            *n = bf16::from_f32((f64::from(*v) * inverse) as f32);
        }
    });
    (stream, attn_input)
}

/// A digest of bytes: the sum over little-endian 64-bit words (the last one filled with zeros) of
/// `mix(word + (index + 1) * GOLDEN)`, plus `mix(length)`.
#[doc(hidden)]
pub fn digest(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|c| {
        let mut word = [0; 8];
        word[..c.len()].copy_from_slice(c);
        u64::from_le_bytes(word)
    });
    words.enumerate().fold(mix(bytes.len() as u64), |sum, (i, w)| {
        sum.wrapping_add(mix(w.wrapping_add((i as u64 + 1).wrapping_mul(GOLDEN))))
    })
}

/// A digest of named tensors: the sum of `mix(fnv1a(name) ^ digest(bytes))`.
#[doc(hidden)]
pub fn digest_all(tensors: &NamedTensors) -> u64 {
    tensors.0.iter().fold(0, |sum, (name, t)| sum.wrapping_add(mix(fnv1a(name) ^ digest(t.bytes()))))
}
