//! The layer over NCCL: one rank on one GPU, a rank whose peer does not come, and two ranks of TP8/EP8 on two GPUs.
//! Tests say that they are skipped where NCCL's library or the second GPU is missing. With `NCCL_NVLS_ENABLE=0`.

use crate::collective::{
    each_rank, key, medians, of_tokens, output, over_two_ranks, same_bits_as_forward, Alone, Meeting, Pair, PAIR,
};
use crate::harness::{gpu, spec, DeviceStep, Gpu};
use muse_spark_layer::backend::cpu::StepOutput;
use muse_spark_layer::backend::cuda::graph::{L2Flush, OwnedStream};
use muse_spark_layer::backend::cuda::nccl::{self, Nccl, NcclId};
use muse_spark_layer::backend::cuda::peers::Peers;
use muse_spark_layer::backend::cuda::Device;
use muse_spark_layer::stack::{KindInput, LayerCache};
use muse_spark_layer::{
    Backend, Collective, DType, DecoderLayer, DecoderStack, DeviceTensor, Error, Identity, LayerConfig, LayerKind,
    LayerWeights, PerKind, Queue, StackInput, StackOutput, Stream, Taps,
};
use rstest::rstest;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(20);

fn queue(stream: Stream) -> Queue {
    Queue { stream, dependent: false }
}

fn skipped(test: &str, why: impl std::fmt::Display) {
    // Not by eprintln, which the test harness swallows.
    let _ = writeln!(std::io::stderr(), "  {test}: skipped, {why}");
}

/// Whether NCCL's library is there.
fn library(test: &str) -> bool {
    match nccl::version() {
        Ok(_) => true,
        Err(error) => {
            skipped(test, error);
            false
        }
    }
}

/// A communicator of one rank says nothing, and says it eagerly, captured and replayed.
#[rstest]
fn one_rank_is_the_layer(#[values("decode-1", "decode-8", "decode-33", "prefill-333")] name: &str) {
    let test = "nccl::one_rank_is_the_layer";
    let Some(gpu) = gpu(test) else { return };
    if !library(test) {
        return;
    }
    let ranks = Nccl::new(&gpu.device, &NcclId::new().expect("an id"), 0, 1, WAIT).expect("a communicator");
    same_bits_as_forward(&gpu, &spec(name, LayerKind::Full), &ranks);
    ranks.check().expect("no error");
}

/// What a communicator of one rank does move: a part to its place, within a graph, again with each replay.
#[test]
fn a_gather_of_one_rank_is_a_copy() {
    let test = "nccl::a_gather_of_one_rank_is_a_copy";
    let Some(gpu) = gpu(test) else { return };
    if !library(test) {
        return;
    }
    let ranks = Nccl::all(std::slice::from_ref(&gpu.device), WAIT).expect("a communicator").remove(0);
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let [part, whole] = [0, 1].map(|_| gpu.device.allocate(4096).expect("allocate"));
    // SAFETY: both hold 1024 elements and live to the end.
    let view = |at: u64, shape: &[usize]| unsafe { DeviceTensor::contiguous(at, DType::F32, shape) };
    let (from, to) = (view(part.ptr(), &[1, 1024]), view(whole.ptr(), &[1, 1, 1024]));
    let graph = own.capture(|stream| ranks.all_gather("x", &from, &to, queue(stream))).expect("a capture");
    for value in [3u8, 7] {
        part.fill(value).expect("fill");
        own.replay(&graph).expect("replay");
        ranks.wait(own.stream()).expect("the copy");
        let mut bytes = [0; 4096];
        whole.read(&mut bytes).expect("read");
        assert_eq!(bytes, [value; 4096]);
    }
    let wrong = view(whole.ptr(), &[1, 1, 512]);
    let error = ranks.all_gather("x", &from, &wrong, queue(own.stream())).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    // SAFETY: only its type is looked at.
    let words = unsafe { DeviceTensor::contiguous(whole.ptr(), DType::I32, &[1024]) };
    let error = ranks.all_reduce("x", &words, queue(own.stream())).unwrap_err();
    assert!(matches!(error, Error::DType { .. }), "{error}");
}

