//! Checkpoints in the public format: a synthetic one against transformers' layer (`tests/golden/checkpoint`,
//! made from the same files by the official reader), other layouts of the same files, and bad ones.

mod cpu_common;

use cpu_common::{close, exact, relative_l2, widen};
use half::bf16;
use muse_spark_layer::backend::cpu::{AttentionSegment, CpuLayer};
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::tensor::{HostData, HostTensor, NamedTensors};
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::weights::checkpoint::{Checkpoint, CheckpointLayer};
use muse_spark_layer::weights::SafetensorsFile;
use muse_spark_layer::{Error, LayerConfig, LayerKind, WeightKind};
use rayon::prelude::*;
use rstest::rstest;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{json, Map, Value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const PREFIX: &str = "model.language_model.layers.";
const INDEX: &str = "model.safetensors.index.json";

/// A new folder of the test `name`.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoint").join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// The small synthetic checkpoint, written for the test `name`.
fn small(name: &str) -> PathBuf {
    let dir = folder(name);
    write(&dir, &SynthSpec::small(), &|_| ()).unwrap();
    dir
}

fn shards(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path());
    let mut shards: Vec<PathBuf> = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

fn tensors_of(layer: &CheckpointLayer) -> NamedTensors<'static> {
    NamedTensors(layer.weights.host().unwrap().0.iter().map(|(k, v)| (k.clone(), v.clone().into_owned())).collect())
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What transformers made of the small checkpoint.
struct Golden {
    tensors: NamedTensors<'static>,
    case: Value,
}

impl Golden {
    fn read() -> Golden {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint/small.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let case = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["case"]).unwrap();
        let file = SafetensorsFile::open(&path).unwrap();
        let tensors = file.tensors().unwrap().0.into_iter().map(|(k, v)| (k, v.into_owned())).collect();
        Golden { tensors: NamedTensors(tensors), case }
    }

    fn get(&self, layer: usize, name: &str) -> &HostTensor<'static> {
        self.tensors.get(&format!("{layer}.{name}")).unwrap()
    }

    /// The first `n` elements, as FP32.
    fn f32(&self, layer: usize, name: &str, n: usize) -> Vec<f32> {
        self.get(layer, name).to_f32(name).unwrap()[..n].to_vec()
    }

    fn attn_input(&self, layer: usize, n: usize) -> Vec<bf16> {
        self.get(layer, "attn_input").as_bf16("attn_input").unwrap()[..n].to_vec()
    }

    /// The step of the golden's first `tokens` tokens on a rank of `config`.
    fn step(&self, config: &LayerConfig, tokens: usize) -> SyntheticStep {
        let number = |key: &str| self.case[key].as_f64().unwrap();
        let all = number("tokens") as usize;
        let scales = |spec: StepSpec| StepSpec {
            page_size: 16,
            k_scale: number("k_scale") as f32,
            v_scale: number("v_scale") as f32,
            ..spec
        };
        let seed = number("seed") as u64;
        let mut step = synthetic::step(config, &scales(StepSpec::new(1, all, 0, LayerKind::Full)), seed).unwrap();
        let cut = synthetic::step(config, &scales(StepSpec::new(1, tokens, 0, LayerKind::Full)), seed).unwrap();
        // The same tokens, fewer of them: causal attention leaves their results alone.
        step.input.stream.truncate(tokens * config.hidden);
        let stream = step.input.stream;
        SyntheticStep { input: synthetic::SyntheticInput { stream, ..cut.input }, cache: cut.cache }
    }
}

