//! What a rank takes, in whatever layout the files have it.

use crate::cpu_common::relative_l2;
use crate::files::{edit_json, rewritten, small, tensors_of, text_config, PREFIX};
use crate::load::loaded_step;
use half::bf16;
use muse_spark_layer::synthetic;
use muse_spark_layer::tensor::{HostData, NamedTensors};
use muse_spark_layer::weights::Checkpoint;
use muse_spark_layer::{Backend, DecoderLayer, LayerConfig, LayerKind, WeightKind};
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::{json, Map, Value};
use std::borrow::Cow;
use std::path::Path;

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
    // Many layers at once, a few at a time; each comes under its index.
    let loaded = checkpoint.load(0..6, 3, 4, |l, layer| Ok((l, synthetic::digest_all(layer.weights.host().unwrap()))));
    let wanted: Vec<(usize, u64)> = (0..6).map(|l| (l, alone[4 * l + 3])).collect();
    assert_eq!(loaded.unwrap(), wanted);
    // What a load makes need not borrow: layers outlive the checkpoint.
    let layers = checkpoint.load(0..6, 3, 4, |_, layer| DecoderLayer::new(layer.config, layer.weights, Backend::Cpu));
    let ends: Vec<bool> = layers.unwrap().iter().map(DecoderLayer::has_next_norm).collect();
    assert_eq!(ends, [true, true, true, true, true, false]);
    assert!(checkpoint.load(3..7, 3, 4, |l, _| Ok(l)).unwrap_err().to_string().contains("num_hidden_layers"));
}

fn same_layers(a: &Path, b: &Path) {
    let (a, b) = (Checkpoint::open(a).unwrap(), Checkpoint::open(b).unwrap());
    for l in 0..6 {
        let steps = [&a, &b].map(|c| loaded_step(c, l, 1, 2));
        assert_eq!((&steps[0].stream, &steps[0].hidden), (&steps[1].stream, &steps[1].hidden), "layer {l}");
        let (a, b) = (a.layer(l, 1, 2).unwrap(), b.layer(l, 1, 2).unwrap());
        assert_eq!(a.config, b.config);
        let (a, b) = (tensors_of(&a), tensors_of(&b));
        assert_eq!(a.0.len(), b.0.len());
        for ((name, a), (_, b)) in a.0.iter().zip(&b.0) {
            // FP32 stays FP32: compared as what they are worth.
            if a.dtype() == b.dtype() {
                assert_eq!(a, b, "layer {l}: {name}");
            } else {
                assert_eq!(
                    (&a.shape, a.to_f32(name).unwrap()),
                    (&b.shape, b.to_f32(name).unwrap()),
                    "layer {l}: {name}"
                );
            }
        }
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

/// FP32 gates that BF16 cannot hold stay FP32: nothing is rounded on the way, and the layer computes with them.
#[test]
fn wide_vectors_are_not_rounded() {
    let name = format!("{PREFIX}1.post_attention_residual_gate.gate");
    let with_gates = |folder: &str, gate: &dyn Fn(usize) -> f32| {
        let dir = rewritten(folder, |all| {
            let t = all.get_mut(&name).unwrap();
            t.data = (0..t.shape[0]).flat_map(|i| gate(i).to_le_bytes()).collect();
            t.dtype = Dtype::F32;
        });
        Checkpoint::open(dir).unwrap()
    };
    let wide = |i: usize| 0.1 + i as f32 / 64.0;
    let [exact, rounded] =
        [with_gates("wide", &wide), with_gates("wide-rounded", &|i| bf16::from_f32(wide(i)).to_f32())];
    let layer = exact.layer(1, 0, 2).unwrap();
    let gate = layer.weights.host().unwrap().get("attn_residual_gate").unwrap().as_f32("gate").unwrap().to_vec();
    assert_eq!(gate[..2], [0.1, 0.1 + 1.0 / 64.0]);
    let [a, b] = [&exact, &rounded].map(|c| loaded_step(c, 1, 0, 2).stream);
    let distance = relative_l2(&a, &b);
    assert!((1e-5..1e-2).contains(&distance), "{distance:.1e}");
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
        t.insert("n_shared_experts".into(), 0.into());
        t.insert("moe_w13_interleaved".into(), false.into());
        for key in ["output_multiplier", "rms_norm_eps", "post_norm_eps", "residual_gate_temperature", "hidden_act"] {
            t.remove(key);
        }
    });
    // Not the text model's.
    edit_json(&dir.join("config.json"), |m| _ = m.insert("vision_config".into(), json!({"interleaved": true})));
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
    // Other spellings of the released constants are the released constants; other values are kept.
    edit_json(&dir.join("config.json"), |m| {
        text_config(m).insert("output_multiplier".into(), json!(0.176_776_7));
        text_config(m).insert("qk_scale_factor".into(), json!(5.473_006_5));
        text_config(m).insert("residual_gate_temperature".into(), json!(0.300_001));
    });
    let config = Checkpoint::open(&dir).unwrap().model().layer(0, 8, WeightKind::Nvfp4).unwrap();
    assert_eq!(config, LayerConfig { residual_temperature: 0.300_001, ..LayerConfig::muse_spark_tp8() });
    // The text model's settings may also stand at the top.
    edit_json(&dir.join("config.json"), |m| *m = json!({"num_hidden_layers": 9}).as_object().unwrap().clone());
    assert_eq!(Checkpoint::open(&dir).unwrap().model().layers.len(), 9);
}
