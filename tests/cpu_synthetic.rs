//! The synthetic steps are what they claim: lengths, pages, distributions, and a router that favours a few.

mod cpu_common;

use cpu_common::{layer, run};
use muse_spark_layer::backend::cpu::StepOptions;
use muse_spark_layer::numerics::e4m3_to_f32;
use muse_spark_layer::synthetic::{self, Dist, Random, Spread, StepSpec};
use muse_spark_layer::{routing, LayerConfig, LayerKind, QueryPrecision, WeightKind};
use rstest::rstest;

#[test]
fn normal_variates_are_normal_enough() {
    let stream = Random::new(1, "some name");
    let n = 100_000u64;
    let moment = |p: i32| (0..n).map(|i| f64::from(stream.normal(i)).powi(p)).sum::<f64>() / n as f64;
    assert!(moment(1).abs() < 0.01, "mean {}", moment(1));
    assert!((moment(2) - 1.0).abs() < 0.02, "variance {}", moment(2));
    assert!(moment(3).abs() < 0.05, "skew {}", moment(3));
    assert!((moment(4) - 2.7).abs() < 0.1, "kurtosis {}", moment(4));
}

/// Values that other languages must reproduce; the golden files check all of it.
#[test]
fn known_values() {
    let stream = Random::new(1, "qkv_gate");
    assert_eq!(stream.bits(0), 0xcff0_7f6b_3fa5_0abd);
    assert_eq!(synthetic::digest(b"hello world"), 0xdf6f_87c8_30d4_306f);
    assert_ne!(stream.bits(0), Random::new(2, "qkv_gate").bits(0));
    assert_ne!(stream.bits(0), Random::new(1, "o").bits(0));
    assert_eq!(stream.byte(11), stream.bits(1).to_le_bytes()[3]);
    assert!((0..1000).all(|i| stream.below(i, 7) < 7));
}

#[rstest]
fn pages_are_dealt_once(
    #[values(Spread::Fixed, Spread::Agentic, Spread::Mixed)] spread: Spread,
    #[values(0, 5, 100)] ctx: usize,
    #[values(1, 16)] page_size: usize,
    #[values(0, 1, 8)] q_len: usize,
) {
    let config = LayerConfig::small();
    let spec = StepSpec { spread, page_size, ..StepSpec::new(5, q_len, ctx, LayerKind::Full) };
    let step = synthetic::step(&config, &spec, 3).unwrap();
    let i = &step.input;
    let pages = step.cache.k.len() / config.kv_size() / page_size;
    let mut used = vec![false; pages];
    for (b, seq) in i.cache_seqlens.iter().enumerate() {
        let before = *seq as usize - q_len;
        assert!(before <= spec.longest() && (spread != Spread::Fixed || before == ctx));
        let needed = (*seq as usize).div_ceil(page_size);
        let row = &i.page_table[b * i.table_width..(b + 1) * i.table_width];
        for id in &row[..needed] {
            assert!(!std::mem::replace(&mut used[*id as usize], true), "page {id} twice");
        }
        assert!(row[needed..].iter().all(|&id| id == -1));
        for n in 0..q_len {
            let (t, position) = (b * q_len + n, before + n);
            assert_eq!(i.positions[t], position as i64);
            let want = row[position / page_size] as usize * page_size + position % page_size;
            assert_eq!(i.cache_loc[t], want as i64);
        }
    }
    i.view().batch.validate(5 * q_len).unwrap();
}

