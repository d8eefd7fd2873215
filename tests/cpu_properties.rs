//! What holds for every step, over random ones: order of requests, names of pages, blocks and their steps, ranks that
//! add up, padding that touches nobody, unused memory that changes no bit, outputs linear in the route weights.

mod cpu_common;

use cpu_common::{cache_row, close, exact, layer, only, part, rows, run, tokens, with, with_pages_renamed};
use muse_spark_layer::backend::cpu::{self, CpuLayer};
use muse_spark_layer::routing::ExpertLists;
use muse_spark_layer::synthetic::{self, Dist, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::tensor::{HostTensor, NamedTensors};
use muse_spark_layer::{LayerConfig, LayerKind};
use once_cell::sync::Lazy;
use proptest::prelude::*;

/// Different blockings of the same FP32 sums.
const SAME: f64 = 3e-6;

/// Dimensions whose unpooler is whole at any number of tokens, so that steps of other sizes compare.
static CONFIG: Lazy<LayerConfig> = Lazy::new(|| LayerConfig { unpool_slice: 64, ..LayerConfig::small() });
static LAYER: Lazy<CpuLayer<'static>> = Lazy::new(|| layer(&CONFIG, 31));

prop_compose! {
    /// Up to six requests of up to nine tokens, some of none, after up to 80 cached ones.
    fn any_spec()(
        q_lens in prop::collection::vec(prop_oneof![3 => Just(1usize), 2 => 0usize..10, 1 => Just(8)], 1..7),
        ctx in 0usize..80, full in any::<bool>(), page in 0u32..6, mixed in any::<bool>(),
        soft in any::<bool>(), k_scale in 0.3f32..3.0, v_scale in 0.3f32..3.0, local_start in 0i32..32,
    ) -> StepSpec {
        StepSpec {
            q_lens,
            page_size: 1 << page,
            spread: if mixed { Spread::Mixed } else { Spread::Fixed },
            dist: if soft { Dist::Soft } else { Dist::Normal },
            k_scale,
            v_scale,
            local_start,
            ..StepSpec::new(1, 1, ctx, if full { LayerKind::Full } else { LayerKind::Sliding })
        }
    }
}

fn step(spec: &StepSpec, seed: u64) -> SyntheticStep {
    synthetic::step(&CONFIG, spec, seed).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn permuting_requests_permutes_outputs(spec in any_spec(), seed in 0u64..1000, turn in 0usize..6) {
        let step = step(&spec, seed);
        let mut order: Vec<usize> = (0..spec.q_lens.len()).rev().collect();
        order.rotate_left(turn % spec.q_lens.len());
        let (mut moved, moved_tokens) = only(&step, &order);
        let (want, got) = (run(&LAYER, &mut step.clone(), &exact(spec.kind)), run(&LAYER, &mut moved, &exact(spec.kind)));
        prop_assert_eq!(got.taps.unwrap().attn_core, rows(&want.taps.unwrap().attn_core, CONFIG.q_size(), &moved_tokens));
        close("stream", &got.stream, &rows(&want.stream, CONFIG.hidden, &moved_tokens), SAME);
    }

    #[test]
    fn page_ids_do_not_matter(spec in any_spec(), seed in 0u64..1000, shift in 1usize..1000) {
        let step = step(&spec, seed);
        let pages = step.cache.k.len() / (spec.page_size * CONFIG.kv_size());
        let mut moved = with_pages_renamed(&step, CONFIG.kv_size(), |id| (id + shift) % pages);
        prop_assert_eq!(run(&LAYER, &mut moved, &exact(spec.kind)), run(&LAYER, &mut step.clone(), &exact(spec.kind)));
    }

    #[test]
    fn a_block_is_its_decode_steps(spec in any_spec(), seed in 0u64..1000) {
        let step = step(&spec, seed);
        let want = run(&LAYER, &mut step.clone(), &exact(spec.kind)).stream;
        let (mut cache, mut got) = (step.cache.clone(), Vec::new());
        for b in 0..spec.q_lens.len() {
            for t in tokens(&step, b) {
                let mut one = part(&step, b, t..t + 1);
                one.cache = cache;
                got.extend(run(&LAYER, &mut one, &exact(spec.kind)).stream);
                cache = one.cache;
            }
        }
        close("token by token", &got, &want, SAME);
    }

    /// The mixtures of the ranks whose ranges follow each other from anywhere are that of one layer with all experts.
    #[test]
    fn ranks_sum_to_the_whole(spec in any_spec(), seed in 0u64..1000, first in 0usize..32) {
        static ALL: Lazy<(CpuLayer<'static>, NamedTensors<'static>)> = Lazy::new(|| {
            let config = LayerConfig { local_experts: CONFIG.n_experts, ..CONFIG.clone() };
            let tensors = synthetic::weights(&config, 32).unwrap();
            (CpuLayer::new(config, tensors.clone()).unwrap(), tensors)
        });
        let step = step(&StepSpec { local_start: 0, ..spec.clone() }, seed);
        let want = run(&ALL.0, &mut step.clone(), &exact(spec.kind)).taps.unwrap().moe_mix;
        let mut sum = vec![0f32; want.len()];
        for rank in 0..CONFIG.ranks() {
            let start = (first + rank * CONFIG.local_experts) % CONFIG.n_experts;
            let part = CpuLayer::new(CONFIG.clone(), local(&ALL.1, start)).unwrap();
            let mut step = step.clone();
            step.input.local_start = start as i32;
            let mix = run(&part, &mut step, &exact(spec.kind)).taps.unwrap().moe_mix;
            sum.iter_mut().zip(&mix).for_each(|(s, m)| *s += m);
        }
        close("moe_mix", &sum, &want, SAME);
    }

    /// Requests without tokens and tokens without a request, whatever they hold, do nothing to the others (whose products
    /// are of other sizes then, and round elsewhere).
    #[test]
    fn padding_touches_nobody(
        spec in any_spec(), seed in 0u64..1000, at in 0usize..7, length in any::<i32>(), page in any::<i32>(),
        activation in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(7.0)],
    ) {
        let step = step(&spec, seed);
        let want = run(&LAYER, &mut step.clone(), &exact(spec.kind));
        let (mut padded, at) = (step.clone(), at % (spec.q_lens.len() + 1));
        let x = &mut padded.input;
        // A request of no tokens, of any length and pages, in front of request `at`.
        x.cu_seqlens_q.insert(at, step.input.cu_seqlens_q[at]);
        x.cache_seqlens.insert(at, length);
        let tail = x.page_table.split_off(at * x.table_width);
        x.page_table.extend(vec![page; x.table_width]);
        x.page_table.extend(tail);
        // Two tokens of no request.
        let real = x.positions.len();
        x.positions.extend([0, i64::MAX]);
        x.cache_loc.extend([-1, -1]);
        x.stream.extend(vec![activation; 2 * CONFIG.hidden]);
        x.attn_input.extend(vec![half::bf16::from_f32(activation); 2 * CONFIG.hidden]);
        let SyntheticStep { input, cache } = &mut padded;
        let mut view = input.view();
        view.num_tokens_non_padded = Some(real);
        let got = LAYER.forward(&view, &mut cache.view(), &exact(spec.kind)).unwrap();
        close("stream", &got.stream[..real * CONFIG.hidden], &want.stream, SAME);
        prop_assert_eq!(&got.topk_ids[..real * CONFIG.top_k], &want.topk_ids[..]);
        let taps = got.taps.unwrap();
        prop_assert!(taps.attn_core[real * CONFIG.q_size()..].iter().all(|v| *v == 0.0));
        prop_assert!(taps.moe_mix[real * CONFIG.expert_dim..].iter().all(|v| *v == 0.0));
    }

    /// Slots that no token sees, entries past a request's pages or behind its window: anything there, the same bits.
    #[test]
    fn unused_memory_changes_no_bit(spec in any_spec(), seed in 0u64..1000, garbage in any::<u8>(), id in any::<i32>()) {
        let mut step = step(&spec, seed);
        let want = run(&LAYER, &mut step.clone(), &exact(spec.kind));
        let (i, kv) = (step.input.clone(), CONFIG.kv_size());
        let pages = step.cache.k.len() / kv / spec.page_size;
        let mut alive = vec![false; step.cache.k.len() / kv];
        for (b, &q_len) in spec.q_lens.iter().enumerate() {
            let seq = if q_len == 0 { 0 } else { i.cache_seqlens[b] as usize };
            let first = match spec.kind {
                LayerKind::Full => 0,
                LayerKind::Sliding => (seq + 1).saturating_sub(q_len + CONFIG.window),
            };
            for p in first..seq {
                alive[cache_row(&i.view().batch, b, p, spec.page_size, pages).unwrap()] = true;
            }
            let row = &mut step.input.page_table[b * i.table_width..(b + 1) * i.table_width];
            row[seq.div_ceil(spec.page_size)..].fill(id);
            row[..first / spec.page_size].fill(id);
        }
        for (slot, _) in alive.iter().enumerate().filter(|x| !x.1) {
            step.cache.k[slot * kv..(slot + 1) * kv].fill(garbage);
            step.cache.v[slot * kv..(slot + 1) * kv].fill(garbage);
        }
        prop_assert_eq!(run(&LAYER, &mut step, &exact(spec.kind)), want);
    }

    /// The mixture is linear in the route weights: twice the weights, twice the sum, exactly.
    #[test]
    fn the_mixture_is_linear_in_the_weights(
        ids in prop::collection::vec(0i32..32, 4..40), start in 0i32..32, power in -6i32..6,
    ) {
        let tokens = ids.len() / 4;
        let lists = ExpertLists::new(&CONFIG, &ids[..4 * tokens], start, tokens);
        let random = synthetic::Random::new(5, "y");
        let y: Vec<f32> = (0..lists.routes() * CONFIG.expert_dim).map(|i| random.normal(i as u64)).collect();
        let scores: Vec<f32> = (0..4 * tokens).map(|i| random.normal(1 << 32 | i as u64).abs()).collect();
        let scaled: Vec<f32> = scores.iter().map(|s| s * 2f32.powi(power)).collect();
        let base = cpu::combine(&CONFIG, LAYER.weights(), &y, &scores, &lists);
        let got = cpu::combine(&CONFIG, LAYER.weights(), &y, &scaled, &lists);
        prop_assert_eq!(got, base.iter().map(|v| v * 2f32.powi(power)).collect::<Vec<_>>());
    }
}

/// The experts of a range, which wraps, out of a layer that has all.
fn local(all: &NamedTensors<'static>, start: usize) -> NamedTensors<'static> {
    with(all, |w| {
        for name in ["w13", "w13_sf", "w13_gs", "w2", "w2_sf", "w2_gs"] {
            let t = all.get(name).unwrap();
            let each = t.bytes().len() / t.shape[0];
            let bytes: Vec<u8> = (start..start + CONFIG.local_experts)
                .flat_map(|e| t.bytes()[e % t.shape[0] * each..][..each].to_vec())
                .collect();
            let shape = [&[CONFIG.local_experts], &t.shape[1..]].concat();
            let words = || bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect::<Vec<_>>();
            let part = match name {
                "w13_gs" | "w2_gs" => HostTensor::f32(&shape, words()),
                "w13_sf" | "w2_sf" => HostTensor::e4m3(&shape, bytes),
                _ => HostTensor::u8(&shape, bytes),
            };
            w.insert(name, part);
        }
    })
}
