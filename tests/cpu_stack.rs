//! The stack of layers on the CPU: it is its layers one by one, each kind on its own pages; what does not fit is
//! refused by name.

mod cpu_common;

use cpu_common::{nothing, spec, with};
use muse_spark_layer::backend::cpu::{StepInput, StepOptions, StepOutput};
use muse_spark_layer::stack::HostStackInput;
use muse_spark_layer::synthetic::{self, SyntheticCache, SyntheticStep};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DecoderStack, DeviceTensor, LayerConfig, LayerKind, LayerWeights, PerKind, PlanKey,
    QueryPrecision, StackPlan, Taps, WeightKind,
};
use rstest::rstest;

/// Layer 1 of 4 is full, the others slide, as in the released model.
const LAYERS: usize = 4;

fn weights(config: &LayerConfig, i: usize) -> LayerWeights<'_> {
    LayerWeights::from_host(config, synthetic::weights(config, 60 + i as u64).unwrap()).unwrap()
}

fn layer(config: &LayerConfig, i: usize) -> DecoderLayer {
    DecoderLayer::new(config.clone(), weights(config, i), Backend::Cpu).unwrap()
}

fn stack(config: &LayerConfig) -> DecoderStack {
    DecoderStack::new((0..LAYERS).map(|i| (LayerKind::of_layer(i), layer(config, i))).collect()).unwrap()
}

/// The same requests as both kinds see them (other pages), and a cache for each layer.
fn steps(config: &LayerConfig, q_lens: &[usize]) -> (PerKind<SyntheticStep>, Vec<SyntheticCache>) {
    let of = |kind, seed| {
        let spec = synthetic::StepSpec { q_lens: q_lens.to_vec(), ..spec(1, 1, 30, kind, 4) };
        synthetic::step(config, &spec, seed).unwrap()
    };
    let steps = PerKind { full: of(LayerKind::Full, 71), sliding: of(LayerKind::Sliding, 72) };
    assert_ne!(steps.full.input.page_table, steps.sliding.input.page_table);
    let cache = |i| {
        synthetic::step(
            config,
            &synthetic::StepSpec { q_lens: q_lens.to_vec(), ..spec(1, 1, 30, LayerKind::Full, 4) },
            80 + i,
        )
    };
    (steps, (0..LAYERS as u64).map(|i| cache(i).unwrap().cache).collect())
}

fn run(stack: &DecoderStack, steps: &PerKind<SyntheticStep>, caches: &mut [SyntheticCache]) -> Vec<StepOutput> {
    let input = HostStackInput {
        stream: &steps.full.input.stream,
        attn_input: &steps.full.input.attn_input,
        batches: PerKind { full: steps.full.input.view().batch, sliding: steps.sliding.input.view().batch },
        local_start: 8,
        num_tokens_non_padded: None,
    };
    let mut views: Vec<_> = caches.iter_mut().map(|c| c.view()).collect();
    stack.forward_host(&input, &mut views, &StepOptions::new(LayerKind::Full, QueryPrecision::Fp16)).unwrap()
}

#[rstest]
fn a_stack_is_its_layers_one_by_one(#[values(&[1, 1, 1], &[8, 0, 8], &[1, 20, 0, 8, 1])] q_lens: &[usize]) {
    let config = LayerConfig::small();
    let (steps, caches) = steps(&config, q_lens);
    let mut of_stack = caches.clone();
    let got = run(&stack(&config), &steps, &mut of_stack);
    let (mut stream, mut attn_input) = (steps.full.input.stream.clone(), steps.full.input.attn_input.clone());
    let mut alone = caches;
    for (i, got) in got.iter().enumerate() {
        let kind = LayerKind::of_layer(i);
        assert_eq!(kind == LayerKind::Full, i == 1);
        let batch = if kind == LayerKind::Full { &steps.full } else { &steps.sliding };
        let input = StepInput { stream: &stream, attn_input: &attn_input, local_start: 8, ..batch.input.view() };
        let options = StepOptions::new(kind, QueryPrecision::Fp16);
        let want = layer(&config, i).forward_host(&input, &mut alone[i].view(), &options).unwrap();
        assert_eq!(*got, want, "layer {i}");
        (stream, attn_input) = (want.stream, want.hidden);
    }
    assert!(of_stack == alone, "caches");
    assert_ne!(got[0].stream, got[3].stream);
}

