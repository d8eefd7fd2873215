//! Where visibility begins and ends, by spikes: a key like a row's query, with a value of its own, decides the row's
//! output at the first and last position that the row sees, and does nothing to it one position further.

use crate::harness::{assert_rows, floats, gpu, step_key, DeviceStep, Gpu};
use crate::memory::Scratch;
use muse_spark_layer::numerics::f32_to_e4m3;
use muse_spark_layer::synthetic::{StepSpec, SyntheticStep};
use muse_spark_layer::{LayerKind, PlanKey, QueryPrecision, Stream, Taps};
use rstest::rstest;

const ROW: usize = 128;
/// The value of every column of a spike.
const VALUE: f32 = 7.0;

/// A step of one request whose own keys are not stored, so that the cache holds what the test puts there, in a table
/// that goes on past the request's end with pages that exist.
fn step(gpu: &Gpu, kind: LayerKind, page_size: usize, ctx: usize, q_len: usize) -> SyntheticStep {
    let spec = StepSpec { page_size, ..StepSpec::new(1, q_len + 2 * page_size, ctx, kind) };
    let mut step = gpu.step(&spec, 81);
    let x = &mut step.input;
    for list in [&mut x.positions, &mut x.cache_loc] {
        list.truncate(q_len);
    }
    x.cache_loc.fill(-1);
    x.stream.truncate(q_len * gpu.config.hidden);
    x.attn_input.truncate(q_len * gpu.config.hidden);
    x.cu_seqlens_q = vec![0, q_len as i32];
    x.cache_seqlens = vec![(ctx + q_len) as i32];
    step
}

struct Spiked<'a> {
    gpu: &'a Gpu,
    on: DeviceStep,
    scratch: Scratch,
    plan: muse_spark_layer::Plan,
    step: SyntheticStep,
    /// The CPU's queries, `[T][16][64]`, times 5.473.
    q: Vec<f32>,
}

impl Spiked<'_> {
    /// attention before the output norm: `[T][1024]`.
    fn run(&mut self) -> Vec<f32> {
        self.gpu.forward(&self.plan, self.scratch.workspace(), &self.on, Stream::LEGACY);
        floats(&self.on.outputs()[3])
    }

    /// The same with a spike for row `i` at `position`: K like the query of the first head of each group.
    fn with_spike(&mut self, i: usize, position: usize) -> Vec<f32> {
        let page = self.step.cache.page_size;
        let id = self.step.input.page_table[position / page] as usize;
        let at = (id * page + position % page) * ROW;
        let keys: Vec<u8> = (0..ROW)
            .map(|c| f32_to_e4m3(self.q[i * 1024 + c / 64 * 512 + c % 64] / self.gpu.config.qk_scale_factor * 4.0))
            .collect();
        self.on.cache(0).write_at(at as u64, &keys);
        self.on.cache(1).write_at(at as u64, &[f32_to_e4m3(VALUE); ROW]);
        let core = self.run();
        self.on.cache(0).write_at(at as u64, &self.step.cache.k[at..at + ROW]);
        self.on.cache(1).write_at(at as u64, &self.step.cache.v[at..at + ROW]);
        core
    }
}

fn check(kind: LayerKind, page_size: usize, ctx: usize, q_len: usize, rows: &[usize]) {
    let Some(gpu) = gpu("edges") else { return };
    let step = step(&gpu, kind, page_size, ctx, q_len);
    let q = gpu.cpu_queries(&step, &mut step.cache.clone(), kind, QueryPrecision::Fp32).q;
    let plan = gpu.plan(PlanKey { taps: Taps::All, ..step_key(&step, kind) });
    let (on, scratch) = (DeviceStep::with_taps(&gpu, &step, Taps::All), Scratch::new(&gpu, &plan));
    let mut spiked = Spiked { gpu: &gpu, on, scratch, plan, step, q };
    let before = spiked.run();
    let row = |core: &[f32], i: usize| core[i * 1024..(i + 1) * 1024].to_vec();
    for &i in rows {
        let position = ctx + i;
        let first = if kind == LayerKind::Sliding { (position + 1).saturating_sub(2048) } else { 0 };
        for visible in [first, position] {
            let core = row(&spiked.with_spike(i, visible), i);
            for head in [0, 8] {
                let got = &core[head * 64..][..64];
                assert!(got.iter().all(|v| (v - VALUE).abs() < 0.2), "row {i} does not see {visible}: {got:?}");
            }
        }
        // One ahead is past the request's end for the last row; one behind the window exists where it began.
        for hidden in [Some(position + 1), first.checked_sub(1)].into_iter().flatten() {
            let core = row(&spiked.with_spike(i, hidden), i);
            // A spike that other rows of the block see may move the point their exponents refer to, and with it a rounding.
            assert_rows(&format!("row {i} (position {position}) sees {hidden}"), &core, &row(&before, i), 64, 1e-4);
        }
    }
    spiked.on.intact();
    spiked.scratch.intact();
}

/// Every row of a verify block, and a single row.
#[rstest]
fn of_decode_and_verify(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 16, 64)] page_size: usize,
    #[values(1, 2046, 2047, 2048, 2049, 2050, 131_072)] ctx: usize,
    #[values(1, 8)] q_len: usize,
) {
    check(kind, page_size, ctx, q_len, &(0..q_len).collect::<Vec<_>>());
}

/// Rows at the borders of the tiled kernel's query tiles.
#[rstest]
fn of_prefill(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 64)] page_size: usize,
    #[values(0, 1, 2047, 2050)] ctx: usize,
) {
    check(kind, page_size, ctx, 90, &[0, 1, 23, 24, 47, 48, 63, 64, 89]);
}
