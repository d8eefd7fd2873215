//! The CPU layer against results of two implementations that are not ours: the specification
//! (`tests/golden/reference`) and transformers' decoder layer (`tests/golden/transformers`). The scripts
//! beside the files say how they were made.

mod cpu_common;

use cpu_common::{close, exact, relative_l2, run, widen};
use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions, StepOutput};
use muse_spark_layer::numerics::e4m3_to_f32;
use muse_spark_layer::synthetic::{self, Dist, Spread, StepSpec, SyntheticStep};
use muse_spark_layer::tensor::{DType, HostTensor, NamedTensors};
use muse_spark_layer::{LayerConfig, LayerKind, QueryPrecision, WeightKind};
use rstest::rstest;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::Path;

/// A golden file: its tensors and its case.
struct Golden {
    tensors: NamedTensors<'static>,
    case: Value,
}

impl Golden {
    fn read(folder: &str, name: &str) -> Golden {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(folder);
        let bytes = std::fs::read(path.join(format!("{name}.safetensors"))).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let case = &metadata.metadata().as_ref().unwrap()["case"];
        let case = serde_json::from_str(case).unwrap();
        let mut tensors = NamedTensors::new();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let dtype = match view.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::BF16 => DType::Bf16,
                Dtype::I32 => DType::I32,
                Dtype::U8 => DType::U8,
                other => panic!("{name}: {other:?}"),
            };
            // The file's data may be unaligned: through a fresh buffer of the widest alignment.
            let words: Vec<i64> = view
                .data()
                .chunks(8)
                .map(|c| {
                    let mut word = [0; 8];
                    word[..c.len()].copy_from_slice(c);
                    i64::from_le_bytes(word)
                })
                .collect();
            let aligned = HostTensor::i64(&[words.len()], words);
            let bytes = &aligned.bytes()[..view.data().len()];
            tensors.insert(&name, HostTensor::from_bytes(&name, dtype, view.shape(), bytes).unwrap().into_owned());
        }
        Golden { tensors, case }
    }

    fn config(&self) -> LayerConfig {
        let c = &self.case["config"];
        let n = |key: &str| c[key].as_u64().unwrap() as usize;
        LayerConfig {
            hidden: n("hidden"),
            head_dim: n("head_dim"),
            q_heads: n("q_heads"),
            kv_heads: n("kv_heads"),
            window: n("window"),
            rope_theta: c["rope_theta"].as_f64().unwrap(),
            expert_dim: n("expert_dim"),
            n_experts: n("n_experts"),
            local_experts: n("local_experts"),
            top_k: n("top_k"),
            unpool_slice: n("unpool_slice"),
            sliced_max_tokens: n("sliced_max_tokens"),
            experts: c["experts"].as_str().unwrap().parse::<WeightKind>().unwrap(),
            ..LayerConfig::muse_spark_tp8()
        }
    }

    fn spec(&self) -> StepSpec {
        let s = &self.case["spec"];
        StepSpec {
            q_lens: s["q_lens"].as_array().unwrap().iter().map(|q| q.as_u64().unwrap() as usize).collect(),
            ctx: s["ctx"].as_u64().unwrap() as usize,
            kind: s["kind"].as_str().unwrap().parse::<LayerKind>().unwrap(),
            spread: serde_json::from_value::<Spread>(s["spread"].clone()).unwrap(),
            dist: serde_json::from_value::<Dist>(s["dist"].clone()).unwrap(),
            page_size: s["page_size"].as_u64().unwrap() as usize,
            k_scale: s["k_scale"].as_f64().unwrap() as f32,
            v_scale: s["v_scale"].as_f64().unwrap() as f32,
            local_start: s["local_start"].as_i64().unwrap() as i32,
        }
    }

    /// Layer and step, made here and checked to be bit for bit what the golden's script had.
    fn make(&self) -> (CpuLayer<'static>, SyntheticStep) {
        let (config, seed) = (self.config(), self.case["seed"].as_u64().unwrap());
        let mut weights = synthetic::weights(&config, seed).unwrap();
        if self.case["stress"] == true {
            synthetic::stress(&config, &mut weights).unwrap();
        }
        assert_eq!(
            format!("{:016x}", synthetic::digest_all(&weights)),
            self.case["weights_digest"],
            "the weights are not those of the golden file"
        );
        if self.case["merged"] == true {
            let gs = weights.get("w13_gs").unwrap().as_f32("w13_gs").unwrap();
            let gate: Vec<f32> = gs.iter().step_by(2).copied().collect();
            weights.insert("w13_gs", HostTensor::f32(&[gate.len()], gate));
        }
        let step = synthetic::step(&config, &self.spec(), seed).unwrap();
        assert_eq!(
            format!("{:016x}", synthetic::digest_all(&inputs(&step))),
            self.case["inputs_digest"],
            "the inputs are not those of the golden file"
        );
        (CpuLayer::new(config, weights).unwrap(), step)
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        self.tensors.get(name).unwrap().to_f32(name).unwrap()
    }

    /// Outputs and taps within `bound`; expert ids equal.
    fn check(&self, out: &StepOutput, bound: f64) {
        let taps = out.taps.as_ref().unwrap();
        assert_eq!(out.topk_ids, self.tensors.get("topk_ids").unwrap().as_i32("topk_ids").unwrap(), "topk_ids");
        for (name, got) in taps.named() {
            if self.tensors.contains(name) {
                println!("{name}: {:.2e}", relative_l2(got, &self.f32(name)));
                close(name, got, &self.f32(name), bound);
            }
        }
        println!("stream: {:.2e}", relative_l2(&out.stream, &self.f32("stream")));
        close("stream", &out.stream, &self.f32("stream"), bound);
        // `hidden` is BF16 in the reference's files: a last bit may fall the other way.
        close("hidden", &widen(&out.hidden), &self.f32("hidden"), 2e-3);
    }
}

