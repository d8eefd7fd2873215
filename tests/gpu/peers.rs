//! Ranks that write into each other's memory: on one GPU, which runs the kernels of several ranks side by side, and on two.

use crate::collective::{each_rank, of_tokens, over_two_ranks, pair_on_one, Meeting};
use crate::harness::gpu;
use half::bf16;
use muse_spark_layer::backend::cuda::graph::OwnedStream;
use muse_spark_layer::backend::cuda::peers::Peers;
use muse_spark_layer::collective;
use muse_spark_layer::{synthetic, Collective, DType, DeviceTensor, Error, LayerKind, Queue};
use rstest::rstest;
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(10);

/// What rank `rank` brings to call `call`. Every eighth element has another sum in any other order: 1e30 - 1e30 + 1.
fn part(rank: usize, call: usize, elements: usize) -> Vec<bf16> {
    let random = synthetic::Random::new((100 * call + rank) as u64, "part");
    let ordered = *[1e30, -1e30].get(rank).unwrap_or(&1.0);
    (0..elements).map(|i| bf16::from_f32(if i % 8 == 0 { ordered } else { random.normal(i as u64) })).collect()
}

/// The ranks' sum in their order, in FP32, rounded once.
fn sum(ranks: usize, call: usize, elements: usize) -> Vec<u8> {
    let mut sum = vec![0f32; elements];
    for rank in 0..ranks {
        sum.iter_mut().zip(part(rank, call, elements)).for_each(|(s, v)| *s += v.to_f32());
    }
    bytes(&sum.into_iter().map(bf16::from_f32).collect::<Vec<_>>())
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Sums are FP32 in the order of the ranks, rounded once, whatever was exchanged before, eager and replayed.
#[rstest]
fn sums_are_in_the_order_of_the_ranks(#[values(2, 3, 4)] ranks: usize) {
    let Some(gpu) = gpu("peers::sums_are_in_the_order_of_the_ranks") else { return };
    let devices = vec![gpu.device.clone(); ranks];
    let together = Meeting::new(ranks);
    each_rank(Peers::all(&devices, 8 * 16384, WAIT).expect("peers"), |peers| {
        let own = OwnedStream::new(peers.device()).expect("a stream");
        let memory = peers.device().allocate(8 * 16384).expect("allocate");
        // Sizes in turn, so that no flag of another call is taken for this one's.
        for (call, elements) in [8192, 65536, 4096, 8192, 4, 32768, 65536, 8192].into_iter().enumerate() {
            // SAFETY: the buffer holds as many elements and lives to the end.
            let view = unsafe { DeviceTensor::contiguous(memory.ptr(), DType::Bf16, &[elements]) };
            memory.write(&bytes(&part(peers.rank(), call, elements))).expect("write");
            // A small copy returns before it is done, and the stream waits for no other.
            peers.device().synchronize().expect("the copy");
            let at = Queue { stream: own.stream(), dependent: false };
            // Nobody waits for the device while a kernel of another rank waits for this one.
            together.wait(peers.rank());
            if call % 2 == 0 {
                peers.all_reduce("x", &view, at).expect("all_reduce");
            } else {
                let graph =
                    own.capture_on_thread(|stream| peers.all_reduce("x", &view, Queue { stream, dependent: false }));
                let graph = graph.expect("a capture");
                together.wait(peers.rank());
                own.replay(&graph).expect("replay");
                own.synchronize().expect("the sum");
            }
            peers.wait(own.stream()).expect("the sum");
            let mut got = vec![0; 2 * elements];
            memory.read(&mut got).expect("read");
            let want = sum(ranks, call, elements);
            assert!(got == want, "call {call} of {elements} elements on rank {}", peers.rank());
        }
    });
}

/// Calls queued one behind the other: a rank may be a call ahead of another, whose packets it must not overwrite.
/// Two ranks: the kernels of four such calls, which wait where they are resident, fill a GPU, and find no room for the last
/// beside other tests.
#[test]
fn calls_need_no_meeting() {
    const RANKS: usize = 2;
    const CALLS: usize = 24;
    // 16 packets a thread: long enough for ranks to part.
    const ELEMENTS: usize = 16 * 65536;
    let Some(gpu) = gpu("peers::calls_need_no_meeting") else { return };
    let devices = vec![gpu.device.clone(); RANKS];
    let together = Meeting::new(RANKS);
    each_rank(Peers::all(&devices, 2 * ELEMENTS as u64, Duration::from_secs(3)).expect("peers"), |peers| {
        let own = OwnedStream::new(peers.device()).expect("a stream");
        let memory = peers.device().allocate((CALLS * 2 * ELEMENTS) as u64).expect("allocate");
        let mine = [0, 1].map(|odd| bytes(&part(peers.rank(), odd, ELEMENTS)));
        for call in 0..CALLS {
            memory.write_at((call * 2 * ELEMENTS) as u64, &mine[call % 2]).expect("write");
        }
        peers.device().synchronize().expect("the copies");
        // Nobody waits for the device while a kernel of another rank waits for this one.
        together.wait(peers.rank());
        for call in 0..CALLS {
            let at = memory.ptr() + (call * 2 * ELEMENTS) as u64;
            // SAFETY: the buffer holds as many elements and lives to the end.
            let view = unsafe { DeviceTensor::contiguous(at, DType::Bf16, &[ELEMENTS]) };
            // Plain edges: kernels of one rank that wait where they are resident could leave the others' no room.
            peers.all_reduce("x", &view, Queue { stream: own.stream(), dependent: false }).expect("all_reduce");
        }
        peers.wait(own.stream()).expect("the sums");
        together.wait(peers.rank());
        let want = [0, 1].map(|odd| sum(RANKS, odd, ELEMENTS));
        for call in 0..CALLS {
            let mut got = vec![0; 2 * ELEMENTS];
            memory.read_at((call * 2 * ELEMENTS) as u64, &mut got).expect("read");
            assert!(got == want[call % 2], "call {call} on rank {}", peers.rank());
        }
    });
}

/// Every rank's slice at its place.
#[rstest]
fn slices_are_gathered(#[values(2, 4)] ranks: usize, #[values(1, 3, 8)] tokens: usize) {
    let Some(gpu) = gpu("peers::slices_are_gathered") else { return };
    let devices = vec![gpu.device.clone(); ranks];
    let together = Meeting::new(ranks);
    each_rank(Peers::all(&devices, 8 * 16384, WAIT).expect("peers"), |peers| {
        let own = OwnedStream::new(peers.device()).expect("a stream");
        let each = tokens * 4096;
        let memory = peers.device().allocate((ranks * each) as u64).expect("allocate");
        // SAFETY: the buffer holds every rank's slice and lives to the end.
        let view = |rank: usize, n: usize| unsafe {
            DeviceTensor::contiguous(memory.ptr() + (rank * each) as u64, DType::F32, &[n, tokens, 1024])
        };
        for call in 0..3u8 {
            memory.fill(0xFF).expect("fill");
            let value = 16 * call + peers.rank() as u8;
            memory.write_at((peers.rank() * each) as u64, &vec![value; each]).expect("write");
            // As above.
            peers.device().synchronize().expect("the copy");
            let at = Queue { stream: own.stream(), dependent: false };
            together.wait(peers.rank());
            peers.all_gather("x", &view(peers.rank(), 1), &view(0, ranks), at).expect("all_gather");
            peers.wait(own.stream()).expect("the gather");
            let mut got = vec![0; ranks * each];
            memory.read(&mut got).expect("read");
            let want: Vec<u8> = (0..ranks as u8).flat_map(|rank| vec![16 * call + rank; each]).collect();
            assert!(got == want, "call {call} on rank {}", peers.rank());
        }
    });
}

/// Two ranks' layers on one GPU, eager and replayed, against the reference. With plain edges: kernels of one rank that
/// wait where they are resident could leave the other's no room.
#[rstest]
fn two_ranks_on_one_gpu(
    #[values(1, 8, 64)] tokens: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    let Some(gpu) = gpu("peers::two_ranks_on_one_gpu") else { return };
    let devices = [gpu.device.clone(), gpu.device.clone()];
    let ranks = Peers::all(&devices, 1 << 20, WAIT).expect("peers");
    over_two_ranks(pair_on_one(&gpu), &devices, ranks, &of_tokens(tokens, kind), false);
}

/// Rank 1 takes no part: rank 0 waits for as long as it was told, says for whom, and waits no second time.
#[test]
fn a_rank_that_takes_no_part_is_named() {
    let Some(gpu) = gpu("peers::a_rank_that_takes_no_part_is_named") else { return };
    let timeout = Duration::from_millis(700);
    let peers = Peers::all(&[gpu.device.clone(), gpu.device.clone()], 16384, timeout).expect("peers");
    let own = OwnedStream::new(&gpu.device).expect("a stream");
    let memory = gpu.device.allocate(16384).expect("allocate");
    // SAFETY: the buffer holds the row and lives to the end.
    let row = unsafe { DeviceTensor::contiguous(memory.ptr(), DType::Bf16, &[1, 8192]) };
    let at = Queue { stream: own.stream(), dependent: false };
    let began = Instant::now();
    peers[0].all_reduce("x", &row, at).expect("queued");
    peers[0].all_reduce("x", &row, at).expect("queued");
    let error = peers[0].wait(own.stream()).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 of 2: wait: waited 700ms for rank 1");
    assert!(began.elapsed() >= timeout && began.elapsed() < 3 * timeout, "{:?}", began.elapsed());
    let error = peers[0].all_reduce("x", &row, at).unwrap_err();
    assert!(matches!(error, Error::RankLost { rank: 0, ranks: 2, .. }), "{error}");
}

/// What does not fit is refused before anything is queued, or goes to the other collective.
#[test]
fn messages_that_do_not_fit() {
    let Some(gpu) = gpu("peers::messages_that_do_not_fit") else { return };
    let (device, wait) = (&gpu.device, Duration::from_millis(1));
    let one = || Peers::all(std::slice::from_ref(device), 16384, WAIT).expect("peers").remove(0);
    let memory = device.allocate(65536).expect("allocate");
    // SAFETY: the buffer holds as many elements and lives to the end.
    let row = |dtype, n| unsafe { DeviceTensor::contiguous(memory.ptr(), dtype, &[1, n]) };
    let own = OwnedStream::new(device).expect("a stream");
    let at = Queue { stream: own.stream(), dependent: false };
    let text = |r: muse_spark_layer::Result<()>| r.unwrap_err().to_string();
    assert_eq!(text(one().all_reduce("x", &row(DType::Bf16, 8196), at)), "x: bytes: 16392 is past the limit of 16384");
    assert_eq!(text(one().all_reduce("x", &row(DType::F32, 4), at)), "x: wanted bf16, got f32");
    assert_eq!(text(one().all_reduce("x", &row(DType::Bf16, 6), at)), "x: wanted a multiple of 8 bytes, got 12");
    assert!(one().dependent(16384) && !one().dependent(16392));
    let larger = |n: usize| Box::new(collective::threads(n, wait).remove(0));
    let error = one().with_larger(larger(2)).unwrap_err();
    assert_eq!(error.to_string(), "larger: wanted rank 0 of 1, got rank 0 of 2");
    let passed = one().with_larger(larger(1)).expect("peers");
    let error = passed.all_reduce("x", &row(DType::Bf16, 8196), at).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "the other collective's own answer: {error}");
    let nine = vec![device.clone(); 9];
    assert_eq!(Peers::all(&nine, 16384, WAIT).unwrap_err().to_string(), "ranks: 9 is past the limit of 8");
}

/// On two GPUs, with the edges that let the next operations load their weights while a rank waits.
#[cfg(feature = "nccl")]
#[rstest]
fn two_ranks_on_two_gpus(
    #[values(1, 8, 64, 512)] tokens: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
) {
    use crate::nccl::{devices, two_gpus};
    use muse_spark_layer::backend::cuda::nccl::Nccl;
    let Some((_gpu, pair)) = two_gpus("peers::two_ranks_on_two_gpus") else { return };
    let larger = Nccl::all(&devices(), WAIT).expect("the communicators");
    let peers = Peers::all(&devices(), 1 << 20, WAIT).expect("peers");
    let ranks = peers.into_iter().zip(larger).map(|(p, l)| p.with_larger(Box::new(l)).expect("peers")).collect();
    over_two_ranks(&pair, &devices(), ranks, &of_tokens(tokens, kind), true);
}
