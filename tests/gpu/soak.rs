//! Many replays: over inputs that change on the GPU, against eager steps without dependent launch, and for a long time
//! without a leak.

use crate::capture::{captured, shorter};
use crate::harness::{asked, child, gpu, is_child, spec, step_key, DeviceStep, Gpu};
use crate::memory::{Banded, Differ, Scratch};
use cudarc::driver::sys;
use muse_spark_layer::backend::cuda::graph::OwnedStream;
use muse_spark_layer::synthetic::SyntheticStep;
use muse_spark_layer::{LayerKind, PlanKey, Stream};
use rstest::rstest;

/// Copies, queued on a stream.
fn copy(to: u64, from: u64, bytes: u64, stream: Stream) {
    // SAFETY: both hold `bytes` bytes, which the test keeps until the stream is done.
    let queued = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream.as_ptr().cast()) };
    assert_eq!(queued, sys::CUresult::CUDA_SUCCESS);
}

/// The inputs and caches of several steps of one shape in device memory, and what each gives.
struct Variants {
    /// By tensor, by step: what changes between steps (the offsets do not), then keys and values.
    inputs: Vec<(&'static str, Vec<Banded>)>,
    /// By step: hidden, stream, topk_ids.
    results: Vec<Vec<Banded>>,
}

const CHANGED: [&str; 9] = [
    "attn_input",
    "stream",
    "positions",
    "cache_loc",
    "cache_seqlens",
    "page_table",
    "k_scale",
    "v_scale",
    "local_start",
];
const CACHES: [&str; 2] = ["k_cache", "v_cache"];

impl Variants {
    /// Runs each step eagerly, without dependent launch.
    fn new(gpu: &Gpu, steps: &[SyntheticStep], kind: LayerKind, on: &DeviceStep, scratch: &mut Scratch) -> Variants {
        let plan = gpu.plan(PlanKey { dependent_launch: false, ..step_key(&steps[0], kind) });
        let mut inputs: Vec<(&'static str, Vec<Banded>)> =
            CHANGED.into_iter().chain(CACHES).map(|name| (name, Vec::new())).collect();
        let mut results = Vec::new();
        for step in steps {
            let other = DeviceStep::new(gpu, step);
            inputs.iter_mut().for_each(|(name, list)| list.push(Banded::of(&gpu.device, &memory(&other, name).read())));
            on.overwrite(step);
            scratch.poison();
            gpu.forward(&plan, scratch.workspace(), on, Stream::LEGACY);
            results.push(on.outputs().iter().map(|bytes| Banded::of(&gpu.device, bytes)).collect());
        }
        Variants { inputs, results }
    }

    /// Queues the copies that make `on` the step `i`.
    fn set(&self, i: usize, on: &DeviceStep, stream: Stream) {
        for (name, list) in &self.inputs {
            let to = memory(on, name);
            copy(to.ptr(), list[i].ptr(), to.bytes(), stream);
        }
    }
}

fn memory<'a>(on: &'a DeviceStep, name: &str) -> &'a Banded {
    match CACHES.iter().position(|cache| *cache == name) {
        Some(half) => on.cache(half),
        None => on.memory(name),
    }
}

