//! Checkpoints that are refused, each with an error that names file, tensor, what was wanted and what was
//! found.

use crate::files::{
    edit_header, edit_json, folder, rewritten, shards, small, text, text_config, Raw, RawTensors, INDEX, PREFIX,
};
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::weights::Checkpoint;
use muse_spark_layer::Error;
use rstest::rstest;
use safetensors::Dtype;
use serde_json::{json, Map, Value};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

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
#[case::interleaved_codes("quantization_config.interleaved", json!({"quantization_config": {"quant_algo": "NVFP4", "interleaved": 1}}), "rows in halves")]
#[case::window("sliding_window", json!({"text_config": {"sliding_window": null}}), "null")]
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
    let written = AtomicU64::new(0);
    let count = |n| _ = written.fetch_add(n, Ordering::Relaxed);
    write(&folder("synth-count"), &SynthSpec::small(), &count).unwrap();
    assert_eq!(written.into_inner(), SynthSpec::small().bytes());
    for (spec, says) in [
        (SynthSpec { only_layers: Some(vec![6]), ..SynthSpec::small() }, "layers to write: wanted below 6, got 6"),
        (SynthSpec { only_experts: Some(vec![0..4, 30..33]), ..SynthSpec::small() }, "within 0..32, got 30..33"),
    ] {
        let error = text(write(&folder("synth-only"), &spec, &|_| ()).unwrap_err());
        assert!(error.contains(says), "{error}");
    }
}
