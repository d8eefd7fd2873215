//! What the sanitizers run (tests/sanitize.sh): small steps, and single operations in every instance of their kernels that
//! no small step takes. Few launches, on memory of exactly its size. The last test says that no kernel is left out.

use crate::harness::{assert_rows, floats, gpu, halves, step_key, DeviceStep, Gpu};
use crate::memory::Banded;
use crate::single::{experts, le, on_stream, pack_projection, projection, put, Case, Projected, EXPERTS};
use cudarc::driver::sys;
use half::bf16;
use muse_spark_layer::backend::cuda::bridge;
use muse_spark_layer::backend::cuda::graph::OwnedStream;
use muse_spark_layer::backend::cuda::params::*;
use muse_spark_layer::backend::cuda::tiles::WIDE;
use muse_spark_layer::plan::{Launches, Plan};
use muse_spark_layer::synthetic::{self, StepSpec};
use muse_spark_layer::{LayerKind, PlanKey};
use rstest::rstest;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{c_void, CStr};
use std::rc::Rc;

/// The names of the kernels that a case launches, and of all kernels that are compiled into the same modules.
fn kernels(gpu: &Gpu, case: &Case) -> [BTreeSet<String>; 2] {
    let _current = gpu.device.make_current().expect("a context");
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let (stream, mode) = (own.stream(), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    let done = |result: sys::CUresult| assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    let mut sets = [BTreeSet::new(), BTreeSet::new()];
    let mut graph = std::ptr::null_mut();
    // SAFETY: a live stream and a graph that is destroyed once; the driver writes handles, as many elements as it is told
    // there is room for, and names that live as long as their modules.
    unsafe {
        done(sys::cuStreamBeginCapture_v2(stream.as_ptr().cast(), mode));
        (case.launch)(stream).expect("the launch");
        done(sys::cuStreamEndCapture(stream.as_ptr().cast(), &mut graph));
        let mut count = 0;
        done(sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
        let mut nodes = vec![std::ptr::null_mut(); count];
        done(sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
        let name = |function| {
            let mut name = std::ptr::null();
            done(sys::cuFuncGetName(&mut name, function));
            CStr::from_ptr(name).to_string_lossy().into_owned()
        };
        for node in nodes {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            done(sys::cuGraphNodeGetType(node, &mut kind));
            if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
                continue;
            }
            let mut params = std::mem::zeroed::<sys::CUDA_KERNEL_NODE_PARAMS>();
            done(sys::cuGraphKernelNodeGetParams_v2(node, &mut params));
            sets[0].insert(name(params.func));
            let (mut module, mut count) = (std::ptr::null_mut(), 0);
            done(sys::cuFuncGetModule(&mut module, params.func));
            done(sys::cuModuleGetFunctionCount(&mut count, module));
            let mut functions = vec![std::ptr::null_mut(); count as usize];
            done(sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module));
            sets[1].extend(functions.into_iter().map(name));
        }
        done(sys::cuGraphDestroy(graph));
    }
    sets
}

/// A small step: every output is written, counters are left zero. Nothing is poisoned, so that initcheck sees what a kernel
/// reads and none wrote.
fn step<'g>(gpu: &'g Gpu, name: &str, dependent_launch: bool) -> Case<'g> {
    let (batch, q_len, ctx, page_size) = match name {
        "decode" => (8, 1, 70, 1),
        "verify" => (3, 8, 100, 16),
        "prefill" => (1, 65, 30, 64),
        // One CTA or cluster for the token; as many splits as there can be.
        "one-long" => (1, 1, 8200, 1),
        // The other tile widths of the skinny projections, and of the clusters of the small kernels.
        "decode-13" => (13, 1, 40, 1),
        "decode-33" => (33, 1, 20, 16),
        "decode-70" => (70, 1, 20, 1),
        "decode-130" => (130, 1, 20, 256),
        // More keys a split than the few-key kernel takes.
        "verify-long" => (20, 8, 2100, 64),
        // Neither a verify block nor tiled.
        "block-3" => (5, 3, 50, 1),
        // Tiled attention with a join, tiled projections; lists in launches of their own; rows as a stream.
        "prefill-333" => (2, 333, 500, 16),
        "prefill-1100" => (1, 1100, 0, 1),
        "prefill-2100" => (1, 2100, 100, 1),
        other => panic!("no small step called {other}"),
    };
    let kind = if batch == 1 && q_len == 1 { LayerKind::Full } else { LayerKind::Sliding };
    let step = gpu.step(&StepSpec { page_size, ..StepSpec::new(batch, q_len, ctx, kind) }, 71);
    let plan = gpu.plan(PlanKey { dependent_launch, ..step_key(&step, kind) });
    planned(gpu, Rc::new(DeviceStep::new(gpu, &step)), plan)
}