/// 10,000 replays over inputs that change on the GPU, compared on the GPU with eager steps without dependent launch: a
/// decode, a verify and an uneven ragged batch.
#[rstest]
#[case("decode-8", LayerKind::Full)]
#[case("verify-3", LayerKind::Sliding)]
#[case("ragged", LayerKind::Full)]
fn ten_thousand_replays_are_eager_bits(#[case] name: &str, #[case] kind: LayerKind) {
    let Some(gpu) = gpu("soak::ten_thousand_replays_are_eager_bits") else { return };
    let spec = spec(name, kind);
    let steps: Vec<SyntheticStep> =
        (0..5).map(|i| if i % 2 == 0 { gpu.step(&spec, 120 + i) } else { shorter(&gpu, &spec, 120 + i) }).collect();
    let on = DeviceStep::new(&gpu, &steps[0]);
    let plan = gpu.plan(step_key(&steps[0], kind));
    let mut scratch = Scratch::new(&gpu, &plan);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let variants = Variants::new(&gpu, &steps, kind, &on, &mut scratch);
    let graph = captured(&gpu, &own, plan, &scratch, &on);
    let differ = Differ::new(&gpu.device);
    let _current = gpu.device.make_current().expect("a context");
    for replay in 0..10_000 {
        let i = (replay * 3 + replay / 7) % steps.len();
        variants.set(i, &on, own.stream());
        own.replay(&graph).expect("replay");
        on.output_memory().iter().zip(&variants.results[i]).for_each(|(a, b)| differ.queue(a, b, own.stream()));
        if replay % 100 == 99 {
            own.synchronize().expect("the replays");
        }
    }
    assert_eq!(differ.count(), 0, "words that differ from the eager steps'");
    // The comparison sees one bit.
    let byte = variants.results[0][1].read_at(0, 4).iter().map(|b| b ^ 1).collect::<Vec<u8>>();
    on.output_memory()[1].write_at(0, &variants.results[0][1].read());
    on.output_memory()[1].write_at(0, &byte);
    differ.queue(&on.output_memory()[1], &variants.results[0][1], own.stream());
    assert_eq!(differ.count(), 1);
    on.intact();
    scratch.intact();
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number of pages") * 4096
}

/// 100,000 replays of graphs of several batches, at changing lengths, with graphs made and dropped on the way: the same
/// bits at the end, no memory of host or device lost.
#[test]
fn a_hundred_thousand_replays_leak_nothing() {
    let test = "soak::a_hundred_thousand_replays_leak_nothing";
    if !asked(test, "MUSE_SPARK_LAYER_SOAK") {
        return;
    }
    // In a process of its own, whose memory nobody else takes; the GPU is kept for it.
    let Some(_gpu) = gpu(test) else { return };
    child("soak::child_replays", &[]);
}

#[test]
#[ignore = "run as a child by a_hundred_thousand_replays_leak_nothing"]
fn child_replays() {
    if !is_child() {
        return;
    }
    let gpu = gpu("soak::child_replays").expect("a GPU");
    let kind = LayerKind::Sliding;
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let names = ["decode-1", "decode-3", "verify-1", "decode-9"];
    let specs = names.map(|name| spec(name, kind));
    let steps: Vec<SyntheticStep> = specs.iter().map(|s| gpu.step(s, 130)).collect();
    let short: Vec<SyntheticStep> = specs.iter().map(|s| shorter(&gpu, s, 131)).collect();
    let on: Vec<DeviceStep> = steps.iter().map(|s| DeviceStep::new(&gpu, s)).collect();
    let scratches: Vec<Scratch> = steps.iter().map(|s| Scratch::new(&gpu, &gpu.plan(step_key(s, kind)))).collect();
    let round = |replays: usize| -> Vec<Vec<Vec<u8>>> {
        let mut results = Vec::new();
        for i in 0..names.len() {
            let graph = captured(&gpu, &own, gpu.plan(step_key(&steps[i], kind)), &scratches[i], &on[i]);
            for step in [&short[i], &steps[i]] {
                on[i].overwrite(step);
                for _ in 0..replays {
                    own.replay(&graph).expect("replay");
                }
                own.synchronize().expect("the replays");
                results.push(on[i].results());
            }
        }
        results
    };
    let first = round(10);
    round(10);
    let (host, device) = (resident(), gpu.device.memory().expect("memory").0);
    let rounds = 25;
    for _ in 0..rounds {
        assert!(round(100_000 / (rounds * 2 * names.len())) == first, "the same input gives the same bits");
    }
    assert!(round(10) == first);
    let grown = resident().saturating_sub(host);
    assert!(grown < 8 << 20, "host memory grew by {grown} bytes");
    let lost = device.saturating_sub(gpu.device.memory().expect("memory").0);
    assert!(lost < 8 << 20, "device memory shrank by {lost} bytes");
}