fn inputs(step: &SyntheticStep) -> NamedTensors<'_> {
    let (i, c) = (&step.input, &step.cache);
    let mut out = NamedTensors::new();
    out.insert("stream", HostTensor::f32(&[i.stream.len()], &i.stream[..]));
    out.insert("attn_input", HostTensor::bf16(&[i.attn_input.len()], &i.attn_input[..]));
    out.insert("positions", HostTensor::i64(&[i.positions.len()], &i.positions[..]));
    out.insert("cache_loc", HostTensor::i64(&[i.cache_loc.len()], &i.cache_loc[..]));
    out.insert("cu_seqlens_q", HostTensor::i32(&[i.cu_seqlens_q.len()], &i.cu_seqlens_q[..]));
    out.insert("cache_seqlens", HostTensor::i32(&[i.cache_seqlens.len()], &i.cache_seqlens[..]));
    out.insert("page_table", HostTensor::i32(&[i.page_table.len()], &i.page_table[..]));
    out.insert("k_cache", HostTensor::e4m3(&[c.k.len()], &c.k[..]));
    out.insert("v_cache", HostTensor::e4m3(&[c.v.len()], &c.v[..]));
    out
}

/// New cache entries: equal but for single roundings that fall the other way (one E4M3 step is 1/8).
fn check_entries(what: &str, config: &LayerConfig, cache: &[u8], slots: &[i64], want: &[u8]) {
    let width = config.kv_size();
    let got: Vec<u8> = slots.iter().flat_map(|&s| cache[s as usize * width..][..width].iter().copied()).collect();
    let different = got.iter().zip(want).filter(|(g, w)| g != w).count();
    assert!(different * 1000 <= want.len(), "{what}: {different} of {} bytes differ", want.len());
    let values = |x: &[u8]| x.iter().map(|&b| e4m3_to_f32(b)).collect::<Vec<_>>();
    close(what, &values(&got), &values(want), 5e-3);
}

#[rstest]
fn specification(
    #[values(
        "decode-full",
        "decode-sliding",
        "decode-bf16",
        "decode-fp16",
        "decode-e4m3",
        "decode-empty",
        "decode-window-edge-1",
        "decode-window-edge",
        "decode-far",
        "decode-9",
        "verify-8",
        "verify-scales",
        "verify-stress",
        "prefill-40",
        "prefill-260"
    )]
    name: &str,
) {
    let golden = Golden::read("reference", name);
    let (layer, mut step) = golden.make();
    let query: QueryPrecision = golden.case["query"].as_str().unwrap().parse().unwrap();
    let options = StepOptions { query, ..exact(golden.spec().kind) };
    let out = run(&layer, &mut step, &options);
    // A rounded query that falls the other way moves a logit by 2^-9 (BF16), 2^-4 (E4M3).
    let bound = match query {
        QueryPrecision::Fp32 => 3e-6,
        QueryPrecision::Bf16 | QueryPrecision::Fp16 => 3e-5,
        QueryPrecision::E4m3 => 3e-4,
    };
    golden.check(&out, bound);
    for (name, cache) in [("k_new", &step.cache.k), ("v_new", &step.cache.v)] {
        let want = golden.tensors.get(name).unwrap().as_u8(name).unwrap();
        check_entries(name, layer.config(), cache, &step.input.cache_loc, want);
    }
}

/// The whole sequence as one prefill.
#[rstest]
fn transformers(#[values("full-nvfp4", "sliding-nvfp4", "sliding-bf16")] name: &str) {
    let golden = Golden::read("transformers", name);
    let (layer, mut step) = golden.make();
    let first = golden.case["first"].as_i64().unwrap();
    step.input.positions.iter_mut().for_each(|p| *p += first);
    let out = run(&layer, &mut step, &exact(golden.spec().kind));
    golden.check(&out, 1e-5);
}

/// The same sequences in pieces: a prefill, verify blocks and single tokens, each after the former.
#[rstest]
fn transformers_step_by_step(#[values("full-nvfp4", "sliding-nvfp4", "sliding-bf16")] name: &str) {
    let golden = Golden::read("transformers", name);
    let (layer, whole) = golden.make();
    let config = layer.config().clone();
    let first = golden.case["first"].as_i64().unwrap();
    let (hidden, tokens) = (config.hidden, whole.input.positions.len());
    let mut cache = whole.cache.clone();
    let mut got = Vec::new();
    let mut at = 0;
    for size in [9, 8, 1, 1, 3, 8].into_iter().chain(std::iter::repeat(1)) {
        if at == tokens {
            break;
        }
        let end = at + size;
        let mut input = whole.input.clone();
        input.stream = whole.input.stream[at * hidden..end * hidden].to_vec();
        input.attn_input = whole.input.attn_input[at * hidden..end * hidden].to_vec();
        input.positions = whole.input.positions[at..end].iter().map(|p| p + first).collect();
        input.cache_loc = whole.input.cache_loc[at..end].to_vec();
        input.cu_seqlens_q = vec![0, size as i32];
        input.cache_seqlens = vec![end as i32];
        let out = layer.forward(&input.view(), &mut cache.view(), &exact(golden.spec().kind)).unwrap();
        got.extend(out.stream);
        at = end;
    }
    close("stream", &got, &golden.f32("stream"), 1e-5);
}