fn planned<'g>(gpu: &'g Gpu, on: Rc<DeviceStep>, plan: Plan) -> Case<'g> {
    let workspace = Rc::new(RefCell::new(gpu.cuda.workspace(&plan).expect("a workspace")));
    let (own, scratch) = (on.clone(), workspace.clone());
    let launch = move |stream| gpu.cuda.forward(&plan, &mut scratch.borrow_mut(), &own.input, &own.output, stream);
    Case::new(launch, move || {
        for (bytes, what) in on.results().iter().zip(["hidden", "stream", "topk_ids"]) {
            assert!(bytes.chunks_exact(4).all(|word| word != [0xFF; 4]), "{what} has words that nothing wrote");
        }
        let control = workspace.borrow().control(&gpu.device).expect("the control block");
        assert!(control.iter().all(|w| *w == 0), "counters left zero");
    })
}

/// Launches that no plan chooses and a caller may: requests, tokens of each, context, what is changed.
type Change = fn(&mut Launches);
const CHANGED: [(&str, usize, usize, usize, Change); 9] = [
    ("one-token", 1, 1, 20, |_| ()),
    ("boundary-apart", 1, 1, 20, |l| l.router.boundary = false),
    ("passes-of-8", 8, 1, 20, |l| (l.experts.route_bound, l.experts.passes) = (24, 3)),
    ("passes-of-40", 40, 1, 20, |l| (l.experts.route_bound, l.experts.passes) = (100, 4)),
    ("few-of-40", 40, 1, 20, |l| (l.experts.few, l.experts.w2_splits) = (true, 2)),
    ("few-of-130", 130, 1, 20, |l| (l.experts.few, l.experts.w2_splits) = (true, 2)),
    ("append-apart", 3, 1, 200, |l| (l.attention.append, l.attention.splits) = (false, 3)),
    ("splits-20", 3, 1, 3000, |l| l.attention.splits = 20),
    ("splits-300", 2, 1, 3000, |l| l.attention.splits = 300),
];

/// A step with other launches than its plan's: within roundings of the same.
fn changed(gpu: &Gpu, case: usize) -> Case<'_> {
    let (_, batch, q_len, ctx, change) = CHANGED[case];
    let step = gpu.step(&StepSpec::new(batch, q_len, ctx, LayerKind::Full), 72);
    let (on, plan) = (Rc::new(DeviceStep::new(gpu, &step)), gpu.plan(step_key(&step, LayerKind::Full)));
    let mut launches = plan.launches.clone();
    change(&mut launches);
    let other = Plan::with_launches(plan.key.clone(), launches, plan.sm_count);
    planned(gpu, on.clone(), plan).run(gpu);
    let want = floats(&on.outputs()[1]);
    on.poison_outputs();
    let Case { launch, check } = planned(gpu, on.clone(), other);
    Case::new(launch, move || {
        check();
        assert_rows("stream", &floats(&on.outputs()[1]), &want, gpu.config.hidden, 3e-3);
    })
}

