//! Single operations by the bridge: their memory, packed weights, and launches that can be repeated on any stream.

use crate::harness::{floats, halves, words, Gpu};
use crate::memory::Banded;
use half::bf16;
use muse_spark_layer::backend::cuda::bridge;
use muse_spark_layer::backend::cuda::params::*;
use muse_spark_layer::numerics::{e2m1_to_f32, e4m3_to_f32};
use muse_spark_layer::{synthetic, Result, Stream};
use std::ffi::c_void;

/// Launches, on any stream and as often as wanted, and what must have come of them.
pub struct Case<'g> {
    pub launch: Box<dyn Fn(Stream) -> Result<()> + 'g>,
    pub check: Box<dyn Fn() + 'g>,
}

impl<'g> Case<'g> {
    pub fn new(launch: impl Fn(Stream) -> Result<()> + 'g, check: impl Fn() + 'g) -> Case<'g> {
        Case { launch: Box::new(launch), check: Box::new(check) }
    }

    pub fn run(&self, gpu: &Gpu) {
        let _current = gpu.device.make_current().expect("a context");
        (self.launch)(Stream::LEGACY).expect("the launch");
        gpu.device.synchronize().expect("the kernel");
        (self.check)();
    }
}

pub const DIM: usize = 4096;

pub fn launch(gpu: &Gpu, dependent: bool) -> Launch {
    Launch { stream: std::ptr::null_mut(), sm_count: gpu.device.sm_count() as i32, dependent: dependent.into() }
}

pub fn on_stream(gpu: &Gpu, stream: Stream) -> Launch {
    Launch { stream: stream.as_ptr(), ..launch(gpu, false) }
}

pub fn le<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| to(v)).collect()
}

pub fn put(gpu: &Gpu, bytes: &[u8]) -> Banded {
    Banded::of(&gpu.device, bytes)
}

/// The experts' column order (csrc/moe/nvfp4_layout.h): where natural column `k` is kept.
pub fn position(k: usize) -> usize {
    (k & !63) | (((k & 15) >> 2) * 16 + ((k & 63) >> 4) * 2 + (k & 1) + 8 * ((k & 3) >> 1))
}

/// An NVFP4 matrix of one or several experts, packed, and FP32 factors of its outputs.
pub struct Packed {
    pub weight: Banded,
    pub scale: Banded,
}

pub fn pack(gpu: &Gpu, codes: &[u8], scales: &[u8], gs: &[f32], rows: usize) -> Packed {
    let (swiglu, experts) = (rows == 2 * DIM, codes.len() / (rows * DIM / 2));
    let (codes, block_scale) = (put(gpu, codes), put(gpu, scales));
    let (global_scale, bad) = (put(gpu, &le(gs, f32::to_le_bytes)), put(gpu, &[0; 4]));
    let weight = Banded::new(&gpu.device, (experts * (rows / 64) * (DIM / 64) * 2304) as u64);
    let scale = Banded::new(&gpu.device, 32 * if swiglu { 8 } else { 4 }); // of all local experts
    let params = PackExpertsParams {
        codes: codes.ptr() as *const c_void,
        block_scale: block_scale.ptr() as *const c_void,
        global_scale: global_scale.ptr() as *const f32,
        dst: weight.ptr() as *mut c_void,
        scale: scale.ptr() as *mut f32,
        bad_scale: bad.ptr() as *mut i32,
        experts: experts as i32,
        rows: rows as i32,
        k: DIM as i32,
        swiglu: swiglu.into(),
        weight_kind: 0,
        scales_per_expert: (gs.len() / experts) as i32,
    };
    let _current = gpu.device.make_current().expect("a context");
    // SAFETY: memory of the sizes that params.h gives, alive until the read below has waited.
    unsafe { bridge::pack_experts(&params, &launch(gpu, false)) }.expect("pack_experts");
    assert_eq!(words(&bad.read()), [0], "no NaN scale");
    weight.intact("packed", 0xFF);
    Packed { weight, scale }
}

/// `w13` or `w2` on `routes` sorted rows of `x` in one pass, bounded as if all were one expert's.
pub fn expert_params([weight, scale, x, out, offsets]: [&Banded; 5], swiglu: bool, routes: usize) -> ExpertGemmParams {
    ExpertGemmParams {
        weight: weight.ptr() as *const c_void,
        scale: scale.ptr() as *const f32,
        x: x.ptr() as *const c_void,
        out: out.ptr() as *mut c_void,
        expert_offsets: offsets.ptr() as *const i32,
        swiglu: swiglu.into(),
        splits: 1,
        route_bound: routes as i32,
        max_routes_per_expert: routes as i32,
        ..Default::default()
    }
}

