//! Layers of a checkpoint against transformers' results on the same files.

use crate::cpu_common::{close, exact, relative_l2, widen};
use crate::files::{shards, small, tensors_of};
use half::bf16;
use muse_spark_layer::backend::cpu::{AttentionSegment, CpuLayer};
use muse_spark_layer::synthetic::{self, StepSpec, SyntheticStep};
use muse_spark_layer::tensor::{HostTensor, NamedTensors};
use muse_spark_layer::weights::{Checkpoint, SafetensorsFile};
use muse_spark_layer::{LayerConfig, LayerKind, WeightKind};
use rayon::prelude::*;
use rstest::rstest;
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;

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
                layer.attention_block(attn_input, &batch, &mut cache.view(), &options).unwrap();
            add(&mut attn_out, &part.attn_out);
            attn_core.push(part.attn_core);
        }
        let (mut moe_mix, mut topk_ids, mut after) = (Vec::new(), Vec::new(), Vec::new());
        for (layer, local_start) in &self.ranks {
            let part = layer.moe_block(stream, &attn_out, *local_start, None).unwrap();
            add(&mut moe_mix, &part.moe_mix);
            (topk_ids, after) = (part.topk_ids, part.stream_after_attn);
        }
        let mut ffn_out = Vec::new();
        for (rank, (layer, _)) in self.ranks.iter().enumerate() {
            // Sliced: zeros but for the rank's columns. Whole: the same on every rank.
            if rank == 0 || self.config().sliced(tokens) {
                add(&mut ffn_out, &layer.unpool_block(&moe_mix, rank).unwrap());
            }
        }
        let end = self.ranks[0].0.ffn_block(&after, &ffn_out).unwrap();
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
            close(&format!("layer {l} rank {rank}: attn_core"), own, &wanted, 3e-6);
        }
        let mut ids = got.topk_ids.clone();
        ids.chunks_exact_mut(config.top_k).for_each(<[i32]>::sort);
        assert_eq!(ids, golden.get(l, "topk_ids").as_i32("topk_ids").unwrap()[..ids.len()], "layer {l}");
        let mix = got.moe_mix.len();
        for (name, got, n) in
            [("attn_out", &got.attn_out, hidden), ("moe_mix", &got.moe_mix, mix), ("stream", &got.stream, hidden)]
        {
            println!("layer {l} {name}: {:.1e}", relative_l2(got, &golden.f32(l, name, n)));
            close(&format!("layer {l}: {name}"), got, &golden.f32(l, name, n), 3e-6);
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
    // Last bits of FP32 sums turn some BF16 inputs and E4M3 keys the other way, six layers deep.
    let wanted = golden.f32(layers - 1, "stream", stream.len());
    println!("stream after {layers} layers: {:.1e}", relative_l2(&stream, &wanted));
    close("stream", &stream, &wanted, 1e-2);
    assert!(attn_input.is_empty());
}