/// Launches of the tiled projection: tokens, splits, FP32 output, multiprocessors, on which its choice of a tile hangs.
/// Nearly all CTAs walk several tiles, the last of which ends past the tokens.
const TILED: [(usize, i32, bool, u32); 16] = [
    (133, 1, false, 2), // staged
    (133, 1, false, 4),
    (133, 1, false, 7),
    (133, 1, false, 9),
    (133, 1, false, 36),
    (133, 1, false, 72),
    (133, 1, true, 2),
    (133, 1, true, 3),
    (133, 1, true, 4),
    (133, 1, true, 12),
    (133, 1, true, 32),
    (133, 3, true, 22),
    (300, 1, false, 10),
    (300, 1, false, 54),
    (300, 1, true, 54),
    (300, 1, true, 108),
];

/// Every instance of the projections, with a tail.
fn projections(gpu: &Gpu) -> Vec<Projected> {
    let one = Projected::new(gpu);
    let skinny = [(5, 8), (13, 16), (27, 32), (50, 64), (90, 96), (122, 128)];
    let skinny = skinny.into_iter().flat_map(|(tokens, width)| {
        [(1, false), (3, true)].map(|(splits, out_f32)| Projected { tokens, tile: (0, width), splits, out_f32, ..one })
    });
    let wide = WIDE.into_iter().flat_map(|(rows, width)| {
        // A few multiprocessors: several tiles each.
        [(1, false, 7), (2, true, 11)].map(|(splits, out_f32, sm_count)| Projected {
            tokens: width as usize + 5,
            tile: (rows as i32, width as i32),
            sm_count,
            splits,
            out_f32,
        })
    });
    let tiled =
        TILED.map(|(tokens, splits, out_f32, sm_count)| Projected { tokens, tile: (0, 0), sm_count, splits, out_f32 });
    skinny.chain(wide).chain(tiled).collect()
}

/// The sum of the sliced unpooler's splits: small integers.
fn slice_sum(gpu: &Gpu) -> Case<'_> {
    let (tokens, splits, columns) = (3, 11, 1024);
    let value = move |i: usize| ((i * 7919) % 509) as f32 - 254.0;
    let parts: Vec<f32> = (0..splits * tokens * columns).map(value).collect();
    let (parts, out) =
        (put(gpu, &le(&parts, f32::to_le_bytes)), Banded::new(&gpu.device, (4 * tokens * columns) as u64));
    let params = SliceSumParams {
        parts: parts.ptr() as *const f32,
        out: out.ptr() as *mut f32,
        tokens: tokens as i32,
        splits: splits as i32,
        columns: columns as i32,
    };
    // SAFETY: as above.
    let launches = move |stream| unsafe { bridge::slice_sum(&params, &on_stream(gpu, stream)) };
    Case::new(launches, move || {
        let _kept = &parts;
        out.intact("the sum", 0xFF);
        for (i, got) in floats(&out.read()).into_iter().enumerate() {
            assert_eq!(got, (0..splits).map(|s| value(s * tokens * columns + i)).sum::<f32>(), "element {i}");
        }
    })
}

