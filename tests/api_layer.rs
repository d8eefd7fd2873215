//! `DecoderLayer` and `LayerWeights`: the CPU backend whole, and errors that leave the process usable.
#![allow(unsafe_code)]

use half::bf16;
use muse_spark_layer::backend::cpu::{Batch, Cache, CpuLayer, StepInput, StepOptions};
use muse_spark_layer::weights::{names, SafetensorsFile};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceTensor, Error, HostTensor, LayerConfig, LayerKind, LayerWeights, NamedTensors,
    PlanKey, QueryPrecision, WeightKind,
};
use rstest::rstest;

/// Every tensor of a small layer, values of a small generator.
fn tensors(config: &LayerConfig) -> NamedTensors<'static> {
    let mut all = NamedTensors::new();
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        state >> 8
    };
    for spec in names::specs(config) {
        let shape = &spec.shapes[0];
        let n = shape.iter().product();
        let mut unit = || (next() & 0xffff) as f32 / 65536.0 - 0.5;
        let tensor = match spec.dtypes[0] {
            DType::Bf16 => HostTensor::bf16(shape, (0..n).map(|_| bf16::from_f32(0.3 * unit())).collect::<Vec<_>>()),
            DType::F32 => HostTensor::f32(shape, (0..n).map(|_| 0.3 * unit()).collect::<Vec<_>>()),
            DType::U8 => HostTensor::u8(shape, (0..n).map(|_| next() as u8).collect::<Vec<_>>()),
            DType::E4m3 => HostTensor::e4m3(shape, (0..n).map(|_| 0x28 + (next() as u8 & 15)).collect::<Vec<_>>()),
            other => panic!("{other}"),
        };
        all.insert(spec.name, tensor);
    }
    all
}

fn with(config: &LayerConfig, name: &str, tensor: HostTensor<'static>) -> Error {
    let mut all = tensors(config);
    all.insert(name, tensor);
    LayerWeights::from_host(config, all).unwrap_err()
}

#[rstest]
#[case(WeightKind::Nvfp4)]
#[case(WeightKind::Bf16)]
fn the_cpu_backend_runs_a_step(#[case] experts: WeightKind) {
    let config = LayerConfig { experts, ..LayerConfig::small() };
    let all = tensors(&config);
    let layer =
        DecoderLayer::new(config.clone(), LayerWeights::from_host(&config, all.view()).unwrap(), Backend::Cpu).unwrap();
    assert_eq!((layer.backend(), layer.has_next_norm(), layer.weight_bytes()), (Backend::Cpu, true, 0));
    let stream: Vec<f32> = (0..2 * config.hidden).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
    let attn_input: Vec<bf16> = stream.iter().map(|&x| bf16::from_f32(x)).collect();
    let batch = Batch {
        positions: &[3, 0],
        cache_loc: &[3, 5],
        cu_seqlens_q: &[0, 1, 2],
        cache_seqlens: &[4, 1],
        page_table: &[0, 1, 2, 3, 5, -1, -1, -1],
        table_width: 4,
        table_stride: 4,
    };
    let input =
        StepInput { stream: &stream, attn_input: &attn_input, batch, local_start: 0, num_tokens_non_padded: None };
    let options = StepOptions::new(LayerKind::Sliding, QueryPrecision::Fp16);
    let bytes = 6 * config.kv_size();
    let run = |f: &dyn Fn(&mut Cache) -> muse_spark_layer::backend::cpu::StepOutput| {
        let (mut k, mut v) = (vec![0x30; bytes], vec![0x31; bytes]);
        let mut cache = Cache { k: &mut k, v: &mut v, page_size: 1, k_scale: 1.0, v_scale: 1.0 };
        f(&mut cache)
    };
    let got = run(&|cache| layer.forward_host(&input, cache, &options).unwrap());
    let reference = CpuLayer::new(config, all.view()).unwrap();
    assert_eq!(got, run(&|cache| reference.forward(&input, cache, &options).unwrap()));
    assert!(got.stream.iter().all(|x| x.is_finite()));
}

#[test]
fn weights_that_do_not_fit_are_refused_by_name() {
    let config = LayerConfig::small();
    let e = config.local_experts;
    let text = with(&config, "o", HostTensor::bf16(&[1, 64], vec![bf16::ZERO; 64])).to_string();
    assert_eq!(text, "o: wanted shape [64, 64], got [1, 64]");
    let text = with(&config, "router", HostTensor::bf16(&[32, 64], vec![bf16::ZERO; 2048])).to_string();
    assert_eq!(text, "router: wanted f32, got bf16");
    let text = with(&config, "w13_gs", HostTensor::f32(&[e, 3], vec![0.0; 3 * e])).to_string();
    assert_eq!(text, "w13_gs: wanted shape [8, 2], got [8, 3]");
    let text = with(&config, "shared_expert", HostTensor::f32(&[1], vec![0.0])).to_string();
    assert!(text.contains("an unknown tensor `shared_expert`"), "{text}");
    let mut all = tensors(&config);
    all.0.remove("pooler");
    assert_eq!(LayerWeights::from_host(&config, all).unwrap_err().to_string(), "pooler: missing");
}

