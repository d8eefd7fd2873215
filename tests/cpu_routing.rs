//! Top 8 and the expert lists against brute force, ties, infinities and NaN included.

use muse_spark_layer::routing::{self, ExpertLists};
use muse_spark_layer::LayerConfig;
use proptest::prelude::*;
use rstest::rstest;

/// Repeatedly the largest that is left, the first of them; a NaN only when nothing else is left.
fn brute_force(values: &[f32], k: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..values.len()).collect();
    (0..k)
        .map(|_| {
            let mut best = 0;
            for i in 1..left.len() {
                let (a, b) = (values[left[i]], values[left[best]]);
                if a > b || (b.is_nan() && !a.is_nan()) {
                    best = i;
                }
            }
            left.remove(best)
        })
        .collect()
}

fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => (0..6i32).prop_map(|i| i as f32 * 0.25), // ties
        4 => -2f32..2.0,
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(-0.0f32),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn top_k_is_brute_force(values in prop::collection::vec(value(), 8..300), k in 1usize..9) {
        let got = routing::top_k(&values, k);
        prop_assert_eq!(&got, &brute_force(&values, k));
    }

    #[test]
    fn ids_are_distinct_and_in_range(logits in prop::collection::vec(value(), 256)) {
        let config = LayerConfig::muse_spark_tp8();
        let logits: Vec<f64> = logits.iter().map(|&v| f64::from(v) * 1e30).collect();
        let mut ids = routing::router_topk(&config, &logits, &[0.0; 256]).ids;
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), 8);
        prop_assert!(ids.iter().all(|id| (0..256).contains(id)));
    }

    #[test]
    fn weights_sum_to_one_and_come_from_unbiased_scores(
        logits in prop::collection::vec(-20f64..20.0, 256), bias in prop::collection::vec(-0.5f32..0.5, 256),
    ) {
        let config = LayerConfig::muse_spark_tp8();
        let out = routing::router_topk(&config, &logits, &bias);
        prop_assert!((out.scores.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        let scores: Vec<f32> = out.ids.iter().map(|&e| routing::route_score(&config, logits[e as usize])).collect();
        for i in 0..8 {
            let (share, want) = (out.scores[i] / out.scores[0], scores[i] / scores[0]);
            prop_assert!((share - want).abs() <= 1e-5 * want.abs());
        }
        // The bias chooses.
        let biased: Vec<f32> =
            logits.iter().zip(&bias).map(|(&l, b)| routing::route_score(&config, l) + b).collect();
        let want: Vec<i32> = brute_force(&biased, 8).iter().map(|&e| e as i32).collect();
        prop_assert_eq!(out.ids, want);
    }

    #[test]
    fn lists_hold_every_local_route_once(ids in prop::collection::vec(0i32..256, 0..200), start in 0i32..512) {
        let config = LayerConfig::muse_spark_tp8();
        let ids = &ids[..ids.len() / 8 * 8];
        let lists = ExpertLists::new(&config, ids, start, usize::MAX);
        let mut found = 0;
        for e in 0..32 {
            let id = (start + e as i32) % 256;
            let want: Vec<usize> = (0..ids.len()).filter(|&i| ids[i] == id).map(|i| i / 8).collect();
            prop_assert_eq!(&lists.route_token[lists.offsets[e]..lists.offsets[e + 1]], &want[..]);
            found += want.len();
        }
        prop_assert_eq!(lists.routes(), found);
        for (i, route) in lists.token_route.iter().enumerate() {
            match *route {
                Some(r) => prop_assert_eq!(lists.route_token[r], i / 8),
                None => prop_assert!(routing::local_expert(&config, ids[i], start).is_none()),
            }
        }
    }
}

#[test]
fn equal_scores_take_the_lowest_ids() {
    let config = LayerConfig::muse_spark_tp8();
    let out = routing::router_topk(&config, &[0.0; 256], &[0.0; 256]);
    assert_eq!(out.ids, (0..8).collect::<Vec<_>>());
    assert_eq!(out.scores, [0.125; 8]);
    // A larger one in the middle goes first, then again the lowest.
    let mut logits = [0.0; 256];
    logits[100] = 1.0;
    assert_eq!(routing::router_topk(&config, &logits, &[0.0; 256]).ids, [100, 0, 1, 2, 3, 4, 5, 6]);
}

#[rstest]
#[case(f64::NAN)]
#[case(f64::INFINITY)]
#[case(f64::NEG_INFINITY)]
fn not_finite_logits_give_distinct_ids(#[case] logit: f64) {
    let config = LayerConfig::muse_spark_tp8();
    assert_eq!(routing::router_topk(&config, &[logit; 256], &[0.0; 256]).ids, (0..8).collect::<Vec<_>>());
    let mut logits = [0.5; 256];
    logits[3] = f64::NAN;
    assert_eq!(routing::router_topk(&config, &logits, &[0.0; 256]).ids, [0, 1, 2, 4, 5, 6, 7, 8]);
}

/// 240..=255, then 0..=15.
#[test]
fn local_ranges_wrap() {
    let config = LayerConfig::muse_spark_tp8();
    for (id, local) in [(240, Some(0)), (255, Some(15)), (0, Some(16)), (15, Some(31)), (16, None), (239, None)] {
        assert_eq!(routing::local_expert(&config, id, 240), local, "id {id}");
    }
    for rank in 0..8 {
        for id in 0..256 {
            let local = routing::local_expert(&config, id, 32 * rank);
            assert_eq!(local, (id / 32 == rank).then_some((id % 32) as usize));
        }
    }
}

#[test]
fn padding_takes_no_route() {
    let config = LayerConfig::muse_spark_tp8();
    let ids: Vec<i32> = (0..24).collect();
    let lists = ExpertLists::new(&config, &ids, 0, 2);
    assert_eq!(lists.routes(), 16);
    assert!(lists.token_route[16..].iter().all(|r| r.is_none()));
}

#[test]
fn the_busiest_range_is_the_first_of_the_fullest() {
    let config = LayerConfig::muse_spark_tp8();
    assert_eq!(routing::busiest_start(&config, &[]), 0);
    assert_eq!(routing::busiest_start(&config, &[64, 65, 40, 41, 200]), 32);
    assert_eq!(routing::busiest_start(&config, &[255, 254, 0]), 224);
}