/// All ranks of one layer, as a deployment runs it: segments, and the sums between them.
struct Deployment {
    ranks: Vec<(CpuLayer<'static>, i32)>,
    kind: LayerKind,
}

struct Results {
    attn_core: Vec<Vec<f32>>,
    attn_out: Vec<f32>,
    topk_ids: Vec<i32>,
    moe_mix: Vec<f32>,
    stream: Vec<f32>,
    hidden: Vec<f32>,
}

fn add(sum: &mut Vec<f32>, part: &[f32]) {
    sum.resize(part.len(), 0.0);
    sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
}

impl Deployment {
    fn load(checkpoint: &Checkpoint, layer: usize, ranks: usize) -> Deployment {
        let loaded: Vec<(CpuLayer<'static>, i32)> = (0..ranks)
            .into_par_iter()
            .map(|rank| {
                let part = checkpoint.layer(layer, rank, ranks).unwrap();
                (CpuLayer::new(part.config.clone(), tensors_of(&part)).unwrap(), part.local_start)
            })
            .collect();
        Deployment { ranks: loaded, kind: checkpoint.model().layers[layer].kind }
    }

    fn config(&self) -> &LayerConfig {
        self.ranks[0].0.config()
    }

    /// `step` is the rank's: its cache is taken once by each rank.
    fn run(&self, step: &SyntheticStep, stream: &[f32], attn_input: &[bf16]) -> Results {
        let tokens = step.input.positions.len();
        let (mut attn_core, mut attn_out) = (Vec::new(), Vec::new());
        for (layer, _) in &self.ranks {
            let (mut cache, batch) = (step.cache.clone(), step.input.view().batch);
            let options = exact(self.kind);
            let part: AttentionSegment =
                layer.attention_segment(attn_input, &batch, &mut cache.view(), &options).unwrap();
            add(&mut attn_out, &part.attn_out);
            attn_core.push(part.attn_core);
        }
        let (mut moe_mix, mut topk_ids, mut after) = (Vec::new(), Vec::new(), Vec::new());
        for (layer, local_start) in &self.ranks {
            let part = layer.moe_segment(stream, &attn_out, *local_start, None).unwrap();
            add(&mut moe_mix, &part.moe_mix);
            (topk_ids, after) = (part.topk_ids, part.stream_after_attn);
        }
        let mut ffn_out = Vec::new();
        for (rank, (layer, _)) in self.ranks.iter().enumerate() {
            // Sliced: zeros but for the rank's columns. Whole: the same on every rank.
            if rank == 0 || self.config().sliced(tokens) {
                add(&mut ffn_out, &layer.unpool_segment(&moe_mix, rank).unwrap());
            }
        }
        let end = self.ranks[0].0.ffn_segment(&after, &ffn_out).unwrap();
        Results { attn_core, attn_out, topk_ids, moe_mix, stream: end.stream, hidden: end.hidden }
    }
}

/// The checkpoint on disk is the one the golden was made from.
fn check_digest(dir: &Path, golden: &Golden) {
    let digest = shards(dir).iter().fold(0u64, |sum, path| {
        let file = SafetensorsFile::open(path).unwrap();
        sum.wrapping_add(synthetic::digest_all(&file.tensors().unwrap()))
    });
    assert_eq!(format!("{digest:016x}"), golden.case["digest"], "not the golden's checkpoint");
}

/// Every layer (sliding and full, first and last, NVFP4 and BF16 experts) on 1 to 8 ranks, each from the
/// golden's own inputs; 8 tokens run the sliced unpooler.
#[rstest]
fn layers_are_transformers(#[values(1, 2, 4, 8)] ranks: usize, #[values(28, 8)] tokens: usize) {
    let (golden, dir) = (Golden::read(), small(&format!("layers-{ranks}-{tokens}")));
    check_digest(&dir, &golden);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let mut kinds = Vec::new();
    for l in 0..checkpoint.model().layers.len() {
        let layer = Deployment::load(&checkpoint, l, ranks);
        let config = layer.config().clone();
        kinds.push((layer.kind, config.experts));
        let (step, hidden) = (golden.step(&config, tokens), tokens * config.hidden);
        let stream = if l == 0 { step.input.stream.clone() } else { golden.f32(l - 1, "stream", hidden) };
        let got = layer.run(&step, &stream, &golden.attn_input(l, hidden));

        let width = config.q_size() * ranks;
        let core = golden.f32(l, "attn_core", tokens * width);
        for (rank, own) in got.attn_core.iter().enumerate() {
            let part = own.len() / tokens;
            let wanted: Vec<f32> =
                core.chunks_exact(width).flat_map(|row| row[rank * part..(rank + 1) * part].to_vec()).collect();
            close(&format!("layer {l} rank {rank}: attn_core"), own, &wanted, 1e-5);
        }
        let mut ids = got.topk_ids.clone();
        ids.chunks_exact_mut(config.top_k).for_each(<[i32]>::sort);
        assert_eq!(ids, golden.get(l, "topk_ids").as_i32("topk_ids").unwrap()[..ids.len()], "layer {l}");
        let mix = got.moe_mix.len();
        for (name, got, n) in
            [("attn_out", &got.attn_out, hidden), ("moe_mix", &got.moe_mix, mix), ("stream", &got.stream, hidden)]
        {
            println!("layer {l} {name}: {:.1e}", relative_l2(got, &golden.f32(l, name, n)));
            close(&format!("layer {l}: {name}"), got, &golden.f32(l, name, n), 1e-5);
        }
        if l + 1 < checkpoint.model().layers.len() {
            // BF16 there: half of its last bit.
            close(&format!("layer {l}: hidden"), &got.hidden, &golden.f32(l + 1, "attn_input", hidden), 3e-3);
        } else {
            assert!(got.hidden.is_empty(), "the last layer gives the stream only");
        }
    }
    use {LayerKind::*, WeightKind::*};
    assert_eq!(kinds[0], (Sliding, Bf16));
    assert_eq!(kinds[1], (Full, Nvfp4));
    assert_eq!(kinds[2], (Sliding, Nvfp4));
    assert_eq!(kinds[5], (Full, Bf16));
}

/// The whole stack on two ranks, from the stream and layer 0's own input norm on.
#[test]
fn a_stack_starts_from_its_input_norm() {
    let (golden, dir) = (Golden::read(), small("stack"));
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let config = checkpoint.layer_config(0, 2).unwrap();
    let step = golden.step(&config, 28);
    let weight = checkpoint.input_norm(0).unwrap().to_f32("input_norm").unwrap();
    let mut stream = step.input.stream.clone();
    let mut attn_input: Vec<bf16> = Vec::new();
    for row in stream.chunks_exact(config.hidden) {
        let squares: f32 = row.iter().map(|v| v * v).sum();
        let inverse = 1.0 / (squares / config.hidden as f32 + config.rms_eps).sqrt();
        attn_input.extend(row.iter().zip(&weight).map(|(v, w)| bf16::from_f32(v * inverse * (1.0 + w))));
    }
    close("attn_input", &widen(&attn_input), &golden.f32(0, "attn_input", attn_input.len()), 3e-4);
    let layers = checkpoint.model().layers.len();
    for l in 0..layers {
        let got = Deployment::load(&checkpoint, l, 2).run(&step, &stream, &attn_input);
        stream = got.stream;
        attn_input = got.hidden.iter().map(|&v| bf16::from_f32(v)).collect();
    }
    close("stream", &stream, &golden.f32(layers - 1, "stream", stream.len()), 1e-3);
    assert!(attn_input.is_empty());
}

/// Slices of all ranks, laid side by side, are each other's complement: every element of the files once.
#[test]
fn ranks_share_out_every_row() {
    let dir = small("share");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for l in 0..6 {
        let whole = tensors_of(&checkpoint.layer(l, 0, 1).unwrap());
        let parts: Vec<NamedTensors> = (0..8).map(|r| tensors_of(&checkpoint.layer(l, r, 8).unwrap())).collect();
        for (name, tensor) in &whole.0 {
            if name.starts_with("w13") || name.starts_with("w2") {
                let bytes: Vec<u8> = parts.iter().flat_map(|p| p.0[name].bytes().to_vec()).collect();
                assert_eq!(bytes, tensor.bytes(), "{name}");
            } else if name == "o" || name == "qkv_gate" {
                let mut got: Vec<u16> =
                    parts.iter().flat_map(|p| p.0[name].as_bf16(name).unwrap()).map(|v| v.to_bits()).collect();
                let mut want: Vec<u16> = tensor.as_bf16(name).unwrap().iter().map(|v| v.to_bits()).collect();
                got.sort_unstable();
                want.sort_unstable();
                assert_eq!(got, want, "{name}");
            } else {
                assert!(parts.iter().all(|p| p.0[name] == *tensor), "{name}");
            }
        }
    }
}

/// Only what is permuted, fused or cut by columns is copied; the copies are what `parts` says they are.
#[test]
fn rows_are_views_of_the_map() {
    let dir = small("views");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for l in 0..6 {
        let layer = checkpoint.layer(l, 1, 2).unwrap();
        let tensors = layer.weights.host().unwrap();
        for (name, tensor) in &tensors.0 {
            let owned = match &tensor.data {
                HostData::Bf16(x) => matches!(x, Cow::Owned(_)),
                HostData::F32(x) => matches!(x, Cow::Owned(_)),
                HostData::U8(x) | HostData::E4m3(x) => matches!(x, Cow::Owned(_)),
                other => panic!("{name}: {other:?}"),
            };
            assert_eq!(owned, name == "o" || name == "qkv_gate", "{name}");
        }
        let parts = checkpoint.parts(l, 1, 2).unwrap();
        let bytes: u64 = tensors.0.values().map(|t| t.bytes().len() as u64).sum();
        assert_eq!(parts.iter().map(|p| p.bytes).sum::<u64>(), bytes);
        assert!(parts.iter().all(|p| p.copied == (p.tensor == "o" || p.tensor == "qkv_gate")));
    }
}

/// Layers and ranks load at once, on many threads, to the same bits.
#[test]
fn layers_load_in_parallel() {
    let dir = small("parallel");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let digest = |l: usize, r: usize| synthetic::digest_all(checkpoint.layer(l, r, 4).unwrap().weights.host().unwrap());
    let pairs: Vec<(usize, usize)> = (0..6).flat_map(|l| (0..4).map(move |r| (l, r))).collect();
    let alone: Vec<u64> = pairs.iter().map(|&(l, r)| digest(l, r)).collect();
    for _ in 0..4 {
        let together: Vec<u64> = pairs.par_iter().map(|&(l, r)| digest(l, r)).collect();
        assert_eq!(alone, together);
    }
}

/// A tensor in memory.
struct Raw {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

type RawTensors = BTreeMap<String, Raw>;

/// The small checkpoint with its tensors changed, in one file without an index.
fn rewritten(name: &str, change: impl FnOnce(&mut RawTensors)) -> PathBuf {
    let dir = small(name);
    let mut all = RawTensors::new();
    for path in shards(&dir) {
        let bytes = std::fs::read(&path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            all.insert(name, Raw { dtype: view.dtype(), shape: view.shape().into(), data: view.data().into() });
        }
        std::fs::remove_file(path).unwrap();
    }
    std::fs::remove_file(dir.join(INDEX)).unwrap();
    change(&mut all);
    let views = all.iter().map(|(k, t)| (k.clone(), TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
    dir
}

fn same_layers(a: &Path, b: &Path) {
    let (a, b) = (Checkpoint::open(a).unwrap(), Checkpoint::open(b).unwrap());
    for l in 0..6 {
        let (a, b) = (a.layer(l, 1, 2).unwrap(), b.layer(l, 1, 2).unwrap());
        assert_eq!(a.config, b.config);
        assert_eq!(tensors_of(&a), tensors_of(&b), "layer {l}");
    }
}

/// The same weights laid out otherwise load to the same tensors: one file, a text-only model's names,
/// FP32 vectors that hold BF16 values, block scales called bytes, odd alignment.
#[test]
fn other_layouts_of_the_same_weights() {
    let shards = small("layout-shards");
    same_layers(&shards, &rewritten("layout-single", |_| ()));
    same_layers(
        &shards,
        &rewritten("layout-text", |all| {
            *all = std::mem::take(all)
                .into_iter()
                .map(|(k, t)| (k.replace("model.language_model.", "model."), t))
                .collect();
        }),
    );
    same_layers(
        &shards,
        &rewritten("layout-wide", |all| {
            for (name, t) in all.iter_mut() {
                if name.ends_with("_gate.gate") || name.ends_with("norm.weight") {
                    let values = t.data.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32());
                    t.data = values.flat_map(f32::to_le_bytes).collect();
                    t.dtype = Dtype::F32;
                }
                if name.ends_with("_weight_scale") {
                    t.dtype = Dtype::U8;
                }
            }
        }),
    );
    // A header whose length is no multiple of the elements' size.
    let odd = rewritten("layout-odd", |_| ());
    let path = odd.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut moved = (length as u64 + 1).to_le_bytes().to_vec();
    moved.extend(&bytes[8..8 + length]);
    moved.push(b' ');
    moved.extend(&bytes[8 + length..]);
    std::fs::write(&path, moved).unwrap();
    same_layers(&shards, &odd);
}

/// FP32 gates that BF16 cannot hold stay FP32: nothing is rounded on the way.
#[test]
fn wide_vectors_are_not_rounded() {
    let name = format!("{PREFIX}1.post_attention_residual_gate.gate");
    let dir = rewritten("wide", |all| {
        let t = all.get_mut(&name).unwrap();
        t.data = (0..t.shape[0]).flat_map(|i| (0.1f32 + i as f32).to_le_bytes()).collect();
        t.dtype = Dtype::F32;
    });
    let checkpoint = Checkpoint::open(dir).unwrap();
    let layer = checkpoint.layer(1, 0, 2).unwrap();
    let gate = layer.weights.host().unwrap().get("attn_residual_gate").unwrap().as_f32("gate").unwrap().to_vec();
    assert_eq!(gate[..2], [0.1, 1.1]);
}

#[test]
fn documented_defaults() {
    let dir = small("defaults");
    let edit =
        |change: &dyn Fn(&mut Map<String, Value>)| edit_json(&dir.join("config.json"), |m| change(text_config(m)));
    edit(&|t| {
        for key in ["layer_types", "layer_rope_theta", "rope_parameters", "mlp_layer_types", "qk_scale_factor"] {
            t.remove(key);
        }
        for key in ["output_multiplier", "rms_norm_eps", "post_norm_eps", "residual_gate_temperature", "hidden_act"] {
            t.remove(key);
        }
    });
    let untouched = small("defaults-untouched");
    let (a, b) = (Checkpoint::open(&dir).unwrap(), Checkpoint::open(untouched).unwrap());
    assert_eq!(a.model().layers, b.model().layers);
    for l in 0..6 {
        assert_eq!(a.layer_config(l, 8).unwrap(), b.layer_config(l, 8).unwrap());
    }
    // Without any dimension, the released model: its constants, and full attention on layers 1, 5, ..., 61.
    edit_json(&dir.join("config.json"), |m| *m = json!({"text_config": {}}).as_object().unwrap().clone());
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let model = checkpoint.model();
    assert_eq!(model.layers.len(), 62);
    for (i, layer) in model.layers.iter().enumerate() {
        assert_eq!(layer.kind, LayerKind::of_layer(i));
        assert_eq!(layer.rope_theta, if i % 4 == 1 { 0.0 } else { 500_000.0 });
        let config = model.layer(i, 8, WeightKind::Nvfp4).unwrap();
        assert_eq!(config, LayerConfig::muse_spark_tp8());
    }
    // The text model's settings may also stand at the top.
    edit_json(&dir.join("config.json"), |m| *m = json!({"num_hidden_layers": 9}).as_object().unwrap().clone());
    assert_eq!(Checkpoint::open(&dir).unwrap().model().layers.len(), 9);
}

fn edit_json(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let Ok(Value::Object(mut map)) = serde_json::from_slice(&std::fs::read(path).unwrap()) else { panic!("{path:?}") };
    change(&mut map);
    std::fs::write(path, Value::Object(map).to_string()).unwrap();
}

fn text_config(map: &mut Map<String, Value>) -> &mut Map<String, Value> {
    map["text_config"].as_object_mut().unwrap()
}

/// Changes the header of the first shard.
fn edit_header(dir: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = &shards(dir)[0];
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let Ok(Value::Object(mut map)) = serde_json::from_slice(&bytes[8..8 + length]) else { panic!() };
    change(&mut map);
    let header = Value::Object(map).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[8 + length..]);
    std::fs::write(path, out).unwrap();
}

/// Opening, or loading layer 1 of rank 1 of 2, fails with an error that says all of `wanted`.
fn refused(dir: &Path, wanted: &[&str]) {
    let error = Checkpoint::open(dir).and_then(|c| c.layer(1, 1, 2).map(|_| ())).expect_err("refused");
    let kind = matches!(error, Error::Checkpoint { .. } | Error::Format { .. } | Error::File { .. });
    assert!(kind, "{error:?}");
    let message = text(error);
    println!("{message}");
    for part in wanted {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[rstest]
#[case::method("quant_method", json!({"quantization_config": {"quant_method": "compressed-tensors"}}), "compressed-tensors")]
#[case::algorithm("quant_algo", json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}), "FP8")]
#[case::no_algorithm("quant_algo", json!({"quantization_config": {"quant_method": "modelopt"}}), "none")]
#[case::group("group_size", json!({"quantization_config": {"quant_algo": "NVFP4", "group_size": 32}}), "32")]
#[case::groups("group_size", json!({"quantization_config": {"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 64}}}}}), "64")]
#[case::shape("quantization_config", json!({"quantization_config": "nvfp4"}), "nvfp4")]
#[case::interleaved("moe_w13_interleaved", json!({"text_config": {"moe_w13_interleaved": true}}), "rows in halves")]
#[case::interleaved_rope("rope_interleave", json!({"text_config": {"rope_interleave": true}}), "rows in halves")]
#[case::shared("n_shared_experts", json!({"text_config": {"n_shared_experts": 1}}), "no shared experts")]
#[case::scaled("rope_scaling.rope_type", json!({"text_config": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}}), "not scaled")]
#[case::scaled_type("rope_parameters.rope_type", json!({"text_config": {"rope_parameters": {"rope_type": "llama3"}}}), "llama3")]
#[case::factor("rope_parameters.factor", json!({"text_config": {"rope_parameters": {"factor": 8.0}}}), "8.0")]
#[case::partial("rope_parameters.partial_rotary_factor", json!({"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5}}}), "0.5")]
#[case::dense("mlp_layer_types[2]", json!({"text_config": {"mlp_layer_types": ["sparse", "sparse", "dense", "sparse", "sparse", "sparse"]}}), "dense")]
#[case::kinds("layer_types", json!({"text_config": {"layer_types": ["full_attention"]}}), "6 elements")]
#[case::kind("layer_types[0]", json!({"text_config": {"layer_types": ["chunked", 0, 0, 0, 0, 0]}}), "chunked")]
#[case::rope_on_full("layer_rope_theta[1]", json!({"text_config": {"layer_rope_theta": [5e5, 5e5, 5e5, 5e5, 5e5, 0]}}), "full attention has no RoPE")]
#[case::no_rope("layer_rope_theta[0]", json!({"text_config": {"layer_rope_theta": [0, 0, 5e5, 5e5, 5e5, 0]}}), "sliding attention has RoPE")]
#[case::bias("attention_bias", json!({"text_config": {"attention_bias": true}}), "wanted false")]
#[case::activation("hidden_act", json!({"text_config": {"hidden_act": "gelu"}}), "gelu")]
#[case::model("model_type", json!({"text_config": {"model_type": "llama"}}), "llama")]
#[case::widths("moe_hidden_size", json!({"text_config": {"moe_hidden_size": 64}}), "moe_intermediate_size = 32")]
#[case::number("hidden_size", json!({"text_config": {"hidden_size": -3}}), "an integer")]
#[case::heads("num_key_value_heads", json!({"text_config": {"num_key_value_heads": 7}}), "a multiple of 2 ranks")]
#[case::groups_of_heads("q_heads", json!({"text_config": {"num_key_value_heads": 6}}), "a multiple of kv_heads")]
#[case::top_k("top_k", json!({"text_config": {"num_experts_per_tok": 33}}), "at most")]
#[case::odd_head("head_dim", json!({"text_config": {"head_dim": 15}}), "even")]
#[case::eps("rms_norm_eps", json!({"text_config": {"rms_norm_eps": "small"}}), "a number")]
fn configurations_refused_by_name(#[case] field: &str, #[case] change: Value, #[case] says: &str) {
    let dir = small(&format!("refused-{field}-{}", says.replace(' ', "-")));
    std::fs::remove_file(dir.join("hf_quant_config.json")).unwrap();
    edit_json(&dir.join("config.json"), |config| {
        for (key, value) in change.as_object().unwrap() {
            match value {
                Value::Object(inner) if key == "text_config" => text_config(config).extend(inner.clone()),
                other => _ = config.insert(key.clone(), other.clone()),
            }
        }
    });
    refused(&dir, &["config.json", field, says]);
}

#[test]
fn quantisations_in_their_own_file_are_refused_too() {
    let dir = small("hf-quant");
    let path = dir.join("hf_quant_config.json");
    for (change, says) in [
        (
            json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION"}}),
            "MIXED_PRECISION",
        ),
        (json!({"producer": {"name": "quark"}, "quantization": {"quant_algo": "NVFP4"}}), "quark"),
        (json!({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}), "32"),
    ] {
        std::fs::write(&path, change.to_string()).unwrap();
        refused(&dir, &["hf_quant_config.json", says]);
    }
    std::fs::write(&path, "{").unwrap();
    refused(&dir, &["hf_quant_config.json", "not JSON"]);
}

/// Tensors that are wrong: each error names file, tensor, what was wanted and what was found.
#[rstest]
#[case::missing("self_attn.k_proj.weight", |t: &mut RawTensors, n: &str| _ = t.remove(n), &["wanted this tensor", "none"])]
#[case::scale_missing("mlp.experts.down_proj_weight_scale_2", |t: &mut RawTensors, n: &str| _ = t.remove(n), &["none"])]
#[case::experts_missing("mlp.experts.gate_up_proj", |t: &mut RawTensors, n: &str| _ = t.remove(n), &["none"])]
#[case::rows("self_attn.q_proj.weight", |t: &mut RawTensors, n: &str| reshape(t, n, &[128, 128]), &["[256, 64]", "[128, 128]"])]
#[case::columns("self_attn.o_proj.weight", |t: &mut RawTensors, n: &str| reshape(t, n, &[256, 64]), &["[64, 256]", "[256, 64]"])]
#[case::experts("mlp.experts.gate_up_proj", |t: &mut RawTensors, n: &str| reshape(t, n, &[16, 128, 16]), &["[32, 64, 16]", "[16, 128, 16]"])]
#[case::scales("mlp.experts.gate_up_proj_weight_scale", |t: &mut RawTensors, n: &str| reshape(t, n, &[32, 2, 64]), &["[32, 64, 2]", "[32, 2, 64]"])]
#[case::global_scales("mlp.experts.gate_up_proj_weight_scale_2", |t: &mut RawTensors, n: &str| reshape(t, n, &[2, 32]), &["[32, 2]", "[2, 32]"])]
#[case::rank_of_norm("pre_feedforward_layernorm.weight", |t: &mut RawTensors, n: &str| reshape(t, n, &[1, 64]), &["[64]", "[1, 64]"])]
#[case::half("self_attn.v_proj.weight", |t: &mut RawTensors, n: &str| retype(t, n, Dtype::F16), &["bf16", "F16"])]
#[case::router("mlp.gate.weight", |t: &mut RawTensors, n: &str| retype(t, n, Dtype::I32), &["f32", "I32"])]
#[case::codes("mlp.experts.down_proj", |t: &mut RawTensors, n: &str| retype(t, n, Dtype::I8), &["u8", "I8"])]
#[case::kind("mlp.experts.gate_up_proj", |t: &mut RawTensors, n: &str| retype(t, n, Dtype::F8_E4M3), &["U8 (NVFP4) or BF16", "F8_E4M3"])]
#[case::scale_type("mlp.experts.down_proj_weight_scale", |t: &mut RawTensors, n: &str| retype(t, n, Dtype::F8_E8M0), &["e4m3", "F8_E8M0"])]
#[case::nan("mlp.experts.gate_up_proj_weight_scale", |t: &mut RawTensors, n: &str| t.get_mut(n).unwrap().data[17 * 128 + 5 * 2 + 1] = 0xff, &["NaN at [17, 5, 1]"])]
#[case::nan_last("mlp.experts.down_proj_weight_scale", |t: &mut RawTensors, n: &str| *t.get_mut(n).unwrap().data.last_mut().unwrap() = 0x7f, &["NaN at [31, 31, 1]"])]
#[case::nan_global("mlp.experts.gate_up_proj_weight_scale_2", |t: &mut RawTensors, n: &str| set(t, n, 35, f32::NAN), &["finite", "NaN at 35"])]
#[case::infinite("mlp.experts.down_proj_weight_scale_2", |t: &mut RawTensors, n: &str| set(t, n, 16, f32::INFINITY), &["finite", "inf at 16"])]
#[case::negative("mlp.experts.down_proj_weight_scale_2", |t: &mut RawTensors, n: &str| set(t, n, 16, -1.0), &["-1 at 16"])]
#[case::shared("mlp.shared_experts.up_proj.weight", |t: &mut RawTensors, n: &str| extra(t, n), &["shared experts"])]
#[case::bias("self_attn.q_proj.bias", |t: &mut RawTensors, n: &str| extra(t, n), &["only the tensors of", "BF16 [4]"])]
fn tensors_refused_by_name(#[case] suffix: &str, #[case] change: fn(&mut RawTensors, &str), #[case] says: &[&str]) {
    let name = format!("{PREFIX}1.{suffix}");
    let dir =
        rewritten(&format!("tensor-{suffix}-{}", says.last().unwrap().replace(' ', "-")), |all| change(all, &name));
    refused(&dir, &[&["model.safetensors", name.as_str()], says].concat());
    // Other layers are none the worse.
    Checkpoint::open(&dir).unwrap().layer(3, 1, 2).unwrap();
}

fn reshape(all: &mut RawTensors, name: &str, shape: &[usize]) {
    all.get_mut(name).unwrap().shape = shape.to_vec();
}

fn retype(all: &mut RawTensors, name: &str, dtype: Dtype) {
    all.get_mut(name).unwrap().dtype = dtype;
}

fn set(all: &mut RawTensors, name: &str, i: usize, value: f32) {
    all.get_mut(name).unwrap().data[4 * i..4 * i + 4].copy_from_slice(&value.to_le_bytes());
}

fn extra(all: &mut RawTensors, name: &str) {
    all.insert(name.into(), Raw { dtype: Dtype::BF16, shape: vec![4], data: vec![0; 8] });
}

/// A NaN scale is the error of the rank that holds it, and of no other.
#[test]
fn bad_experts_are_their_ranks_own() {
    let name = format!("{PREFIX}1.mlp.experts.gate_up_proj_weight_scale");
    let dir = rewritten("own", |all| all.get_mut(&name).unwrap().data[0] = 0x7f);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert!(text(checkpoint.layer(1, 0, 2).unwrap_err()).contains("NaN at [0, 0, 0]"));
    checkpoint.layer(1, 1, 2).unwrap();
}

/// The next layer's norm is missing or wrong: the layer before it does not load without it.
#[test]
fn the_next_layers_norm_is_needed() {
    let name = format!("{PREFIX}2.input_layernorm.weight");
    refused(&rewritten("next-missing", |all| _ = all.remove(&name)), &[&name, "none"]);
    refused(&rewritten("next-shape", |all| reshape(all, &name, &[8, 8])), &[&name, "[64]", "[8, 8]"]);
}

#[test]
fn ranks_and_layers_out_of_range() {
    let dir = small("range");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for (layer, rank, ranks, says) in [
        (1, 2, 2, ["rank", "below 2", "got 2"]),
        (1, 0, 0, ["ranks", "at least 1", "got 0"]),
        (6, 0, 2, ["layer", "below num_hidden_layers = 6", "got 6"]),
        (1, 0, 3, ["num_attention_heads", "a multiple of 3 ranks", "got 16"]),
        (1, 0, 16, ["num_key_value_heads", "a multiple of 16 ranks", "got 8"]),
    ] {
        let message = text(checkpoint.layer(layer, rank, ranks).unwrap_err());
        assert!(says.iter().all(|s| message.contains(s)), "{message}");
    }
    assert!(text(checkpoint.input_norm(6).unwrap_err()).contains("num_hidden_layers"));
}

/// Files that are away, cut short or not what they say.
#[test]
fn files_refused_by_name() {
    let fresh = |name: &str| {
        let dir = small(name);
        let first = shards(&dir)[0].clone();
        (dir, first)
    };
    let (dir, _) = fresh("no-config");
    std::fs::remove_file(dir.join("config.json")).unwrap();
    refused(&dir, &["config.json"]);

    let (dir, first) = fresh("no-shard");
    std::fs::remove_file(first).unwrap();
    refused(&dir, &["model-00001-of-00009.safetensors"]);

    let dir = small("no-weights");
    shards(&dir).iter().for_each(|p| std::fs::remove_file(p).unwrap());
    std::fs::remove_file(dir.join(INDEX)).unwrap();
    refused(&dir, &["no-weights", INDEX, "neither"]);

    for (name, keep) in [("empty", 0), ("five", 5), ("header", 200), ("data", 100_000)] {
        let (dir, first) = fresh(&format!("truncated-{name}"));
        let bytes = std::fs::read(&first).unwrap();
        std::fs::write(&first, &bytes[..keep]).unwrap();
        refused(&dir, &["model-00001-of-00009.safetensors", "truncated"]);
    }
    let (dir, first) = fresh("garbage");
    std::fs::write(&first, [b"\x10\0\0\0\0\0\0\0".as_slice(), &[7; 64]].concat()).unwrap();
    refused(&dir, &["model-00001-of-00009.safetensors", "header"]);

    let (dir, first) = fresh("twice");
    let listed = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let header = format!(r#"{{"model.layers.0.x":{listed},"model.layers.0.x":{listed}}}"#);
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0]].concat();
    std::fs::write(&first, bytes).unwrap();
    refused(&dir, &["model-00001-of-00009.safetensors", "model.layers.0.x", "got two"]);
}

/// Headers whose tensors overlap, reach past the file, run backwards or do not hold what they claim.
#[test]
fn headers_refused_by_name() {
    let name = format!("{PREFIX}0.mlp.experts.post_expert_norm.weight");
    for (case, offsets, says) in [
        // input_layernorm is bytes 0 to 128, post_expert_norm 128 to 192.
        ("overlap", [64, 128], "overlap"),
        ("far", [1u64 << 40, (1 << 40) + 64], "truncated"),
        ("backwards", [192, 128], "in order"),
        ("short", [128, 190], "64 bytes"),
    ] {
        let dir = small(&format!("header-{case}"));
        edit_header(&dir, |map| map[&name]["data_offsets"] = json!(offsets));
        refused(
            &dir,
            &["model-00001-of-00009.safetensors", if case == "overlap" { "input_layernorm" } else { &name }, says],
        );
    }
    let dir = small("header-huge");
    edit_header(&dir, |map| map[&name]["shape"] = json!([u64::MAX, 2]));
    refused(&dir, &[&name, "too many"]);
}

#[test]
fn indexes_refused_by_name() {
    let name = format!("{PREFIX}1.self_attn.q_proj.weight");
    let index = |case: &str, change: &dyn Fn(&mut Map<String, Value>)| {
        let dir = small(&format!("index-{case}"));
        edit_json(&dir.join(INDEX), |root| change(root["weight_map"].as_object_mut().unwrap()));
        dir
    };
    let first = "model-00001-of-00009.safetensors";
    refused(&index("elsewhere", &|m| m[&name] = first.into()), &[INDEX, &name, "no such tensor", first]);
    refused(&index("gone", &|m| _ = m.remove(&name)), &[INDEX, &name, "none of that name"]);
    refused(&index("away", &|m| m[&name] = "model-9.safetensors".into()), &["model-9.safetensors"]);
    refused(&index("outside", &|m| m[&name] = "../model.safetensors".into()), &[INDEX, &name, "same folder"]);
    refused(&index("number", &|m| m[&name] = 3.into()), &[INDEX, &name, "got 3"]);
    refused(&index("other-model", &|m| m.clear()), &[INDEX, "model.language_model.layers.", "none"]);
    let dir = small("index-no-map");
    std::fs::write(dir.join(INDEX), "{}").unwrap();
    refused(&dir, &[INDEX, "weight_map"]);
    std::fs::write(dir.join(INDEX), "[").unwrap();
    refused(&dir, &[INDEX, "not JSON"]);
    // Shards of other parts of the model may be away.
    let dir = index("vision", &|m| _ = m.insert("model.vision.x".into(), "model-vision.safetensors".into()));
    Checkpoint::open(dir).unwrap().layer(1, 1, 2).unwrap();
}

#[test]
fn synth_writes_only_into_new_folders() {
    let dir = small("synth-twice");
    let error = text(write(&dir, &SynthSpec::small(), &|_| ()).unwrap_err());
    assert!(error.contains("empty folder"), "{error}");
    let spec = SynthSpec { layers: 0, ..SynthSpec::small() };
    assert!(write(&folder("synth-none"), &spec, &|_| ()).is_err());
    let written = std::cell::Cell::new(0);
    write(&folder("synth-count"), &SynthSpec::small(), &|n| written.set(written.get() + n)).unwrap();
    assert_eq!(written.get(), SynthSpec::small().bytes());
}

/// The command line writes a checkpoint, reports on it, and fails with exit code 2 where there is none.
#[test]
fn command_line() {
    let Some(program) = option_env!("CARGO_BIN_EXE_muse-spark-layer") else { return };
    let dir = folder("command-line");
    let run = |args: &[&str]| std::process::Command::new(program).args(args).output().unwrap();
    let path = dir.to_str().unwrap();
    assert!(run(&["synth", "--out", path, "--layers", "3", "--all-nvfp4"]).status.success());
    let out = run(&["inspect", path, "--layer", "2", "--rank", "7", "--json"]);
    assert!(out.status.success());
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["local_start"], 28);
    assert_eq!(report["kind"], "full");
    assert_eq!(report["has_next_norm"], false);
    assert_eq!(report["parts"].as_array().unwrap().len(), 21);
    assert_eq!(report["scales"].as_array().unwrap().len(), 5);
    let table = String::from_utf8(run(&["inspect", path]).stdout).unwrap();
    assert!(table.contains("mlp.experts.gate_up_proj_weight_scale_2") && table.contains("w13_gs up"), "{table}");
    let failed = run(&["inspect", path, "--rank", "8"]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(String::from_utf8(failed.stderr).unwrap().contains("rank: wanted below 8"));
    assert_eq!(run(&["inspect", "/nowhere"]).status.code(), Some(2));
}