/// A rank of two whose other has been there already: its packets lie in the inbox, so nothing waits.
fn peers(gpu: &Gpu, gather: bool) -> Case<'_> {
    // More than a pass of the grid's threads, and a part of another.
    let (packets, call) = (64 * 256 + 100, 1u32);
    let (elements, capacity) = (packets * if gather { 2 } else { 4 }, packets + 3);
    // FP32 words or BF16 pairs, as the kernel moves them.
    let word = move |rank: usize, i: usize| ((i % 64) as u32 + 0x80 * rank as u32) * 0x0001_0001 + 0x3f80_3f80;
    let words = |rank: usize| (0..2 * packets).flat_map(move |i| word(rank, i).to_le_bytes());
    let own: Vec<u8> = if gather { words(0).chain(vec![0xFF; 8 * packets]).collect() } else { words(0).collect() };
    let packet = |i: usize| [word(1, 2 * i), call, word(1, 2 * i + 1), call].into_iter().flat_map(u32::to_le_bytes);
    let inboxes = [0, 1].map(|_| Banded::new(&gpu.device, (2 * 2 * capacity * 16) as u64));
    // Calls that are odd, from rank 1.
    inboxes[0].write_at((3 * capacity * 16) as u64, &(0..packets).flat_map(packet).collect::<Vec<u8>>());
    let data = put(gpu, &own);
    let (calls, lost) = (put(gpu, &[0; 256]), put(gpu, &[0; 4]));
    let mut params = PeerParams {
        data: data.ptr() as *mut c_void,
        inboxes: [std::ptr::null_mut(); 8],
        calls: calls.ptr() as *mut u32,
        lost: lost.ptr() as *mut u32,
        timeout_ns: 1_000_000_000,
        elements: elements as i32,
        capacity: capacity as i32,
        rank: 0,
        ranks: 2,
    };
    (0..2).for_each(|rank| params.inboxes[rank] = inboxes[rank].ptr() as *mut u32);
    let launches = move |stream| {
        let run = if gather { bridge::peer_gather } else { bridge::peer_sum };
        // SAFETY: as above.
        unsafe { run(&params, &on_stream(gpu, stream)) }
    };
    Case::new(launches, move || {
        assert_eq!(lost.read(), [0; 4], "nobody is waited for");
        data.intact("data", 0xFF);
        inboxes.iter().for_each(|inbox| inbox.intact("an inbox", 0xFF));
        let sent = inboxes[1].read_at((2 * capacity * 16) as u64, (packets * 16) as u64);
        let want: Vec<u8> = (0..packets)
            .flat_map(|i| [word(0, 2 * i), call, word(0, 2 * i + 1), call])
            .flat_map(u32::to_le_bytes)
            .collect();
        assert!(sent == want, "what the other rank is sent");
        let got = data.read();
        if gather {
            let want: Vec<u8> = [0, 1]
                .into_iter()
                .flat_map(|r| (0..2 * packets).map(move |i| word(r, i)))
                .flat_map(u32::to_le_bytes)
                .collect();
            assert!(got == want, "both slices");
        } else {
            let part =
                |rank: usize| (0..2 * packets).flat_map(move |i| word(rank, i).to_le_bytes()).collect::<Vec<u8>>();
            for ((got, a), b) in halves(&got).iter().zip(halves(&part(0))).zip(halves(&part(1))) {
                assert_eq!(*got, bf16::from_f32(a.to_f32() + b.to_f32()));
            }
        }
        assert!(calls.read().chunks_exact(4).all(|n| n == call.to_le_bytes()), "every CTA counts the call");
    })
}

/// The norm and gate of what FlashAttention-3 gives, against the formula.
fn joined(gpu: &Gpu) -> Case<'_> {
    let tokens = 5usize;
    let random = synthetic::Random::new(5, "heads");
    let x: Vec<bf16> = (0..tokens * 1024).map(|i| bf16::from_f32(random.normal(i as u64))).collect();
    let gate: Vec<f32> = (0..tokens * 1024).map(|i| random.normal((1 << 20) + i as u64)).collect();
    let (heads, gates, scale) =
        (put(gpu, &le(&x, bf16::to_le_bytes)), put(gpu, &le(&gate, f32::to_le_bytes)), put(gpu, &1f32.to_le_bytes()));
    let (out, core) = (Banded::new(&gpu.device, (2 * x.len()) as u64), Banded::new(&gpu.device, (4 * x.len()) as u64));
    let params = OutNormGateParams {
        joined: heads.ptr() as *const c_void,
        gate: gates.ptr() as *const f32,
        v_scale: scale.ptr() as *const f32,
        out: out.ptr() as *mut c_void,
        attn_core: core.ptr() as *mut f32,
        tokens: tokens as i32,
        splits: 1,
        ..Default::default()
    };
    // SAFETY: as above.
    let launches = move |stream| unsafe { bridge::out_norm_gate(&params, &on_stream(gpu, stream)) };
    Case::new(launches, move || {
        let _kept = (&heads, &gates, &scale);
        out.intact("out", 0xFF);
        core.intact("the tap", 0xFF);
        let values: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
        assert_eq!(floats(&core.read()), values);
        let got: Vec<f32> = halves(&out.read()).iter().map(|v| v.to_f32()).collect();
        let want: Vec<f32> = values
            .chunks_exact(64)
            .zip(gate.chunks_exact(64))
            .flat_map(|(head, gate)| {
                let norm = (head.iter().map(|v| v * v).sum::<f32>() / 64.0 + 1e-5).sqrt();
                head.iter().zip(gate).map(move |(v, g)| v / norm / (1.0 + (-g).exp())).collect::<Vec<_>>()
            })
            .collect();
        assert_rows("heads", &got, &want, 64, 4e-3);
    })
}