#[test]
fn soft_keys_share_a_direction_and_outliers_stand_out() {
    let config = LayerConfig { hidden: 256, unpool_slice: 32, ..LayerConfig::small() };
    let make =
        |dist| synthetic::step(&config, &StepSpec { dist, ..StepSpec::new(4, 1, 200, LayerKind::Full) }, 5).unwrap();
    let mean_square_of_mean = |bytes: &[u8]| {
        let (width, n) = (config.kv_size(), bytes.len() / config.kv_size());
        let mean = |c: usize| (0..n).map(|r| f64::from(e4m3_to_f32(bytes[r * width + c]))).sum::<f64>() / n as f64;
        (0..width).map(|c| mean(c) * mean(c)).sum::<f64>() / width as f64
    };
    assert!(mean_square_of_mean(&make(Dist::Normal).cache.k) < 0.05);
    assert!(mean_square_of_mean(&make(Dist::Soft).cache.k) > 0.4);
    let (plain, outliers) = (make(Dist::Normal).input.stream, make(Dist::Outliers).input.stream);
    let times_ten = plain.iter().zip(&outliers).filter(|(a, b)| **b == **a * 10.0).count();
    let same = plain.iter().zip(&outliers).filter(|(a, b)| a == b).count();
    assert_eq!((times_ten, same), (4 * 2, 4 * 254));
}

/// A few experts take most tokens, as in a trained model: the busiest quarter of the ranks has more
/// than its share, and not everything.
#[test]
fn routing_is_uneven() {
    let config = LayerConfig::small();
    let layer = layer(&config, 6);
    let mut step = synthetic::step(&config, &StepSpec::new(64, 1, 5, LayerKind::Full), 6).unwrap();
    let ids = run(&layer, &mut step, &StepOptions::new(LayerKind::Full, QueryPrecision::Fp32)).topk_ids;
    let mut counts = vec![0usize; config.n_experts];
    ids.iter().for_each(|&e| counts[e as usize] += 1);
    counts.sort_unstable();
    let top: usize = counts.iter().rev().take(config.n_experts / 4).sum();
    assert!(top * 2 > ids.len() && top < ids.len(), "{top} of {}", ids.len());
    let start = routing::busiest_start(&config, &ids);
    let local = ids.iter().filter(|&&e| routing::local_expert(&config, e, start).is_some()).count();
    assert!(local * config.ranks() > ids.len());
}

/// Experts whose outputs are of order one, whatever their format, with scales of all sizes.
#[rstest]
fn expert_weights_have_sane_sizes(#[values(WeightKind::Nvfp4, WeightKind::Bf16)] experts: WeightKind) {
    let config = LayerConfig { experts, expert_dim: 256, ..LayerConfig::small() };
    let layer = layer(&config, 7);
    let lists = routing::ExpertLists::new(&config, &[0, 9, 10, 11], 0, 1);
    let x = vec![1.0; config.expert_dim];
    let inter = muse_spark_layer::backend::cpu::w13(&config, layer.weights(), &x, &lists);
    let rms = (inter.iter().map(|v| v * v).sum::<f32>() / inter.len() as f32).sqrt();
    assert!(rms > 0.02 && rms < 50.0, "{rms}");
    if experts == WeightKind::Nvfp4 {
        let scales = layer.weights().tensors().get("w13_sf").unwrap().as_e4m3("w13_sf").unwrap();
        assert!(scales.contains(&0) && scales.iter().any(|b| (1..8).contains(b)), "zero and subnormal scales");
        assert!(scales.iter().all(|b| *b <= 0x7e));
    }
}

/// Stress keeps the types and shapes, and reaches what it is for.
#[test]
fn stressed_weights() {
    let config = LayerConfig::small();
    let plain = synthetic::weights(&config, 8).unwrap();
    let mut hard = plain.clone();
    synthetic::stress(&config, &mut hard).unwrap();
    for (name, t) in &plain.0 {
        hard.get(name).unwrap().expect(name, t.dtype(), &t.shape).unwrap();
    }
    let gate = hard.get("ffn_residual_gate").unwrap().to_f32("gate").unwrap();
    let (alpha, _) = muse_spark_layer::weights::derived::residual_coefficients(&config, &gate);
    let floor = config.residual_gate_eps.sqrt();
    assert!(alpha.contains(&floor) && alpha.iter().any(|a| *a > floor));
    let scales = hard.get("w2_sf").unwrap().as_e4m3("w2_sf").unwrap();
    assert!(scales[..scales.len() / 8].iter().all(|b| *b < 8), "expert 0's scales are subnormal");
}