#[test]
fn a_nan_block_scale_is_named() {
    let config = LayerConfig::small();
    let shape = [config.local_experts, config.expert_dim, config.expert_dim / 16];
    let mut scales = vec![0x38; shape.iter().product()];
    scales[77] = 0xff;
    let text = with(&config, "w2_sf", HostTensor::e4m3(&shape, scales)).to_string();
    assert_eq!(text, "w2_sf: block scale 77 is NaN (0x7f or 0xff)");
}

#[test]
fn one_global_scale_for_gate_and_up_is_taken() {
    let config = LayerConfig::small();
    let mut all = tensors(&config);
    all.insert("w13_gs", HostTensor::f32(&[config.local_experts], vec![1.0; config.local_experts]));
    LayerWeights::from_host(&config, all).unwrap();
}

#[test]
fn the_last_layer_has_no_next_norm() {
    let config = LayerConfig::small();
    let mut all = tensors(&config);
    all.0.remove("next_pre_attn_norm");
    let weights = LayerWeights::from_host(&config, all).unwrap();
    assert!(!weights.has_next_norm());
    assert!(!DecoderLayer::new(config, weights, Backend::Cpu).unwrap().has_next_norm());
}

#[test]
fn a_safetensors_file_in_the_reference_names_loads() {
    let config = LayerConfig::small();
    let all = tensors(&config);
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("layer.safetensors");
    let views: Vec<(String, safetensors::tensor::TensorView)> = all
        .0
        .iter()
        .map(|(name, t)| {
            use safetensors::tensor::Dtype;
            let dtype = match t.dtype() {
                DType::F32 => Dtype::F32,
                DType::Bf16 => Dtype::BF16,
                DType::E4m3 => Dtype::F8_E4M3,
                _ => Dtype::U8,
            };
            (name.clone(), safetensors::tensor::TensorView::new(dtype, t.shape.clone(), t.bytes()).unwrap())
        })
        .collect();
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    assert_eq!(file.tensors().unwrap(), all);
    file.weights(&config).unwrap();
    // Another configuration's shapes are an error, and so is another file.
    let text = file.weights(&LayerConfig { q_heads: 2, ..config.clone() }).unwrap_err().to_string();
    assert!(text.contains("wanted shape"), "{text}");
    std::fs::write(&path, b"not a header").unwrap();
    let text = SafetensorsFile::open(&path).unwrap().weights(&config).unwrap_err().to_string();
    assert!(text.contains("layer.safetensors: not a safetensors file"), "{text}");
    let text = SafetensorsFile::open("/nonexistent/x.safetensors").unwrap_err().to_string();
    assert!(text.starts_with("/nonexistent/x.safetensors: "), "{text}");
}

#[test]
fn device_weights_are_checked_before_they_are_touched() {
    let config = LayerConfig::muse_spark_tp8();
    let view = |dtype, shape: &[usize]| {
        // SAFETY: checks do not follow the address.
        unsafe { DeviceTensor::contiguous(0x7000_0000_0000, dtype, shape) }
    };
    let all = || names::specs(&config).into_iter().map(|s| (s.name.to_string(), view(s.dtypes[0], &s.shapes[0])));
    let weights = LayerWeights::from_device(&config, all()).unwrap();
    let changed = all().map(|(n, t)| if n == "w2_sf" { (n, view(DType::E4m3, &[32, 4096, 128])) } else { (n, t) });
    let text = LayerWeights::from_device(&config, changed).unwrap_err().to_string();
    assert_eq!(text, "w2_sf: wanted shape [32, 4096, 256], got [32, 4096, 128]");
    let error = DecoderLayer::new(config, weights, Backend::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "weights: wanted host memory, got device memory");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_says_so() {
    let config = LayerConfig::muse_spark_tp8();
    let view = |s: &names::Spec| {
        // SAFETY: nothing follows the address.
        unsafe { DeviceTensor::contiguous(0x7000_0000_0000, s.dtypes[0], &s.shapes[0]) }
    };
    let all = names::specs(&config).into_iter().map(|s| (s.name.to_string(), view(&s)));
    let weights = LayerWeights::from_device(&config, all).unwrap();
    let error = DecoderLayer::new(config, weights, Backend::Cuda { device: 0 }).unwrap_err();
    assert!(matches!(error, Error::NoCuda), "{error}");
    assert!(error.to_string().contains("build with `--features cuda`, or use the CPU backend"), "{error}");
}

#[test]
fn cuda_refuses_other_dimensions_and_missing_devices() {
    let config = LayerConfig::small();
    let weights = LayerWeights::from_host(&config, tensors(&config)).unwrap();
    let text = DecoderLayer::new(config, weights, Backend::Cuda { device: 0 }).unwrap_err().to_string();
    assert!(text.contains("hidden = 64 is not supported, only the released 8192"), "{text}");
}

#[test]
fn a_cpu_layer_plans_and_says_what_it_does_not_do() {
    let config = LayerConfig::small();
    let weights = LayerWeights::from_host(&config, tensors(&config)).unwrap();
    let layer = DecoderLayer::new(config, weights, Backend::Cpu).unwrap();
    let plan = layer.plan(PlanKey::decode(2, 64)).unwrap();
    assert_eq!(plan.workspace_bytes, 0);
    assert_eq!(layer.workspace(&plan).unwrap().bytes(), 0);
}
