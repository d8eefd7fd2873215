//! What the fuzz targets (`fuzz/targets.rs`) are fed with every time: the seeds, and what once made a fault. Cut short
//! and with bits turned too, which takes a second; `fuzz/run.sh` goes on from there for minutes.
#![allow(unsafe_code)]

#[path = "../fuzz/targets.rs"]
mod targets;

use muse_spark_layer::synthetic::Random;
use rstest::rstest;
use std::path::Path;

#[global_allocator]
static LIMITED: targets::Limited = targets::Limited;

#[rstest]
fn seeds(#[values("weights", "checkpoint", "config", "plan", "capi")] name: &str) {
    let target = targets::TARGETS.iter().find(|t| t.0 == name).unwrap().1;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 3, "{}", folder.display());
    target(&[]);
    let random = Random::new(1, name);
    for (f, path) in files.iter().enumerate() {
        let seed = std::fs::read(path).unwrap();
        target(&seed);
        for n in 0..200 {
            let (at, mut bytes) = ((f * 200 + n) as u64 * 3, seed.clone());
            if bytes.is_empty() {
                continue;
            }
            let place = random.below(at, bytes.len() as u64) as usize;
            if n % 4 == 0 {
                bytes.truncate(place);
            } else {
                bytes[place] ^= 1 << random.below(at + 1, 8);
            }
            target(&bytes);
        }
    }
}

/// The seeds are what the library writes today, so that mutations reach beyond the first check.
#[test]
fn seeds_are_good_input() {
    let read = |name: &str| std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name)).unwrap();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz_seeds");
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("layer.safetensors");
    std::fs::write(&path, read("weights/nvfp4")).unwrap();
    muse_spark_layer::weights::SafetensorsFile::open(&path).unwrap().weights(&targets::tiny()).unwrap();
    serde_json::from_slice::<muse_spark_layer::LayerConfig>(&read("config/released")).unwrap().validate().unwrap();
    let checkpoint = read("checkpoint/one-layer");
    let n = usize::from(checkpoint[0]) | usize::from(checkpoint[1]) << 8;
    assert!(checkpoint[2..2 + n].starts_with(b"{"));
}

/// Writes the seeds anew (`--ignored`), where a format has changed.
#[test]
#[ignore = "writes fuzz/seeds"]
fn write_seeds() {
    use muse_spark_layer::weights::checkpoint::synth::{self, SynthSpec};
    use muse_spark_layer::{synthetic, LayerConfig, WeightKind};
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    let write = |name: &str, bytes: &[u8]| {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    for (name, experts) in [("nvfp4", WeightKind::Nvfp4), ("bf16", WeightKind::Bf16)] {
        let tensors = synthetic::weights(&LayerConfig { experts, ..targets::tiny() }, 1).unwrap();
        let views: Vec<(&String, safetensors::tensor::TensorView)> =
            tensors.0.iter().map(|(n, t)| (n, view(t))).collect();
        write(&format!("weights/{name}"), &safetensors::serialize(views, None).unwrap());
    }
    write("weights/empty", b"\x02\0\0\0\0\0\0\0{}");
    write(
        "weights/huge",
        b"\x43\0\0\0\0\0\0\0{\"o\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
    );

    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz_synth");
    for (name, layers, bf16_ends) in [("one-layer", 1, false), ("two-layers", 2, true)] {
        let _ = std::fs::remove_dir_all(&dir);
        let spec = SynthSpec {
            hidden: 4,
            head_dim: 2,
            q_heads: 2,
            kv_heads: 2,
            window: 4,
            expert_dim: 16,
            n_experts: 2,
            top_k: 1,
            layers,
            bf16_ends,
            seed: 1,
            shard_bytes: 1 << 30,
            only_layers: None,
            only_experts: None,
        };
        synth::write(&dir, &spec, &|_| ()).unwrap();
        let read = |file: &str| std::fs::read(dir.join(file)).unwrap();
        let (config, index) = (read("config.json"), read("model.safetensors.index.json"));
        let shard = std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().path());
        let shard = shard.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect::<Vec<_>>();
        assert_eq!(shard.len(), 1);
        // The target's shard has the name of an only file.
        let own = shard[0].file_name().unwrap().to_str().unwrap().to_string();
        let index = String::from_utf8(index).unwrap().replace(&own, "model.safetensors");
        let part = |bytes: &[u8]| [&(bytes.len() as u16).to_le_bytes()[..], bytes].concat();
        let shard = std::fs::read(&shard[0]).unwrap();
        write(&format!("checkpoint/{name}"), &[part(&config), part(index.as_bytes()), shard.clone()].concat());
        write(&format!("checkpoint/{name}-no-index"), &[part(&config), part(b""), shard].concat());
    }

    for (name, config) in
        [("released", LayerConfig::muse_spark_tp8()), ("small", LayerConfig::small()), ("tiny", targets::tiny())]
    {
        write(&format!("config/{name}"), serde_json::to_string(&config).unwrap().as_bytes());
    }
    let largest =
        LayerConfig { hidden: 1 << 24, q_heads: 1 << 24, head_dim: 1 << 24, kv_heads: 1 << 24, ..LayerConfig::small() };
    write("config/largest", serde_json::to_string(&largest).unwrap().as_bytes());

    // Field by field as `targets::key` reads them: small numbers are a byte.
    write("plan/decode", &[0, 8, 8, 1, 100, 0, 0, 0, 132, 0]);
    write("plan/verify", &[2, 24, 3, 8, 100, 6, 0, 0, 150, 132, 0, 0, 0]);
    write("plan/prefill", &[0, 210, 12, 1, 210, 12, 210, 14, 4, 0, 120, 200, 9, 150, 132, 0, 0, 0]);
    let ones = |name: &str, bytes: Vec<u8>| write(&format!("capi/{name}"), &bytes);
    let plan: Vec<u8> =
        [60u32, 8, 8, 1, 100, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0].iter().flat_map(|w| w.to_le_bytes()).collect();
    let layer = [&16u32.to_le_bytes()[..], &[0; 28], &[0]].concat();
    // 16 patterns of memory, then pointers that are all good, a stride and a number of pages.
    let step: Vec<u8> = (0..16u8).flat_map(|i| [&[i][..], &[0, 0, 128, 63, i, 0, 0, 0].repeat(2)].concat()).collect();
    ones("step", [&[0][..], &layer, &plan, &[0; 16], &[0], &step, &[0; 17], &[0, 60, 0]].concat());
    ones(
        "tensors",
        [&[3][..], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 0, 9, 0, 9, 1, 7], &[7; 60], &layer, &plan, &[0; 16], &[0]]
            .concat(),
    );
    ones("sizes", [&[0][..], &[0xFF; 32], &[255], &plan, &[0; 16], &[255]].concat());
}

fn view<'a>(t: &'a muse_spark_layer::HostTensor) -> safetensors::tensor::TensorView<'a> {
    use muse_spark_layer::DType;
    use safetensors::Dtype;
    let dtype = match t.dtype() {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::E4m3 => Dtype::F8_E4M3,
        DType::U8 => Dtype::U8,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
    };
    safetensors::tensor::TensorView::new(dtype, t.shape.clone(), t.bytes()).unwrap()
}
