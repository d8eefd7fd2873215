//! Layers from the files of a checkpoint straight to the GPU, against the CPU reference on the same files:
//! synthetic ones of the released dimensions, layers of every kind for two ranks. 17 GB of the temporary
//! folder, 8 GB at a time.

use crate::harness::{gpu, spec, Gpu};
use crate::layer::compare;
use muse_spark_layer::backend::cpu::{CpuLayer, StepOptions};
use muse_spark_layer::backend::cuda::Buffer;
use muse_spark_layer::synthetic::{self, StepSpec};
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::weights::checkpoint::{Checkpoint, LoadedLayer};
use muse_spark_layer::{
    Backend, DType, DecoderLayer, DeviceTensor, Error, HostTensor, LayerKind, LayerWeights, QueryPrecision, WeightKind,
};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const RANKS: usize = 8;
const CUDA: Backend = Backend::Cuda { device: 0 };

/// Six layers of the released dimensions in a folder of their own, which goes with this: data of some only.
struct Files(PathBuf);

impl Files {
    fn new(layers: &[usize], ranks: &[usize]) -> Files {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("muse-spark-layer-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let files = Files(std::env::temp_dir().join(name));
        let experts = 256 / RANKS;
        let spec = SynthSpec {
            only_layers: Some(layers.to_vec()),
            only_experts: Some(ranks.iter().map(|r| r * experts..(r + 1) * experts).collect()),
            shard_bytes: 1 << 30,
            ..SynthSpec::full(6)
        };
        let start = Instant::now();
        write(&files.0, &spec, &|_| ()).expect("room for a checkpoint in the temporary folder");
        say(format!("{:.1} GB written in {:.1} s", spec.written_bytes() as f64 / 1e9, start.elapsed().as_secs_f64()));
        files
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Not by eprintln, which the test harness swallows.
fn say(line: String) {
    let _ = writeln!(std::io::stderr(), "  checkpoint: {line}");
}

/// Bytes of this process's memory that are no file's.
fn own_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Loads layers to the GPU and says at what rate.
fn load(checkpoint: &Checkpoint, layers: Range<usize>, rank: usize) -> Vec<LoadedLayer> {
    let (total, taken, start) =
        (checkpoint.bytes(layers.clone(), rank, RANKS).unwrap(), AtomicU64::new(0), Instant::now());
    let (before, most) = (own_bytes(), AtomicU64::new(0));
    let count = |bytes| {
        let sum = taken.fetch_add(bytes, Ordering::Relaxed);
        if sum >> 27 != (sum + bytes) >> 27 {
            most.fetch_max(own_bytes(), Ordering::Relaxed);
        }
    };
    let loaded = checkpoint.load_layers(layers.clone(), rank, RANKS, CUDA, &count).expect("layers on the GPU");
    let seconds = start.elapsed().as_secs_f64();
    let grown = most.into_inner().saturating_sub(before);
    assert!(grown < 300 << 20, "{grown} bytes of the host's beyond the map");
    say(format!("layers {layers:?} of rank {rank}: {:.2} GB in {seconds:.3} s", total as f64 / 1e9));
    assert_eq!(taken.into_inner(), total, "progress reaches the total");
    assert_eq!(loaded.len(), layers.len());
    loaded
}

/// Steps of a loaded layer against the CPU's on views of the map.
fn check(gpu: &Gpu, checkpoint: &Checkpoint, layer: usize, rank: usize, loaded: &LoadedLayer, steps: &[&str]) {
    let own = checkpoint.layer(layer, rank, RANKS).unwrap();
    assert_eq!((own.kind, own.local_start), (loaded.kind, loaded.local_start));
    let cpu = CpuLayer::new(own.config.clone(), own.weights.host().unwrap().view()).unwrap();
    assert_eq!(own.weights.has_next_norm(), loaded.layer.has_next_norm());
    for name in steps {
        let spec = StepSpec { local_start: loaded.local_start, ..spec(name, loaded.kind) };
        compare(gpu, &loaded.layer, &cpu, &spec, QueryPrecision::Fp16, rank);
    }
}

/// Sliding and full layers for two ranks, each of four loaded at once; then a fault in one of four.
#[test]
fn nvfp4_layers() {
    let Some(gpu) = gpu("checkpoint::nvfp4_layers") else { return };
    let files = Files::new(&[1, 2, 3, 4], &[2, 7]);
    let checkpoint = Checkpoint::open(&files.0).unwrap();
    let kinds: Vec<LayerKind> = checkpoint.model().layers.iter().map(|l| l.kind).collect();
    use LayerKind::{Full, Sliding};
    assert_eq!(kinds, [Sliding, Full, Sliding, Sliding, Sliding, Full]);
    let held = gpu.device.held();
    load(&checkpoint, 2..3, 2);
    load(&checkpoint, 2..3, 2);
    assert_eq!(gpu.device.held(), held, "layers and staging are gone");
    for rank in [2, 7] {
        let layers = load(&checkpoint, 1..5, rank);
        check(&gpu, &checkpoint, 1, rank, &layers[0], &["decode-3", "verify-3"]);
        check(&gpu, &checkpoint, 2, rank, &layers[1], &["decode-9"]);
        check(&gpu, &checkpoint, 4, rank, &layers[3], &["decode-1"]);
    }
    drop(checkpoint);
    nothing_half_loaded_remains(&gpu, &files.0);
}

/// A NaN block scale of one of four layers: its tensor is named, and the device's memory is as before.
fn nothing_half_loaded_remains(gpu: &Gpu, dir: &Path) {
    let name = "model.language_model.layers.3.mlp.experts.gate_up_proj_weight_scale";
    let (file, offset) = find(dir, name);
    // Expert 250, the up half's row 4096 + 77, block 9 of 256.
    let at = offset + ((250 * 8192 + 4096 + 77) * 256 + 9) as u64;
    let mut shard = std::fs::OpenOptions::new().read(true).write(true).open(&file).unwrap();
    shard.seek(SeekFrom::Start(at)).unwrap();
    shard.write_all(&[0xff]).unwrap();
    drop(shard);
    let checkpoint = Checkpoint::open(dir).unwrap();
    let held = gpu.device.held();
    let error = checkpoint.load_layers(1..5, 7, RANKS, CUDA, &|_| ()).expect_err("a NaN scale");
    let text = error.to_string();
    assert!(matches!(error, Error::Checkpoint { .. }), "{text}");
    assert!(text.contains(name) && text.contains("NaN at [250, 4173, 9]"), "{text}");
    assert!(text.contains(file.file_name().unwrap().to_str().unwrap()), "{text}");
    assert_eq!(gpu.device.held(), held, "device memory is given back");
    // Rank 2 has other experts.
    checkpoint.load_layers(3..4, 2, RANKS, CUDA, &|_| ()).expect("the other rank's part is sound");
    memory_of_ones_own(gpu, &checkpoint);
}

/// The same weights from device memory, packed where they lie in one launch a matrix: the bits of what came in
/// cuts from the files. A NaN scale there has the layer's name for it and its place. With FP32 norms and gates
/// that BF16 cannot hold the layer is the CPU's.
fn memory_of_ones_own(gpu: &Gpu, checkpoint: &Checkpoint) {
    let own = checkpoint.layer(3, 2, RANKS).unwrap();
    let spec = StepSpec { local_start: own.local_start, ..spec("decode-9", own.kind) };
    let mut tensors = own.weights.host().unwrap().view();
    let mut memory = Memory::default();
    tensors.0.iter().for_each(|(name, tensor)| memory.put(gpu, name, tensor));
    let step = synthetic::step(&gpu.config, &spec, 33).unwrap();
    let options = StepOptions { rank: 2, ..StepOptions::new(spec.kind, QueryPrecision::Fp16) };
    let run = |layer: &DecoderLayer| {
        let out = layer.forward_host(&step.input.view(), &mut step.cache.clone().view(), &options).unwrap();
        (out.stream, out.hidden, out.topk_ids)
    };
    let staged = checkpoint.load_layers(3..4, 2, RANKS, CUDA, &|_| ()).unwrap();
    assert!(run(&staged[0].layer) == run(&memory.layer(gpu).expect("a layer")), "the same bits");

    for (name, tensor) in tensors.0.iter_mut() {
        if name.ends_with("_norm") || name.ends_with("residual_gate") {
            let wide: Vec<f32> = tensor.to_f32(name).unwrap().iter().map(|v| v * 1.001).collect();
            *tensor = HostTensor::f32(&tensor.shape, wide);
            memory.put(gpu, name, tensor);
        }
    }
    let cpu = CpuLayer::new(own.config.clone(), tensors).unwrap();
    compare(gpu, &memory.layer(gpu).expect("a layer"), &cpu, &spec, QueryPrecision::Fp16, 2);

    let index = (31 * 4096 + 2100) * 256 + 255;
    memory.0["w2_sf"].0.write_at(index as u64, &[0x7f]).unwrap();
    let error = memory.layer(gpu).expect_err("a NaN scale");
    assert!(matches!(&error, Error::NanScale { tensor, index: i } if tensor == "w2_sf" && *i == index), "{error}");
}

/// A layer's tensors in device memory.
#[derive(Default)]
struct Memory(BTreeMap<String, (Buffer, DType, Vec<usize>)>);

impl Memory {
    fn put(&mut self, gpu: &Gpu, name: &str, tensor: &HostTensor) {
        let buffer = gpu.device.upload(tensor.bytes()).unwrap();
        self.0.insert(name.into(), (buffer, tensor.dtype(), tensor.shape.clone()));
    }

    fn layer(&self, gpu: &Gpu) -> Result<DecoderLayer, Error> {
        let views = self.0.iter().map(|(name, (buffer, dtype, shape))| {
            // SAFETY: the buffer holds the tensor and outlives the call.
            (name.clone(), unsafe { DeviceTensor::contiguous(buffer.ptr(), *dtype, shape) })
        });
        DecoderLayer::new(gpu.config.clone(), LayerWeights::from_device(&gpu.config, views)?, CUDA)
    }
}

/// The file that holds a tensor, and where in it.
fn find(dir: &Path, name: &str) -> (PathBuf, u64) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let mut file = std::fs::File::open(&path).unwrap();
        let mut length = [0; 8];
        file.read_exact(&mut length).unwrap();
        let mut header = vec![0; u64::from_le_bytes(length) as usize];
        file.read_exact(&mut header).unwrap();
        let header: serde_json::Value = serde_json::from_slice(&header).unwrap();
        if let Some(tensor) = header.get(name) {
            return (path, 8 + u64::from_le_bytes(length) + tensor["data_offsets"][0].as_u64().unwrap());
        }
    }
    panic!("no {name}");
}

/// The first layer and the last, with BF16 experts: one rank's each.
#[test]
fn bf16_layers() {
    let Some(gpu) = gpu("checkpoint::bf16_layers") else { return };
    for (layer, rank, steps) in [(0, 2, ["decode-3", "verify-3"]), (5, 7, ["decode-9", "prefill-65"])] {
        let files = Files::new(&[layer], &[rank]);
        let checkpoint = Checkpoint::open(&files.0).unwrap();
        assert_eq!(checkpoint.experts(layer).unwrap(), WeightKind::Bf16);
        let loaded = load(&checkpoint, layer..layer + 1, rank);
        assert_eq!(loaded[0].layer.has_next_norm(), layer == 0);
        check(&gpu, &checkpoint, layer, rank, &loaded[0], &steps);
    }
}