#[test]
fn an_empty_step_is_nothing() {
    let config = LayerConfig::small();
    let (_, mut caches) = steps(&config, &[1]);
    let before = caches.clone();
    let nothing = nothing();
    let input = HostStackInput {
        stream: &[],
        attn_input: &[],
        batches: PerKind::both(nothing.batch),
        local_start: 0,
        num_tokens_non_padded: None,
    };
    let mut views: Vec<_> = caches.iter_mut().map(|c| c.view()).collect();
    let options = StepOptions::new(LayerKind::Full, QueryPrecision::Fp16);
    let out = stack(&config).forward_host(&input, &mut views, &options).unwrap();
    assert!(out.len() == LAYERS && out.iter().all(|o| o.stream.is_empty()));
    assert!(caches == before);
}

#[test]
fn the_last_layer_may_lack_the_next_norm_and_no_other() {
    let config = LayerConfig::small();
    let last = |i: usize| {
        let tensors = with(&synthetic::weights(&config, 60 + i as u64).unwrap(), |w| {
            w.0.remove("next_pre_attn_norm");
        });
        let weights = LayerWeights::from_host(&config, tensors).unwrap();
        DecoderLayer::new(config.clone(), weights, Backend::Cpu).unwrap()
    };
    let made = |at: usize| {
        let layers = (0..LAYERS).map(|i| (LayerKind::of_layer(i), if i == at { last(i) } else { layer(&config, i) }));
        DecoderStack::new(layers.collect())
    };
    assert_eq!(made(2).unwrap_err().to_string(), "layers[2].next_pre_attn_norm: missing");
    let (steps, caches) = steps(&config, &[1, 8]);
    let out = run(&made(3).unwrap(), &steps, &mut caches.clone());
    let want = run(&stack(&config), &steps, &mut caches.clone());
    assert!(out[3].hidden.is_empty() && !want[3].hidden.is_empty());
    assert_eq!(out[3].stream, want[3].stream);
}

#[test]
fn layers_that_do_not_fit_are_refused() {
    let config = LayerConfig::small();
    assert_eq!(DecoderStack::new(Vec::new()).unwrap_err().to_string(), "layers: missing");
    let other = LayerConfig { window: 12, ..config.clone() };
    let layers = vec![(LayerKind::Sliding, layer(&config, 0)), (LayerKind::Full, layer(&other, 1))];
    let text = DecoderStack::new(layers).unwrap_err().to_string();
    assert_eq!(text, "layers[1]: wanted the configuration of layer 0, got another one");
    // The experts' form is a layer's own: layers 0 and 61 have BF16 experts.
    let bf16 = LayerConfig { experts: WeightKind::Bf16, ..config.clone() };
    let stack = DecoderStack::new(vec![
        (LayerKind::Sliding, layer(&bf16, 0)),
        (LayerKind::Full, layer(&config, 1)),
        (LayerKind::Sliding, layer(&config, 2)),
        (LayerKind::Sliding, layer(&config, 3)),
    ])
    .unwrap();
    let plan = stack.plan(&PerKind::both(PlanKey::decode(4, 64))).unwrap();
    assert_eq!((plan.plans.len(), &plan.of_layer[..]), (3, &[0, 1, 2, 2][..]));
    assert_eq!(plan.layer(0).key.kind, LayerKind::Sliding);
    assert_eq!(plan.layer(1).key.kind, LayerKind::Full);
    assert!(plan.to_string().contains("layers 2, 3: 4 tokens of 4 requests"), "{plan}");
    let copy: StackPlan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(copy, plan);
}

#[test]
fn keys_that_are_not_one_step_are_refused() {
    let stack = stack(&LayerConfig::small());
    let key = PlanKey::decode(4, 64);
    let plan = |sliding: PlanKey| stack.plan(&PerKind { full: key.clone(), sliding });
    // Another table and page size are the kind's own.
    let plan_of_two = plan(PlanKey { table_width: 16, page_size: 16, skip_slot_zero: true, ..key.clone() }).unwrap();
    assert_eq!((plan_of_two.layer(0).key.page_size, plan_of_two.layer(1).key.page_size), (16, 1));
    let text = plan(PlanKey { tokens: 5, max_q_len: 2, ..key.clone() }).unwrap_err().to_string();
    assert_eq!(text, "plan: tokens was planned as 4 for full layers, the call has 5 for sliding ones");
    let taps = PlanKey { taps: Taps::All, ..key.clone() };
    let text = stack.plan(&PerKind::both(taps)).unwrap_err().to_string();
    assert_eq!(text, "stack backend: taps of a stack (plan a single layer for them) is not supported");
}