/// One expert's `w13` (8192 rows) or `w2` (4096 rows) on `x` `[routes, 4096]` (natural columns), as BF16.
pub fn expert(gpu: &Gpu, matrix: &Packed, x: &[bf16], few: bool) -> Vec<f32> {
    let routes = x.len() / DIM;
    let swiglu = matrix.scale.read().len() == 256;
    let mut ordered = vec![bf16::ZERO; x.len()];
    for (from, to) in x.chunks_exact(DIM).zip(ordered.chunks_exact_mut(DIM)) {
        (0..DIM).for_each(|k| to[position(k)] = from[k]);
    }
    // All routes are the first expert's; the others have none.
    let offsets: Vec<i32> = (0..33).map(|e| if e == 0 { 0 } else { routes as i32 }).collect();
    let (x, offsets) = (put(gpu, &le(&ordered, bf16::to_le_bytes)), put(gpu, &le(&offsets, i32::to_le_bytes)));
    let out = Banded::new(&gpu.device, (routes * DIM * 2) as u64);
    let memory = [&matrix.weight, &matrix.scale, &x, &out, &offsets];
    let params = ExpertGemmParams { few: few.into(), ..expert_params(memory, swiglu, routes) };
    let _current = gpu.device.make_current().expect("a context");
    let run = if swiglu { bridge::w13 } else { bridge::w2 };
    // SAFETY: as in `pack`.
    unsafe { run(&params, &launch(gpu, false)) }.expect("the expert");
    let got: Vec<f32> = halves(&out.read()).iter().map(|v| v.to_f32()).collect();
    out.intact("the expert's output", 0xFF);
    if !swiglu {
        return got;
    }
    got.chunks_exact(DIM).flat_map(|row| (0..DIM).map(|k| row[position(k)])).collect()
}

/// Rows of zeros with a one at each of `columns`.
pub fn one_hot(columns: &[usize]) -> Vec<bf16> {
    let mut x = vec![bf16::ZERO; columns.len() * DIM];
    columns.iter().enumerate().for_each(|(r, k)| x[r * DIM + k] = bf16::ONE);
    x
}

pub const PROJECTION: (usize, usize) = (2304, 1024);

/// Random dense weights and their packed form.
pub fn pack_projection(gpu: &Gpu) -> (Vec<bf16>, Banded) {
    let (rows, k) = PROJECTION;
    let random = synthetic::Random::new(3, "dense");
    let source: Vec<bf16> = (0..rows * k).map(|i| bf16::from_f32(random.normal(i as u64))).collect();
    let src = put(gpu, &le(&source, bf16::to_le_bytes));
    let packed = Banded::new(&gpu.device, (rows * k * 2) as u64);
    let params = PackDenseParams {
        src: src.ptr() as *const c_void,
        dst: packed.ptr() as *mut c_void,
        rows: rows as i32,
        k: k as i32,
    };
    let _current = gpu.device.make_current().expect("a context");
    // SAFETY: as in `pack`.
    unsafe { bridge::pack_dense(&params, &launch(gpu, false)) }.expect("pack_dense");
    packed.intact("packed", 0xFF);
    (source, packed)
}

/// A launch of a projection.
#[derive(Clone, Copy)]
pub struct Projected {
    pub tokens: usize,
    /// Weight rows and tokens, as in `DenseParams`.
    pub tile: (i32, i32),
    /// What the launcher is told, which the tiled kernel's tiles hang on.
    pub sm_count: u32,
    pub splits: i32,
    pub out_f32: bool,
}

impl Projected {
    /// One token by the skinny kernel.
    pub fn new(gpu: &Gpu) -> Projected {
        Projected { tokens: 1, tile: (0, 8), sm_count: gpu.device.sm_count(), splits: 1, out_f32: true }
    }
}

