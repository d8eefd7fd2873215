//! Bad configurations, weights and steps give their named error and leave the layer usable.

#![allow(unsafe_code)] // views of addresses that nothing reads

mod cpu_common;

use cpu_common::{exact, layer, spec, with};
use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions};
use muse_spark_layer::synthetic::{self, SyntheticStep};
use muse_spark_layer::tensor::{DType, DeviceTensor, HostTensor, NamedTensors};
use muse_spark_layer::{Error, LayerConfig, LayerKind, QueryPrecision, WeightKind};
use rstest::rstest;

#[rstest]
#[case("hidden", |c: &mut LayerConfig| c.hidden = 0)]
#[case("head_dim", |c: &mut LayerConfig| c.head_dim = 15)]
#[case("q_heads", |c: &mut LayerConfig| c.q_heads = 3)]
#[case("kv_heads", |c: &mut LayerConfig| c.kv_heads = 0)]
#[case("window", |c: &mut LayerConfig| c.window = 0)]
#[case("expert_dim", |c: &mut LayerConfig| c.expert_dim = 24)]
#[case("local_experts", |c: &mut LayerConfig| c.local_experts = 5)]
#[case("top_k", |c: &mut LayerConfig| c.top_k = 33)]
#[case("unpool_slice", |c: &mut LayerConfig| c.unpool_slice = 7)]
#[case("rope_theta", |c: &mut LayerConfig| c.rope_theta = f64::NAN)]
#[case("rms_eps", |c: &mut LayerConfig| c.rms_eps = -1.0)]
#[case("route_eps", |c: &mut LayerConfig| c.route_eps = f32::INFINITY)]
#[case("residual_temperature", |c: &mut LayerConfig| c.residual_temperature = 0.0)]
fn configurations(#[case] field: &str, #[case] change: fn(&mut LayerConfig)) {
    let mut config = LayerConfig::small();
    config.validate().unwrap();
    change(&mut config);
    match config.validate() {
        Err(Error::Config { field: named, .. }) => assert_eq!(named, field),
        other => panic!("{other:?}"),
    }
    assert!(synthetic::weights(&config, 1).is_err());
}

#[test]
fn released_dimensions_are_valid() {
    let config = LayerConfig::muse_spark_tp8();
    config.validate().unwrap();
    assert_eq!((config.qkv_rows(), config.group(), config.ranks()), (2304, 8, 8));
    assert_eq!(config.sm_scale(), 0.125);
    assert_eq!((config.unpool_rows(8, 3), config.unpool_rows(9, 3)), (3072..4096, 0..8192));
    let inv_freq = config.inv_freq();
    assert_eq!((inv_freq.len(), inv_freq[0]), (32, 1.0));
    assert!((f64::from(inv_freq[31]) - 500_000f64.powf(-62.0 / 64.0)).abs() < 1e-12);
    let kinds: Vec<usize> = (0..62).filter(|&i| LayerKind::of_layer(i) == LayerKind::Full).collect();
    assert_eq!((kinds.len(), kinds[0], kinds[15]), (16, 1, 61));
}