/// Rank 1 never comes to the set-up: a typed error in time, and the process goes on.
#[test]
fn a_peer_that_does_not_come_is_an_error() {
    let test = "nccl::a_peer_that_does_not_come_is_an_error";
    let Some(gpu) = gpu(test) else { return };
    if !library(test) {
        return;
    }
    let (began, timeout) = (Instant::now(), Duration::from_millis(1500));
    let error = Nccl::new(&gpu.device, &NcclId::new().expect("an id"), 0, 2, timeout).unwrap_err();
    assert!(matches!(error, Error::RankLost { rank: 0, ranks: 2, .. }), "{error}");
    assert!(began.elapsed() >= timeout && began.elapsed() < 6 * timeout, "{:?}", began.elapsed());
    let error = Nccl::new(&gpu.device, &NcclId::new().expect("an id"), 2, 2, timeout).unwrap_err();
    assert_eq!(error.to_string(), "rank: 2 is past the limit of 1");
    same_bits_as_forward(&gpu, &spec("decode-1", LayerKind::Full), &Alone);
}

/// What a call costs the host: printed, for the deployment's page.
#[test]
#[ignore = "a measurement"]
fn host_time_of_a_call() {
    let test = "nccl::host_time_of_a_call";
    let Some(gpu) = gpu(test) else { return };
    if !library(test) {
        return;
    }
    let ranks = Nccl::new(&gpu.device, &NcclId::new().expect("an id"), 0, 1, WAIT).expect("a communicator");
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let memory = gpu.device.allocate(16384).expect("allocate");
    // SAFETY: the buffer holds the row and lives to the end.
    let row = unsafe { DeviceTensor::contiguous(memory.ptr(), DType::Bf16, &[1, 8192]) };
    let mut times: Vec<f64> = (0..200)
        .map(|_| {
            let began = Instant::now();
            ranks.all_reduce("x", &row, queue(own.stream())).expect("all_reduce");
            began.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("NCCL {}: all_reduce of one rank, host time: median {:.1} us", nccl::version().unwrap(), times[100]);
}

/// Two GPUs, one test at a time; `None`, and a line, where there are fewer.
pub fn two_gpus(test: &str) -> Option<(MutexGuard<'static, Gpu>, MutexGuard<'static, Pair>)> {
    // Tests of the first GPU do not run beside these.
    let first = gpu(test)?;
    static TWO: OnceLock<Result<Mutex<Pair>, String>> = OnceLock::new();
    let two = TWO.get_or_init(|| {
        let found = Device::count().map_err(|e| e.to_string())?;
        if found < PAIR {
            return Err(format!("{found} GPU, two are needed"));
        }
        nccl::version().map_err(|e| e.to_string())?;
        Ok(Mutex::new(Pair::new(&LayerConfig::muse_spark_tp8(), [0, 1], 23)))
    });
    match two {
        Ok(pair) => Some((first, pair.lock().unwrap_or_else(|e| e.into_inner()))),
        Err(why) => {
            skipped(test, why);
            None
        }
    }
}

pub fn devices() -> Vec<Device> {
    (0..PAIR as i32).map(|d| Device::new(d).expect("a device")).collect()
}

/// A thread for each rank, each with its communicator.
fn on_ranks<T: Send>(timeout: Duration, work: impl Fn(Nccl) -> T + Sync) -> Vec<T> {
    each_rank(Nccl::all(&devices(), timeout).expect("the communicators"), work)
}

/// Eager, captured as the first call, and replayed: the reference's two ranks, and each other's bits.
#[rstest]
fn two_ranks_are_the_reference(
    #[values(1, 8, 64, 512)] tokens: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some((_gpu, pair)) = two_gpus("nccl::two_ranks_are_the_reference") else { return };
    let ranks = Nccl::all(&devices(), WAIT).expect("the communicators");
    over_two_ranks(&pair, &devices(), ranks, &of_tokens(tokens, kind), true);
}

/// A stack of four layers over two ranks, in one graph: each layer against the reference's two ranks from the stream that
/// the layer before it left (four layers on, tokens whose experts are near ties go ways of their own).
#[rstest]
fn two_ranks_of_a_stack(#[values(1, 8, 64)] tokens: usize) {
    let Some((_gpu, pair)) = two_gpus("nccl::two_ranks_of_a_stack") else { return };
    const LAYERS: usize = 4;
    let spec = of_tokens(tokens, LayerKind::Full);
    let steps = pair.steps(&spec, 93);
    let kinds: Vec<LayerKind> = (0..LAYERS).map(LayerKind::of_layer).collect();
    // Every layer has the pair's weights, which is as good a model as any.
    let stack = |rank: usize| {
        let layer = || {
            let weights = LayerWeights::from_host(&pair.config, pair.cpu[rank].weights().tensors().view());
            let backend = Backend::Cuda { device: rank as i32 };
            DecoderLayer::new(pair.config.clone(), weights.expect("weights"), backend).expect("a layer")
        };
        DecoderStack::new(kinds.iter().map(|kind| (*kind, layer())).collect()).expect("a stack")
    };
    let got = on_ranks(WAIT, |ranks| {
        let (rank, device) = (ranks.rank(), ranks.device());
        let (stack, step) = (stack(rank), &steps[rank]);
        let on: Vec<DeviceStep> = (0..LAYERS).map(|_| DeviceStep::on(&pair.config, device, step, Taps::None)).collect();
        on.iter().for_each(|on| on.overwrite(step));
        let plan = stack.plan(&PerKind::both(key(step, &spec, rank))).expect("a plan");
        let mut workspace = stack.workspace(&plan).expect("a workspace");
        let first = &on[0].input;
        let shared = KindInput {
            cache_loc: first.attention.cache_loc.clone(),
            cache_seqlens: first.attention.cache_seqlens.clone(),
            page_table: first.attention.page_table.clone(),
            scheduler_metadata: None,
        };
        let cache = |on: &DeviceStep| LayerCache {
            cache: on.input.attention.cache.clone(),
            k_scale: on.input.attention.k_scale.clone(),
            v_scale: on.input.attention.v_scale.clone(),
        };
        let input = StackInput {
            attn_input: first.attention.attn_input.clone(),
            stream: first.stream.clone(),
            positions: first.attention.positions.clone(),
            cu_seqlens_q: first.attention.cu_seqlens_q.clone(),
            kinds: PerKind::both(shared),
            caches: on.iter().map(cache).collect(),
            local_start: first.local_start.clone(),
            num_tokens_non_padded: None,
        };
        let ids = device.allocate((LAYERS * tokens * 32) as u64).expect("allocate");
        let last = &on[LAYERS - 1].output;
        let out = StackOutput {
            hidden: last.hidden.clone(),
            stream: last.stream.clone(),
            streams: (0..LAYERS - 1).map(|i| (i, on[i].output.stream.clone())).collect(),
            // SAFETY: the buffer holds every layer's ids and lives to the end.
            topk_ids: Some(unsafe { DeviceTensor::contiguous(ids.ptr(), DType::I32, &[LAYERS, tokens, 8]) }),
        };
        let own = OwnedStream::new(device).expect("a stream");
        let graph = own
            .capture_on_thread(|stream| stack.forward_with(&plan, &mut workspace, &input, &out, stream, &ranks))
            .expect("a capture");
        own.replay(&graph).expect("replay");
        ranks.wait(own.stream()).expect("the stack");
        let mut bytes = vec![0; LAYERS * tokens * 32];
        ids.read(&mut bytes).expect("read");
        let mut outputs: Vec<StepOutput> = on.iter().map(output).collect();
        for (output, ids) in outputs.iter_mut().zip(bytes.chunks(tokens * 32)) {
            output.topk_ids = ids.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        }
        outputs
    });
    let norm = pair.cpu[0].weights().tensors().get("next_pre_attn_norm").expect("a norm");
    let norm: Vec<f32> = norm.as_bf16("norm").expect("bf16").iter().map(|w| 1.0 + w.to_f32()).collect();
    let (mut inputs, [zero, one]) = (steps.clone(), [&got[0], &got[1]]);
    for (layer, kind) in kinds.iter().enumerate() {
        let want = pair.reference(&inputs, *kind);
        let ranks = [zero, one].map(|rank| StepOutput {
            // Of the layers before the last it stays in the workspace: the norm of the stream.
            hidden: normed(&rank[layer].stream, &norm),
            ..rank[layer].clone()
        });
        pair.compare(&inputs, &ranks, &want);
        for (input, output) in inputs.iter_mut().zip(&ranks) {
            (input.input.stream, input.input.attn_input) = (output.stream.clone(), output.hidden.clone());
        }
    }
}

/// `hidden` of a stream: its norm, times `1 + w`.
fn normed(stream: &[f32], norm: &[f32]) -> Vec<half::bf16> {
    let row = |row: &[f32]| {
        let squares: f64 = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let factor = (1.0 / (squares / row.len() as f64 + 1e-5).sqrt()) as f32;
        row.iter().zip(norm).map(|(v, w)| half::bf16::from_f32(v * factor * w)).collect::<Vec<_>>()
    };
    stream.chunks(norm.len()).flat_map(row).collect()
}

/// Rank 1 leaves after the set-up: rank 0's queued step does not end, and the wait says so in time.
#[test]
fn a_rank_lost_in_a_step_is_an_error() {
    let Some((_gpu, pair)) = two_gpus("nccl::a_rank_lost_in_a_step_is_an_error") else { return };
    let spec = of_tokens(1, LayerKind::Full);
    let steps = pair.steps(&spec, 94);
    let (timeout, done) = (Duration::from_secs(2), Meeting::new(PAIR));
    on_ranks(timeout, |ranks| {
        let (rank, device) = (ranks.rank(), ranks.device());
        let (layer, step) = (&pair.cuda[rank], &steps[rank]);
        let on = DeviceStep::on(&pair.config, device, step, Taps::None);
        let plan = layer.plan(key(step, &spec, rank)).expect("a plan");
        let mut workspace = layer.workspace(&plan).expect("a workspace");
        let own = OwnedStream::new(device).expect("a stream");
        // Both ranks once, so that connections are there; then rank 0 alone.
        layer.forward_with(&plan, &mut workspace, &on.input, &on.output, own.stream(), &ranks).expect("forward_with");
        ranks.wait(own.stream()).expect("the step");
        done.wait(rank);
        if rank == 0 {
            let began = Instant::now();
            let queued = layer.forward_with(&plan, &mut workspace, &on.input, &on.output, own.stream(), &ranks);
            let error = queued.and_then(|()| ranks.wait(own.stream())).unwrap_err();
            assert!(matches!(error, Error::RankLost { rank: 0, .. }), "{error}");
            assert!(began.elapsed() < 5 * timeout, "{:?}", began.elapsed());
            let again = layer.forward_with(&plan, &mut workspace, &on.input, &on.output, own.stream(), &ranks);
            assert!(matches!(again, Err(Error::RankLost { .. })), "no way back");
        }
        done.wait(rank);
    });
}

/// The time of a layer over two ranks, by NCCL, by peers (up to 64 tokens; NCCL beyond), and alone, and what a call costs
/// the host: printed.
#[test]
#[ignore = "a measurement"]
fn time_of_a_layer() {
    let Some((_gpu, pair)) = two_gpus("nccl::time_of_a_layer") else { return };
    println!("NCCL {}; us a layer by graph replay: NCCL, peers, alone; host us a call with NCCL, peers, alone", {
        nccl::version().expect("a version")
    });
    for tokens in [1, 2, 4, 8, 9, 16, 32, 64, 256, 512, 2048, 8192] {
        let spec = of_tokens(tokens, LayerKind::Full);
        let steps = pair.steps(&spec, 95);
        let (together, one_by_one) = (Meeting::new(PAIR), Mutex::new(()));
        let [first, second] = [(); 2].map(|()| Nccl::all(&devices(), WAIT).expect("the communicators"));
        let peers = Peers::all(&devices(), 1 << 20, WAIT).expect("peers");
        let both: Vec<_> = first
            .into_iter()
            .zip(peers.into_iter().zip(second))
            .map(|(nccl, (peers, larger))| (nccl, peers.with_larger(Box::new(larger)).expect("peers")))
            .collect();
        let times = std::thread::scope(|scope| {
            let (together, one_by_one, pair, steps, spec) = (&together, &one_by_one, &pair, &steps, &spec);
            let rank = |(nccl, peers): (Nccl, Peers)| {
                scope.spawn(move || {
                    let (rank, device) = (nccl.rank(), nccl.device());
                    let (layer, step) = (&pair.cuda[rank], &steps[rank]);
                    let on = DeviceStep::on(&pair.config, device, step, Taps::None);
                    on.overwrite(step);
                    let plan = layer.plan(key(step, spec, rank)).expect("a plan");
                    let mut workspaces = [(); 3].map(|()| layer.workspace(&plan).expect("a workspace"));
                    let own = OwnedStream::new(device).expect("a stream");
                    // It captures in the mode that forbids other threads everything.
                    together.wait(rank);
                    let flush = {
                        let _alone = one_by_one.lock();
                        L2Flush::new(&own).expect("a flush")
                    };
                    let (input, output) = (&on.input, &on.output);
                    let forms: [&dyn Collective; 3] = [&nccl, &peers, &Identity];
                    let mut host = Vec::new();
                    for (form, workspace) in forms.into_iter().zip(&mut workspaces) {
                        let mut times = Vec::new();
                        for _ in 0..15 {
                            together.wait(rank);
                            let began = Instant::now();
                            layer
                                .forward_with(&plan, workspace, input, output, own.stream(), form)
                                .expect("forward_with");
                            times.push(began.elapsed().as_secs_f64() * 1e6);
                            own.synchronize().expect("the step");
                        }
                        times.sort_by(f64::total_cmp);
                        host.push(times[times.len() / 2]);
                    }
                    together.wait(rank);
                    let graphs: Vec<_> = forms
                        .into_iter()
                        .zip(&mut workspaces)
                        .map(|(form, workspace)| {
                            own.capture_on_thread(|stream| {
                                layer.forward_with(&plan, workspace, input, output, stream, form)
                            })
                            .expect("a capture")
                        })
                        .collect();
                    let runs: Vec<_> = graphs
                        .iter()
                        .map(|graph| {
                            || {
                                together.wait(rank);
                                own.replay(graph).expect("replay");
                            }
                        })
                        .collect();
                    let us = medians(&own, &flush, &runs, 31);
                    peers.wait(own.stream()).expect("the steps");
                    (us, host)
                })
            };
            let threads: Vec<_> = both.into_iter().map(rank).collect();
            threads.into_iter().map(|t| t.join().expect("a rank")).collect::<Vec<_>>()
        });
        for (rank, (us, host)) in times.iter().enumerate() {
            println!(
                "T {tokens:4} rank {rank}: {:7.1} {:7.1} {:7.1} | {:5.1} {:5.1} {:5.1}",
                us[0], us[1], us[2], host[0], host[1], host[2]
            );
        }
    }
}