/// A one in each token's input brings out a column of the packed matrix.
pub fn projection<'g>(gpu: &'g Gpu, (source, packed): &'g (Vec<bf16>, Banded), of: Projected) -> Case<'g> {
    let ((rows, k), tokens) = (PROJECTION, of.tokens);
    let column = move |t: usize| (t * 37 + 5) % k;
    let mut x = vec![bf16::ZERO; tokens * k];
    (0..tokens).for_each(|t| x[t * k + column(t)] = bf16::ONE);
    let x = put(gpu, &le(&x, bf16::to_le_bytes));
    let bytes = if of.out_f32 { 4 } else { 2 };
    let out = Banded::new(&gpu.device, (of.splits as usize * tokens * rows * bytes) as u64);
    let params = DenseParams {
        weight: packed.ptr() as *const c_void,
        x: x.ptr() as *const c_void,
        out: out.ptr() as *mut c_void,
        tokens: tokens as i32,
        rows: rows as i32,
        k: k as i32,
        x_stride: k as i32,
        out_stride: rows as i32,
        splits: of.splits,
        out_f32: of.out_f32 as i32,
        tile_n: of.tile.1,
        tile_rows: of.tile.0,
        ready: std::ptr::null(),
        ready_at: 1,
    };
    let launch = move |stream: Stream| {
        let launch = Launch { stream: stream.as_ptr(), sm_count: of.sm_count as i32, dependent: 0 };
        // SAFETY: as in `pack`; the check keeps the memory.
        unsafe { bridge::pooler(&params, &launch) }
    };
    Case::new(launch, move || {
        let (_x, bits) = (&x, out.read());
        let parts = if of.out_f32 {
            floats(&bits)
        } else {
            bits.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        };
        out.intact("out", 0xFF);
        for t in 0..tokens {
            for r in 0..rows {
                let got: f32 = (0..of.splits as usize).map(|s| parts[(s * tokens + t) * rows + r]).sum();
                assert_eq!(got, source[r * k + column(t)].to_f32(), "{:?}, token {t}, row {r}", of.tile);
            }
        }
    })
}

/// Experts' kernels: weights, the bound that the choice among them hangs on, and each expert's routes.
pub struct Experts {
    pub bf16: bool,
    pub few: bool,
    pub bound: i32,
    pub routes: &'static [usize],
}
/// Every instance, in every width that it has, with experts that have nothing to do.
pub const EXPERTS: [Experts; 7] = [
    Experts { bf16: false, few: true, bound: 8, routes: &[1, 0, 8, 3] },
    Experts { bf16: true, few: true, bound: 8, routes: &[1, 0, 8, 3] },
    Experts { bf16: false, few: false, bound: 32, routes: &[3, 9, 0, 17, 32] },
    Experts { bf16: false, few: false, bound: 256, routes: &[5, 17, 0, 33, 64, 70] },
    Experts { bf16: false, few: false, bound: 3072, routes: &[1, 9, 17, 25, 33, 41, 49, 57, 65, 81, 97, 113, 130, 0] },
    Experts { bf16: false, few: false, bound: 4000, routes: &[1, 33, 0, 65, 97, 129, 161, 193, 225, 260] },
    Experts { bf16: true, few: false, bound: 4000, routes: &[1, 33, 0, 65, 97, 129, 161, 193, 225, 260] },
];

/// A weight by row and column.
type Weight = Box<dyn Fn(usize, usize) -> f32>;

/// A matrix of the experts, the same for all but for their scales, packed; and what it stands for.
fn expert_matrix(gpu: &Gpu, bf16: bool, rows: usize, experts: usize) -> (Banded, Banded, Weight) {
    let random = synthetic::Random::new(4, "codes");
    let bytes = |n: usize| -> Vec<u8> { (0..n / 8).flat_map(|i| random.bits(i as u64).to_le_bytes()).collect() };
    // Any sign and fraction, few exponents.
    let (codes, block_scales, tile) = if bf16 {
        (bytes(2 * rows * DIM).chunks_exact(2).flat_map(|w| [w[0], w[1] & 0x81 | 0x3e]).collect(), vec![0; 16], 8192)
    } else {
        (bytes(rows * DIM / 2), bytes(rows * DIM / 16).iter().map(|b| 0x30 | b & 0x8f).collect(), 2304)
    };
    let (source, scales) = (put(gpu, &codes), put(gpu, &block_scales));
    let (global, bad) = (put(gpu, &1f32.to_le_bytes()), put(gpu, &[0; 4]));
    let weight: Weight = Box::new(move |row, column| {
        let at = row * DIM + column;
        if bf16 {
            return bf16::from_le_bytes([codes[2 * at], codes[2 * at + 1]]).to_f32();
        }
        e2m1_to_f32(codes[at / 2] >> (4 * (at % 2)) & 15) * e4m3_to_f32(block_scales[at / 16])
    });
    let one = Banded::new(&gpu.device, (rows / 64 * (DIM / 64) * tile) as u64);
    let swiglu = rows == 2 * DIM;
    let scale = Banded::new(&gpu.device, 32 * if swiglu { 8 } else { 4 });
    let params = PackExpertsParams {
        codes: source.ptr() as *const c_void,
        block_scale: if bf16 { std::ptr::null() } else { scales.ptr() as *const c_void },
        global_scale: if bf16 { std::ptr::null() } else { global.ptr() as *const f32 },
        dst: one.ptr() as *mut c_void,
        scale: scale.ptr() as *mut f32,
        bad_scale: bad.ptr() as *mut i32,
        experts: 1,
        rows: rows as i32,
        k: DIM as i32,
        swiglu: swiglu.into(),
        weight_kind: bf16.into(),
        scales_per_expert: 1,
    };
    let _current = gpu.device.make_current().expect("a context");
    // SAFETY: memory of the sizes that params.h gives, alive until the read below has waited.
    unsafe { bridge::pack_experts(&params, &launch(gpu, false)) }.expect("pack_experts");
    let packed = one.read();
    let all = Banded::new(&gpu.device, (experts * packed.len()) as u64);
    (0..experts).for_each(|e| all.write_at((e * packed.len()) as u64, &packed));
    let base = floats(&scale.read())[0];
    let of_experts: Vec<f32> = (0..experts).flat_map(|e| vec![base * factor(e); if swiglu { 2 } else { 1 }]).collect();
    scale.write_at(0, &le(&of_experts, f32::to_le_bytes));
    (all, scale, weight)
}

