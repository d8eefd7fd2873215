//! Capture and replay: the first call is captured, replays on changed inputs with poisoned scratch give the
//! bits of eager calls with dependent launch off.

use crate::harness::{gpu, spec, step_key, DeviceStep, Gpu};
use crate::memory::Scratch;
use crate::steps::tokens;
use muse_spark_layer::backend::cuda::graph::{Graph, OwnedStream};
use muse_spark_layer::synthetic::{StepSpec, SyntheticStep};
use muse_spark_layer::{LayerKind, Plan, PlanKey, Stream};
use rstest::rstest;

/// Captures one step, in the strictest mode, on a handle of the scratch that does not outlive the capture.
pub fn captured<'a>(gpu: &'a Gpu, own: &OwnedStream, plan: Plan, scratch: &Scratch, on: &'a DeviceStep) -> Graph<'a> {
    let mut workspace = scratch.another(gpu);
    own.capture(move |stream| gpu.cuda.forward(&plan, &mut workspace, &on.input, &on.output, stream)).expect("a graph")
}

pub fn replay(own: &OwnedStream, graph: &Graph) {
    own.replay(graph).expect("replay");
    own.synchronize().expect("the replayed step");
}

/// The same shape with other lengths: requests shortened to a third, everything else of another seed.
pub fn shorter(gpu: &Gpu, spec: &StepSpec, seed: u64) -> SyntheticStep {
    let mut step = gpu.step(spec, seed);
    let page = step.cache.page_size as i64;
    for b in 0..spec.q_lens.len() {
        let own = tokens(&step, b);
        let q_len = own.len() as i32;
        let seq = (step.input.cache_seqlens[b] - q_len) / 3;
        step.input.cache_seqlens[b] = seq + q_len;
        for (i, t) in own.enumerate() {
            let position = seq as i64 + i as i64;
            step.input.positions[t] = position;
            let id = step.input.page_table[b * step.input.table_width + (position / page) as usize];
            step.input.cache_loc[t] = id as i64 * page + position % page;
        }
    }
    step.input.local_start = (seed as i32 * 32) % 256;
    step.cache.k_scale *= 1.7;
    step.cache.v_scale *= 0.6;
    step
}

/// What an eager step without dependent launch gives.
fn eager(gpu: &Gpu, key: &PlanKey, scratch: &mut Scratch, on: &DeviceStep, stream: Stream) -> Vec<Vec<u8>> {
    let plan = gpu.plan(PlanKey { dependent_launch: false, ..key.clone() });
    gpu.forward(&plan, scratch.workspace(), on, stream);
    gpu.device.synchronize().expect("eager");
    on.results()
}

#[rstest]
fn replays_give_eager_bits(
    #[values("decode-1", "decode-8", "decode-33", "decode-130", "verify-1", "verify-17", "prefill-333", "ragged")] name: &str,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("capture::replays_give_eager_bits") else { return };
    let spec = spec(name, kind);
    let first = gpu.step(&spec, 50);
    let on = DeviceStep::new(&gpu, &first);
    let key = step_key(&first, kind);
    let plan = gpu.plan(key.clone());
    let mut scratch = Scratch::new(&gpu, &plan);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let graph = captured(&gpu, &own, plan, &scratch, &on);
    for seed in 51..54 {
        let step = if seed % 2 == 1 { gpu.step(&spec, seed) } else { shorter(&gpu, &spec, seed) };
        on.overwrite(&step);
        scratch.poison();
        let want = eager(&gpu, &key, &mut scratch, &on, own.stream());
        for again in 0..4 {
            on.overwrite(&step);
            if again % 2 == 0 {
                scratch.poison();
            }
            replay(&own, &graph);
            assert!(on.results() == want, "replay {again} of seed {seed} differs from eager");
            scratch.intact();
        }
        on.intact();
    }
}

/// A graph captured on short requests replays at the table's full width, 128k.
#[rstest]
fn lengths_grow_after_capture(
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(1, 8)] q_len: usize,
    #[values(1, 256)] first: i32,
) {
    let Some(gpu) = gpu("capture::lengths_grow_after_capture") else { return };
    let spec = StepSpec::new(2, q_len, 131_072 - q_len, kind);
    let long = gpu.step(&spec, 61);
    let mut short = long.clone();
    for b in 0..2 {
        short.input.cache_seqlens[b] = first.max(q_len as i32);
        for i in 0..q_len {
            let (t, position) = (b * q_len + i, (first.max(q_len as i32) as usize) - q_len + i);
            short.input.positions[t] = position as i64;
            short.input.cache_loc[t] = short.input.page_table[b * short.input.table_width + position].into();
        }
    }
    let on = DeviceStep::new(&gpu, &short);
    let key = step_key(&short, kind);
    let plan = gpu.plan(key.clone());
    let mut scratch = Scratch::new(&gpu, &plan);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let graph = captured(&gpu, &own, plan, &scratch, &on);
    replay(&own, &graph);
    on.overwrite(&long);
    let want = eager(&gpu, &key, &mut scratch, &on, own.stream());
    on.overwrite(&long);
    scratch.poison();
    replay(&own, &graph);
    assert!(on.results() == want);
    scratch.intact();
}

/// Scales are read on the device: swapped between replays of one graph, they give what eager steps give.
#[rstest]
fn scales_swap_between_replays(#[values("decode-3", "verify-3", "prefill-65")] name: &str) {
    let Some(gpu) = gpu("capture::scales_swap_between_replays") else { return };
    let kind = LayerKind::Sliding;
    let spec = spec(name, kind);
    let mut step = gpu.step(&spec, 62);
    let on = DeviceStep::new(&gpu, &step);
    let key = step_key(&step, kind);
    let plan = gpu.plan(key.clone());
    let mut scratch = Scratch::new(&gpu, &plan);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let graph = captured(&gpu, &own, plan, &scratch, &on);
    let mut seen = Vec::new();
    for (k_scale, v_scale) in [(0.37, 2.9), (2.9, 0.37), (0.37, 2.9)] {
        (step.cache.k_scale, step.cache.v_scale) = (k_scale, v_scale);
        on.overwrite(&step);
        let want = eager(&gpu, &key, &mut scratch, &on, own.stream());
        on.overwrite(&step);
        replay(&own, &graph);
        assert!(on.results() == want, "scales {k_scale} and {v_scale}");
        seen.push(want);
    }
    assert!(seen[0] == seen[2] && seen[0] != seen[1], "both scales count");
}

/// Everything that the API lets go is dropped before the replay: plan, workspace handle, views of the tensors (the
/// memory stays).
#[test]
fn captured_and_replayed_alone() {
    let Some(gpu) = gpu("capture::captured_and_replayed_alone") else { return };
    let (spec, kind) = (spec("decode-8", LayerKind::Full), LayerKind::Full);
    let step = gpu.step(&spec, 63);
    let mut on = DeviceStep::new(&gpu, &step);
    let key = step_key(&step, kind);
    let plan = gpu.plan(key.clone());
    let mut scratch = Scratch::new(&gpu, &plan);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let want = eager(&gpu, &key, &mut scratch, &on, own.stream());
    on.overwrite(&step);
    let mut workspace = scratch.another(&gpu);
    let graph = {
        let (input, output, gpu) = (on.input.clone(), on.output.clone(), &gpu);
        own.capture(move |stream| gpu.cuda.forward(&plan, &mut workspace, &input, &output, stream)).expect("a graph")
    };
    // Views of other memory: nothing of the capture's arguments is left.
    on.input.stream = on.input.attention.attn_input.clone();
    scratch.poison();
    replay(&own, &graph);
    assert!(on.results() == want);
}
