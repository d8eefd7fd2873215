//! Eight ranks of a small TP8/EP8 deployment in one process, a thread each, against the layer of all heads and
//! experts; and what becomes of a group that loses a rank.

mod cpu_common;

use cpu_common::{close, exact, spec};
use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::collective::{self, ThreadRank};
use muse_spark_layer::synthetic::{self, SyntheticStep};
use muse_spark_layer::{
    Backend, Collective, DecoderLayer, Error, Identity, LayerConfig, LayerKind, LayerWeights, Result, WeightKind,
};
use rstest::rstest;
use std::time::{Duration, Instant};

const RANKS: usize = 8;
/// FP32 sums in another order.
const SAME: f64 = 2e-6;

/// One of eight ranks: 2 query heads, 1 key/value head, 4 experts, 8 columns of the unpooler.
fn config(experts: WeightKind) -> LayerConfig {
    LayerConfig { q_heads: 2, kv_heads: 1, local_experts: 4, experts, ..LayerConfig::small() }
}

/// The layer of all ranks, whose unpooler is never sliced.
fn whole(config: &LayerConfig, seed: u64) -> CpuLayer<'static> {
    let whole = LayerConfig { sliced_max_tokens: 0, ..synthetic::whole_config(config, RANKS) };
    CpuLayer::new(whole.clone(), synthetic::weights(&whole, seed).unwrap()).unwrap()
}

/// What rank `rank` is given of the step of all heads.
fn part(config: &LayerConfig, step: &SyntheticStep, rank: usize) -> SyntheticStep {
    let heads = rank * config.kv_heads..(rank + 1) * config.kv_heads;
    let mut part = step.clone();
    part.input.local_start = (rank * config.local_experts) as i32;
    part.cache = step.cache.of_heads(heads, RANKS * config.kv_heads, config.head_dim);
    part
}

/// Runs `work` on a thread for each rank and gives what they gave, by rank.
fn on_ranks<T: Send>(timeout: Duration, work: impl Fn(ThreadRank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            collective::threads(RANKS, timeout).into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[rstest]
fn ranks_are_the_layer(
    #[values(1, 8, 64)] tokens: usize,
    #[values(LayerKind::Full, LayerKind::Sliding)] kind: LayerKind,
    #[values(WeightKind::Nvfp4, WeightKind::Bf16)] experts: WeightKind,
) {
    let config = config(experts);
    let all = whole(&config, 3);
    let mut step = synthetic::step(all.config(), &spec(tokens, 1, 40, kind, 4), 5).unwrap();
    let before = step.clone();
    let want = cpu_common::run(&all, &mut step, &exact(kind));
    let outputs: Vec<(StepOutput, SyntheticStep)> = on_ranks(Duration::from_secs(60), |ranks| {
        let rank = ranks.rank();
        let weights = synthetic::rank_weights(&config, 3, rank, RANKS).unwrap();
        let weights = LayerWeights::from_host(&config, weights).unwrap();
        let layer = DecoderLayer::new(config.clone(), weights, Backend::Cpu).unwrap();
        let mut step = part(&config, &before, rank);
        let SyntheticStep { input, cache } = &mut step;
        let options = StepOptions { rank, ..exact(kind) };
        let output = layer.forward_host_with(&input.view(), &mut cache.view(), &options, &ranks).unwrap();
        (output, step)
    });
    let taps = want.taps.as_ref().unwrap();
    for (rank, (got, own)) in outputs.iter().enumerate() {
        let got_taps = got.taps.as_ref().unwrap();
        close("attn_out", &got_taps.attn_out, &taps.attn_out, SAME);
        close("moe_mix", &got_taps.moe_mix, &taps.moe_mix, SAME);
        close("ffn_out", &got_taps.ffn_out, &taps.ffn_out, SAME);
        close("stream", &got.stream, &want.stream, SAME);
        assert_eq!(got.topk_ids, want.topk_ids, "rank {rank}");
        assert!(own.cache == part(&config, &step, rank).cache, "rank {rank}: the cache's new rows");
        let first = &outputs[0].0;
        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got.stream), bits(&first.stream), "rank {rank} and rank 0 differ");
        assert!(got.hidden == first.hidden, "rank {rank} and rank 0 differ");
    }
}

/// A rank on its own is the layer as it was.
#[test]
fn identity_is_the_layer_alone() {
    let config = config(WeightKind::Nvfp4);
    let layer = cpu_common::layer(&config, 6);
    let step = synthetic::step(&config, &spec(5, 1, 20, LayerKind::Full, 1), 6).unwrap();
    let options = StepOptions { rank: 3, ..exact(LayerKind::Full) };
    let (mut a, mut b) = (step.cache.clone(), step.cache.clone());
    let with = layer.forward_with(&step.input.view(), &mut a.view(), &options, &Identity).unwrap();
    assert_eq!(with, layer.forward(&step.input.view(), &mut b.view(), &options).unwrap());
}

#[test]
fn sums_are_in_the_order_of_the_ranks() {
    // 1 + 2^-24 rounds to 1 when added last, and 2^-23 counts when the small ones meet first.
    let small = 2f32.powi(-24);
    let sums = on_ranks(Duration::from_secs(60), |ranks| {
        let mut x = [if ranks.rank() == 0 { 1.0 } else { small }];
        ranks.all_reduce_host("x", &mut x).unwrap();
        let part = [ranks.rank() as f32; 2];
        (x[0], ranks.all_gather_host("y", &part).unwrap())
    });
    let gathered: Vec<f32> = (0..RANKS).flat_map(|r| [r as f32; 2]).collect();
    assert!(sums.iter().all(|(sum, all)| *sum == 1.0 && *all == gathered), "{sums:?}");
}