/// What tells an expert from the others.
fn factor(expert: usize) -> f32 {
    [1.0, 0.5, 0.25][expert % 3]
}

/// `w13` or `w2` of all routes, each a one in a column of its own: a column of the matrix, exactly; behind SwiGLU, nearly.
pub fn experts<'g>(gpu: &'g Gpu, of: &'static Experts, swiglu: bool) -> Case<'g> {
    let rows = if swiglu { 2 * DIM } else { DIM };
    let (weight, scale, natural) = expert_matrix(gpu, of.bf16, rows, of.routes.len());
    let expert_of: Vec<usize> = of.routes.iter().enumerate().flat_map(|(e, n)| vec![e; *n]).collect();
    let routes = expert_of.len();
    let column = |r: usize| (r * 389 + 17) % DIM;
    let mut x = vec![bf16::ZERO; routes * DIM];
    (0..routes).for_each(|r| x[r * DIM + position(column(r))] = bf16::ONE);
    let offsets: Vec<i32> = (0..33).map(|e| of.routes.iter().take(e).sum::<usize>() as i32).collect();
    let (x, offsets) = (put(gpu, &le(&x, bf16::to_le_bytes)), put(gpu, &le(&offsets, i32::to_le_bytes)));
    let splits = if of.few && !swiglu { 2 } else { 1 };
    let out = Banded::new(&gpu.device, (routes * DIM * if splits > 1 { 8 } else { 2 }) as u64);
    let params = ExpertGemmParams {
        weight_kind: of.bf16.into(),
        splits,
        few: of.few.into(),
        max_routes_per_expert: of.bound,
        ..expert_params([&weight, &scale, &x, &out, &offsets], swiglu, routes)
    };
    let launches = move |stream| {
        let run = if swiglu { bridge::w13 } else { bridge::w2 };
        // SAFETY: as above; the check keeps the memory.
        unsafe { run(&params, &on_stream(gpu, stream)) }
    };
    Case::new(launches, move || {
        let (_kept, bytes) = ((&weight, &scale, &x, &offsets), out.read());
        out.intact("the experts' output", 0xFF);
        let got: Vec<f32> = if splits > 1 {
            let (first, second) = bytes.split_at(bytes.len() / 2);
            floats(first).iter().zip(floats(second)).map(|(a, b)| a + b).collect()
        } else {
            halves(&bytes).iter().map(|v| v.to_f32()).collect()
        };
        for (r, &e) in expert_of.iter().enumerate() {
            let weight = |n: usize| natural(n, column(r)) * factor(e);
            for n in 0..DIM {
                let what = || format!("bound {}, BF16 {}, route {r} of expert {e}, row {n}", of.bound, of.bf16);
                if swiglu {
                    let (gate, up, got) = (weight(n), weight(DIM + n), got[r * DIM + position(n)]);
                    let want = gate / (1.0 + (-gate).exp()) * up;
                    assert!((got - want).abs() <= want.abs() / 128.0, "{}: {got} for {want}", what());
                } else {
                    assert_eq!(got[r * DIM + n], weight(n), "{}", what());
                }
            }
        }
    })
}