fn weights_error(change: impl FnOnce(&mut NamedTensors<'static>)) -> Error {
    let config = LayerConfig::small();
    let weights = with(&synthetic::weights(&config, 1).unwrap(), change);
    CpuLayer::new(config, weights).unwrap_err()
}

#[test]
fn weights() {
    let e = weights_error(|w| drop(w.0.remove("pooler")));
    assert!(matches!(&e, Error::Missing { tensor } if tensor == "pooler"), "{e}");
    let e = weights_error(|w| w.insert("o", HostTensor::bf16(&[1, 1], vec![half::bf16::ONE])));
    assert!(
        matches!(&e, Error::Shape { tensor, wanted, got } if tensor == "o" && *wanted == [64, 64] && *got == [1, 1]),
        "{e}"
    );
    assert_eq!(e.to_string(), "o: wanted shape [64, 64], got [1, 1]");
    let e = weights_error(|w| w.insert("router_bias", HostTensor::bf16(&[32], vec![half::bf16::ONE; 32])));
    assert!(
        matches!(&e, Error::DType { tensor, wanted: DType::F32, got: DType::Bf16 } if tensor == "router_bias"),
        "{e}"
    );
    let e = weights_error(|w| {
        let mut scales = w.get("w2_sf").unwrap().as_e4m3("w2_sf").unwrap().to_vec();
        scales[100] = 0x7f;
        w.insert("w2_sf", HostTensor::e4m3(&[8, 32, 2], scales));
    });
    assert!(matches!(&e, Error::NanScale { tensor, index: 100 } if tensor == "w2_sf"), "{e}");
    let e = weights_error(|w| w.insert("w13_gs", HostTensor::f32(&[8, 3], vec![0.0; 24])));
    assert!(matches!(&e, Error::Shape { tensor, .. } if tensor == "w13_gs"), "{e}");
    let e = weights_error(|w| w.insert("next_pre_attn_norm", HostTensor::f16(&[64], vec![half::f16::ZERO; 64])));
    assert!(matches!(&e, Error::DType { tensor, .. } if tensor == "next_pre_attn_norm"), "{e}");
    let e = weights_error(|w| w.insert("pooler2", HostTensor::f32(&[1], vec![0.0])));
    assert!(e.to_string().contains("pooler2"), "{e}");
    let config = LayerConfig { experts: WeightKind::Bf16, ..LayerConfig::small() };
    let e = CpuLayer::new(config, synthetic::weights(&LayerConfig::small(), 1).unwrap()).unwrap_err();
    assert!(matches!(&e, Error::DType { tensor, wanted: DType::Bf16, got: DType::U8 } if tensor == "w13"), "{e}");
}

#[rstest]
#[case("positions", |s: &mut SyntheticStep| { s.input.positions.pop(); })]
#[case("cache_loc", |s: &mut SyntheticStep| { s.input.cache_loc.push(0); })]
#[case("cu_seqlens_q", |s: &mut SyntheticStep| { s.input.cu_seqlens_q.pop(); })]
#[case("cu_seqlens_q", |s: &mut SyntheticStep| s.input.cu_seqlens_q[0] = 1)]
#[case("cu_seqlens_q", |s: &mut SyntheticStep| s.input.cu_seqlens_q[1] = 5)]
#[case("cu_seqlens_q", |s: &mut SyntheticStep| s.input.cu_seqlens_q[1] = -1)]
#[case("cu_seqlens_q", |s: &mut SyntheticStep| s.input.cu_seqlens_q[2] = 3)]
#[case("page_table", |s: &mut SyntheticStep| { s.input.page_table.pop(); })]
#[case("attn_input", |s: &mut SyntheticStep| { s.input.attn_input.pop(); })]
#[case("stream", |s: &mut SyntheticStep| { s.input.stream.pop(); })]
#[case("page_size", |s: &mut SyntheticStep| s.cache.page_size = 3)]
#[case("page_size", |s: &mut SyntheticStep| s.cache.page_size = 512)]
#[case("page_size", |s: &mut SyntheticStep| s.cache.page_size = 0)]
#[case("v_cache", |s: &mut SyntheticStep| { s.cache.v.pop(); })]
fn steps(#[case] named: &str, #[case] change: fn(&mut SyntheticStep)) {
    let config = LayerConfig::small();
    let layer = layer(&config, 2);
    let good = synthetic::step(&config, &spec(2, 1, 9, LayerKind::Full, 1), 2).unwrap();
    let mut step = good.clone();
    change(&mut step);
    let SyntheticStep { input, cache } = &mut step;
    let e = layer.forward(&input.view(), &mut cache.view(), &exact(LayerKind::Full)).unwrap_err();
    assert!(e.to_string().starts_with(named), "{e}");
    // Usable after it.
    cpu_common::run(&layer, &mut good.clone(), &exact(LayerKind::Full));
}

#[test]
fn ranks_past_the_last() {
    let config = LayerConfig::small();
    let layer = layer(&config, 2);
    let mut step = synthetic::step(&config, &spec(2, 1, 9, LayerKind::Full, 1), 2).unwrap();
    let SyntheticStep { input, cache } = &mut step;
    let options = StepOptions { rank: 8, ..StepOptions::new(LayerKind::Full, QueryPrecision::Fp16) };
    let e = layer.forward(&input.view(), &mut cache.view(), &options).unwrap_err();
    assert_eq!(e.to_string(), "rank: 8 is past the limit of 7");
}

#[test]
fn names_parse_and_print() {
    for kind in [LayerKind::Full, LayerKind::Sliding] {
        assert_eq!(kind.to_string().parse::<LayerKind>().unwrap(), kind);
    }
    for q in [QueryPrecision::Fp32, QueryPrecision::Bf16, QueryPrecision::Fp16, QueryPrecision::E4m3] {
        assert_eq!(q.to_string().parse::<QueryPrecision>().unwrap(), q);
    }
    let e = "half".parse::<QueryPrecision>().unwrap_err();
    assert_eq!(e.to_string(), "QueryPrecision: wanted fp32, bf16, fp16, e4m3, got half");
}

#[test]
fn host_tensors_check_bytes() {
    let data = [1f32, 2.0, 3.0];
    let tensor = HostTensor::f32(&[3], &data[..]);
    let back = HostTensor::from_bytes("x", DType::F32, &[3], tensor.bytes()).unwrap();
    assert_eq!(back, tensor);
    assert!(matches!(HostTensor::from_bytes("x", DType::F32, &[4], tensor.bytes()), Err(Error::Value { .. })));
    let e = HostTensor::from_bytes("x", DType::I64, &[1], &tensor.bytes()[1..9]).unwrap_err();
    assert!(matches!(e, Error::Alignment { wanted: 8, .. }), "{e}");
    assert!(matches!(tensor.as_i32("x"), Err(Error::DType { wanted: DType::I32, got: DType::F32, .. })));
}

/// Device views describe memory; nothing reads it here.
#[test]
fn device_tensors_are_checked() {
    // SAFETY: the addresses are never read.
    let (good, null, odd, strided) = unsafe {
        (
            DeviceTensor::contiguous(0x1000, DType::F32, &[2, 8]),
            DeviceTensor::contiguous(0, DType::F32, &[2, 8]),
            DeviceTensor::contiguous(0x1004, DType::F32, &[2, 8]),
            DeviceTensor::strided(0x1000, DType::F32, &[2, 8], &[16, 1]),
        )
    };
    good.expect_contiguous("x", DType::F32, &[2, 8], 16).unwrap();
    assert_eq!((good.span_bytes(), strided.span_bytes()), (64, 96));
    let e = |t: &DeviceTensor, dtype, shape: &[usize]| t.expect_contiguous("x", dtype, shape, 16).unwrap_err();
    assert!(matches!(e(&null, DType::F32, &[2, 8]), Error::Null { .. }));
    assert!(matches!(e(&odd, DType::F32, &[2, 8]), Error::Alignment { wanted: 16, got: 0x1004, .. }));
    assert!(matches!(e(&strided, DType::F32, &[2, 8]), Error::Stride { .. }));
    assert!(matches!(e(&good, DType::Bf16, &[2, 8]), Error::DType { .. }));
    assert!(matches!(e(&good, DType::F32, &[8, 2]), Error::Shape { .. }));
    strided.expect("x", DType::F32, &[2, 8], 16).unwrap();
    // SAFETY: as above; an empty view needs no address.
    unsafe { DeviceTensor::contiguous(0, DType::F32, &[0, 8]) }
        .expect_contiguous("x", DType::F32, &[0, 8], 16)
        .unwrap();
}