#[test]
fn calls_that_do_not_fit_are_refused() {
    let config = LayerConfig::small();
    let stack = stack(&config);
    let (steps, mut caches) = steps(&config, &[1, 1]);
    let mut input = HostStackInput {
        stream: &steps.full.input.stream,
        attn_input: &steps.full.input.attn_input,
        batches: PerKind { full: steps.full.input.view().batch, sliding: steps.sliding.input.view().batch },
        local_start: 0,
        num_tokens_non_padded: None,
    };
    let options = StepOptions::new(LayerKind::Full, QueryPrecision::Fp16);
    let mut views: Vec<_> = caches.iter_mut().map(|c| c.view()).collect();
    let text = stack.forward_host(&input, &mut views[..3], &options).unwrap_err().to_string();
    assert_eq!(text, "caches: wanted one for each of 4 layers, got 3");
    // A fault of one kind's tensors is found at the first layer of that kind, and the layer is named.
    input.batches.full.positions = &[1];
    let text = stack.forward_host(&input, &mut views, &options).unwrap_err().to_string();
    assert_eq!(text, "layers[1].positions: wanted shape [2], got [1]");
}

#[test]
fn a_stack_on_the_cpu_has_no_device_memory() {
    let stack = stack(&LayerConfig::small());
    let plan = stack.plan(&PerKind::both(PlanKey::decode(1, 8))).unwrap();
    assert_eq!((plan.workspace_bytes, stack.weight_bytes()), (0, 0));
    let mut workspace = stack.workspace(&plan).unwrap();
    let text = device_call(&stack, &plan, &mut workspace).to_string();
    assert_eq!(text, "CPU backend: a step on device memory (use `forward_host`) is not supported");
}

#[allow(unsafe_code)]
fn device_call(
    stack: &DecoderStack,
    plan: &StackPlan,
    workspace: &mut muse_spark_layer::Workspace,
) -> muse_spark_layer::Error {
    use muse_spark_layer::stack::KindInput;
    use muse_spark_layer::{PagedKvCache, StackInput, StackOutput, Stream};
    // SAFETY: refused before anything follows an address.
    let view = |dtype, shape: &[usize]| unsafe { DeviceTensor::contiguous(0x7000_0000_0000, dtype, shape) };
    let kind = KindInput {
        cache_loc: view(DType::I64, &[1]),
        cache_seqlens: view(DType::I32, &[1]),
        page_table: view(DType::I32, &[1, 8]),
        scheduler_metadata: None,
    };
    let cache = view(DType::E4m3, &[0, 1, 2, 64]);
    let cache = muse_spark_layer::stack::LayerCache {
        cache: PagedKvCache::new(cache.clone(), cache).unwrap(),
        k_scale: view(DType::F32, &[1]),
        v_scale: view(DType::F32, &[1]),
    };
    let input = StackInput {
        attn_input: view(DType::Bf16, &[1, 8192]),
        stream: view(DType::F32, &[1, 8192]),
        positions: view(DType::I64, &[1]),
        cu_seqlens_q: view(DType::I32, &[2]),
        kinds: PerKind::both(kind),
        caches: vec![cache; 4],
        local_start: view(DType::I32, &[1]),
        num_tokens_non_padded: None,
    };
    let output =
        StackOutput { hidden: None, stream: view(DType::F32, &[1, 8192]), streams: Vec::new(), topk_ids: None };
    stack.forward(plan, workspace, &input, &output, Stream::LEGACY).unwrap_err()
}

/// Threads use one stack at the same time: each gets what it gets alone.
#[test]
fn threads_share_a_stack() {
    let config = LayerConfig::small();
    let stack = stack(&config);
    std::thread::scope(|scope| {
        for q_lens in [&[1, 1, 1][..], &[8, 0, 8], &[1, 20, 0, 8, 1], &[5]] {
            let (stack, config) = (&stack, &config);
            scope.spawn(move || {
                let (steps, caches) = steps(config, q_lens);
                let want = run(stack, &steps, &mut caches.clone());
                for _ in 0..10 {
                    assert!(run(stack, &steps, &mut caches.clone()) == want);
                }
            });
        }
    });
}