fn lost(result: Result<()>) -> (usize, String) {
    match result {
        Err(Error::RankLost { rank, ranks: RANKS, call, reason }) if call == "attn_out" => (rank, reason),
        other => panic!("{other:?}"),
    }
}

/// One rank does not come: the others wait for as long as they were told, and say for whom.
#[test]
fn a_rank_that_does_not_come_is_named() {
    let timeout = Duration::from_millis(300);
    let began = Instant::now();
    let results = on_ranks(timeout, |ranks| {
        if ranks.rank() == 5 {
            std::thread::sleep(2 * timeout);
            // Too late: the group is lost for this rank, too.
            return (5, lost(ranks.all_reduce_host("attn_out", &mut [1.0])).1);
        }
        let first = lost(ranks.all_reduce_host("attn_out", &mut [1.0]));
        assert_eq!(lost(ranks.all_reduce_host("attn_out", &mut [1.0])).1, first.1, "no way back");
        first
    });
    assert!(began.elapsed() < 20 * timeout);
    for (rank, (got, reason)) in results.iter().enumerate() {
        assert_eq!((*got, reason.as_str()), (rank, "waited 300ms for rank 5"));
    }
}

/// A rank leaves (its thread ended, or panicked): nobody waits out the time.
#[test]
fn a_rank_that_left_is_named_at_once() {
    let began = Instant::now();
    let results = on_ranks(Duration::from_secs(600), |ranks| {
        (ranks.rank() != 2).then(|| lost(ranks.all_reduce_host("attn_out", &mut [1.0])).1)
    });
    assert!(began.elapsed() < Duration::from_secs(60));
    // Those that fail leave in their turn; the first reason stays.
    assert!(results.iter().flatten().all(|reason| reason == "rank 2 has left"), "{results:?}");
    assert_eq!(results.iter().flatten().count(), RANKS - 1);
}

#[test]
fn unequal_lengths_are_refused_on_every_rank() {
    let results = on_ranks(Duration::from_secs(60), |ranks| {
        let mut part = vec![0.0; if ranks.rank() == 6 { 3 } else { 4 }];
        ranks.all_reduce_host("moe_mix", &mut part).unwrap_err().to_string()
    });
    assert_eq!(results[0], "moe_mix: elements of rank 6: wanted 4 as on rank 0, got 3");
    assert_eq!(results[6], "moe_mix: elements of rank 0: wanted 3 as on rank 6, got 4");
}

/// The plan's rank is the collective's, and there are no more ranks than slices.
#[test]
fn ranks_that_do_not_fit_are_refused() {
    let config = config(WeightKind::Nvfp4);
    let layer = cpu_common::layer(&config, 6);
    let mut step = synthetic::step(&config, &spec(1, 1, 5, LayerKind::Full, 1), 6).unwrap();
    let mut refused = |ranks: &dyn Collective| {
        let SyntheticStep { input, cache } = &mut step;
        let options = StepOptions { rank: 0, ..exact(LayerKind::Full) };
        layer.forward_with(&input.view(), &mut cache.view(), &options, ranks).unwrap_err().to_string()
    };
    let wait = Duration::from_millis(1);
    let two = collective::threads(2, wait);
    assert_eq!(refused(&two[1]), "plan: rank was planned as 0, the call has a collective of rank 1");
    assert_eq!(refused(&collective::threads(9, wait)[0]), "ranks: 9 is past the limit of 8");
    assert_eq!(refused(&two[0]), "rank 0 of 2: attn_out: waited 1ms for rank 1");
}

/// Ranks' weights are rows, columns and experts of the whole layer's.
#[rstest]
fn rank_weights_are_parts_of_the_whole(#[values(WeightKind::Nvfp4, WeightKind::Bf16)] experts: WeightKind) {
    let config = config(experts);
    let all = synthetic::weights(&synthetic::whole_config(&config, RANKS), 9).unwrap();
    assert!(synthetic::rank_weights(&config, 9, 0, 1).unwrap() == synthetic::weights(&config, 9).unwrap());
    let error = synthetic::rank_weights(&config, 9, 8, 8).unwrap_err().to_string();
    assert_eq!(error, "rank: 8 is past the limit of 7");
    let (q, kv, head) = (config.q_size(), config.kv_size(), config.hidden * 2);
    for rank in 0..RANKS {
        let part = synthetic::rank_weights(&config, 9, rank, RANKS).unwrap();
        for (name, tensor) in &part.0 {
            let (got, want) = (tensor.bytes(), all.get(name).unwrap().bytes());
            let rows = |first: usize, n: usize| &want[first * head..(first + n) * head];
            let want: Vec<u8> = match name.as_str() {
                "qkv_gate" => {
                    let (k, v, gate) = (RANKS * q, RANKS * (q + kv), RANKS * (q + 2 * kv));
                    [rows(rank * q, q), rows(k + rank * kv, kv), rows(v + rank * kv, kv), rows(gate + rank * q, q)]
                        .concat()
                }
                "o" => want.chunks(RANKS * q * 2).flat_map(|row| row[rank * q * 2..][..q * 2].to_vec()).collect(),
                w if w.starts_with("w13") || w.starts_with("w2") => want[rank * got.len()..][..got.len()].to_vec(),
                _ => want.to_vec(),
            };
            assert!(got == want, "{name} of rank {rank}");
        }
    }
}