/// What packs weights: dense tiles and BF16 experts element by element; of the others, that all is written (the exact
/// tests have the rest).
fn packing(gpu: &Gpu) -> Case<'_> {
    let (rows, k) = (128usize, 192usize);
    let words: Vec<u16> = (0..rows * k).map(|i| i as u16).collect();
    let source = put(gpu, &le(&words, u16::to_le_bytes));
    let [dense, bf16s] = [0, 1].map(|_| Banded::new(&gpu.device, (2 * rows * k) as u64));
    let pack_dense = PackDenseParams {
        src: source.ptr() as *const c_void,
        dst: dense.ptr() as *mut c_void,
        rows: rows as i32,
        k: k as i32,
    };
    let (codes, block_scales) = (put(gpu, &vec![0x2a; rows * k / 2]), put(gpu, &vec![0x38; rows * k / 16]));
    let nvfp4 = Banded::new(&gpu.device, (rows * k / 4096 * 2304) as u64);
    let [scale, other_scale] = [0, 1].map(|_| Banded::new(&gpu.device, 4));
    let (global, bad) = (put(gpu, &0.5f32.to_le_bytes()), put(gpu, &[0; 4]));
    let experts = PackExpertsParams {
        codes: codes.ptr() as *const c_void,
        block_scale: block_scales.ptr() as *const c_void,
        global_scale: global.ptr() as *const f32,
        dst: nvfp4.ptr() as *mut c_void,
        scale: scale.ptr() as *mut f32,
        bad_scale: bad.ptr() as *mut i32,
        experts: 1,
        rows: rows as i32,
        k: k as i32,
        swiglu: 0,
        weight_kind: 0,
        scales_per_expert: 1,
    };
    let bf16_experts = PackExpertsParams {
        codes: source.ptr() as *const c_void,
        block_scale: std::ptr::null(),
        global_scale: std::ptr::null(),
        dst: bf16s.ptr() as *mut c_void,
        scale: other_scale.ptr() as *mut f32,
        weight_kind: 1,
        ..experts
    };
    let rows_of_router = put(gpu, &le(&vec![1f32; 256 * 8192], f32::to_le_bytes));
    let norm = put(gpu, &le(&vec![1f32; 8192], f32::to_le_bytes));
    // Two halves of FP16, and a scale an expert.
    let router = Banded::new(&gpu.device, 256 * 8192 * 4 + 256 * 4);
    let pack_router = PackRouterParams {
        src: rows_of_router.ptr() as *const f32,
        norm_weight: norm.ptr() as *const f32,
        dst: router.ptr() as *mut c_void,
    };
    let launches = move |stream| {
        let at = on_stream(gpu, stream);
        // SAFETY: as above.
        unsafe {
            bridge::pack_dense(&pack_dense, &at)?;
            bridge::pack_experts(&experts, &at)?;
            bridge::pack_experts(&bf16_experts, &at)?;
            bridge::pack_router(&pack_router, &at)
        }
    };
    Case::new(launches, move || {
        let _kept = (&source, &codes, &block_scales, &global, &bad, &rows_of_router, &norm);
        for (memory, what) in [(&dense, "tiles"), (&bf16s, "BF16 experts"), (&nvfp4, "experts"), (&router, "router")] {
            memory.intact(what, 0xFF);
        }
        let pairs = |memory: &Banded| -> Vec<u16> {
            memory.read().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
        };
        let got = pairs(&dense);
        for (i, word) in words.iter().enumerate() {
            let (row, column) = (i / k, i % k);
            let (r, c) = (row % 64, column % 64);
            let tile = row / 64 * (k / 64) + column / 64;
            assert_eq!(
                got[tile * 4096 + r * 64 + ((c / 8) ^ (r % 8)) * 8 + c % 8],
                *word,
                "row {row}, column {column}"
            );
        }
        let mut permuted = pairs(&bf16s);
        permuted.sort_unstable();
        assert!(permuted == words, "every BF16 weight once");
        assert!(nvfp4.read().chunks_exact(4).all(|word| word != [0xFF; 4]), "every code and scale");
        assert_eq!([floats(&scale.read())[0], floats(&other_scale.read())[0]], [128.0, 1.0]);
        assert!(router.read().chunks_exact(4).all(|word| word != [0xFF; 4]), "every weight and scale of the router");
    })
}

macro_rules! steps {
    ($names:tt: $($(#[$doc:meta])* fn $test:ident(dependent_launch: $dependent:literal))*) => {
        const STEPS: [&str; 13] = steps!(list $names);
        $(
            $(#[$doc])*
            #[rstest]
            fn $test(#[values $names] name: &str) {
                let Some(gpu) = gpu(concat!("sanitized::", stringify!($test))) else { return };
                step(&gpu, name, $dependent).run(&gpu);
            }
        )*
    };
    (list ($($name:literal),*)) => { [$($name),*] };
}

steps! {
    ("decode", "verify", "prefill", "one-long", "decode-13", "decode-33", "decode-70", "decode-130", "verify-long",
     "block-3", "prefill-333", "prefill-1100", "prefill-2100"):
    fn step_dependent(dependent_launch: true)
    /// Without dependent launch: racecheck takes a kernel that starts before its predecessor ended for a race.
    fn step_plain(dependent_launch: false)
}

#[rstest]
fn direct_changed(#[values(0, 1, 2, 3, 4, 5, 6, 7, 8)] case: usize) {
    let Some(gpu) = gpu("sanitized::direct_changed") else { return };
    changed(&gpu, case).run(&gpu);
}

#[test]
fn direct_projections() {
    let Some(gpu) = gpu("sanitized::direct_projections") else { return };
    let packed = pack_projection(&gpu);
    projections(&gpu).into_iter().for_each(|of| projection(&gpu, &packed, of).run(&gpu));
}

#[rstest]
fn direct_experts(#[values(0, 1, 2, 3, 4, 5, 6)] case: usize, #[values(false, true)] swiglu: bool) {
    let Some(gpu) = gpu("sanitized::direct_experts") else { return };
    experts(&gpu, &EXPERTS[case], swiglu).run(&gpu);
}

#[test]
fn direct_others() {
    let Some(gpu) = gpu("sanitized::direct_others") else { return };
    OTHERS.into_iter().for_each(|case| case(&gpu).run(&gpu));
}

type Maker = for<'g> fn(&'g Gpu) -> Case<'g>;

const OTHERS: [Maker; 5] = [slice_sum, |gpu| peers(gpu, false), |gpu| peers(gpu, true), joined, packing];

/// The cases above launch every kernel of their modules: a new instance that none of them reaches fails here.
#[test]
fn every_kernel_is_reached() {
    let Some(gpu) = gpu("sanitized::every_kernel_is_reached") else { return };
    let [mut launched, mut compiled] = [BTreeSet::new(), BTreeSet::new()];
    let mut add = |case: Case| {
        let [these, all] = kernels(&gpu, &case);
        assert!(!these.is_empty());
        launched.extend(these);
        compiled.extend(all);
    };
    STEPS.iter().for_each(|name| add(step(&gpu, name, true)));
    (0..CHANGED.len()).for_each(|case| add(changed(&gpu, case)));
    let packed = pack_projection(&gpu);
    projections(&gpu).into_iter().for_each(|of| add(projection(&gpu, &packed, of)));
    for of in &EXPERTS {
        [false, true].into_iter().for_each(|swiglu| add(experts(&gpu, of, swiglu)));
    }
    OTHERS.into_iter().for_each(|case| add(case(&gpu)));
    let missed: Vec<_> = compiled.difference(&launched).collect();
    assert!(missed.is_empty(), "of {} kernels no case launches {}: {missed:#?}", compiled.len(), missed.len());
}
