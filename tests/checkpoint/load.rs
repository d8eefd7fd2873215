//! Layers taken to a backend, many at once: here the CPU; `tests/gpu/checkpoint.rs` has the GPU.

use crate::files::{edit_header_of, folder, rewritten, shards, small, tensors_of, text, PREFIX};
use muse_spark_layer::backend::cpu::{StepOptions, StepOutput};
use muse_spark_layer::synthetic::{self, StepSpec};
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::weights::Checkpoint;
use muse_spark_layer::{Backend, DecoderLayer, Error, LayerKind, QueryPrecision};
use serde_json::json;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A step of a layer as it is loaded from the files in place.
pub fn loaded_step(checkpoint: &Checkpoint, layer: usize, rank: usize, ranks: usize) -> StepOutput {
    let loaded = checkpoint.load_layers(layer..layer + 1, rank, ranks, Backend::Cpu, &|_| ()).unwrap();
    step(&loaded[0].layer, loaded[0].kind, loaded[0].local_start)
}

fn step(layer: &DecoderLayer, kind: LayerKind, local_start: i32) -> StepOutput {
    let spec = StepSpec { local_start, ..StepSpec::new(3, 2, 40, kind) };
    let mut step = synthetic::step(layer.config(), &spec, 5).unwrap();
    let options = StepOptions::new(kind, QueryPrecision::Fp32);
    layer.forward_host(&step.input.view(), &mut step.cache.view(), &options).unwrap()
}

/// A layer loaded from the files in place gives the bits of one made of the host tensors, which the golden
/// tests check; progress adds up to the bytes of what the rank takes.
#[test]
fn layers_load_in_place() {
    let dir = small("load");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for (rank, ranks) in [(0, 1), (1, 2), (7, 8)] {
        let (taken, calls) = (AtomicU64::new(0), AtomicUsize::new(0));
        let count = |bytes| {
            taken.fetch_add(bytes, Ordering::Relaxed);
            calls.fetch_add(1, Ordering::Relaxed);
        };
        let loaded = checkpoint.load_layers(0..6, rank, ranks, Backend::Cpu, &count).unwrap();
        assert_eq!(taken.into_inner(), checkpoint.bytes(0..6, rank, ranks).unwrap());
        assert!(calls.into_inner() > 6 * 10);
        assert_eq!(loaded.len(), 6);
        for (l, got) in loaded.iter().enumerate() {
            let own = checkpoint.layer(l, rank, ranks).unwrap();
            assert_eq!((got.kind, got.local_start), (own.kind, own.local_start));
            let parts = checkpoint.parts(l, rank, ranks).unwrap();
            let host: u64 = own.weights.host().unwrap().0.values().map(|t| t.bytes().len() as u64).sum();
            assert_eq!(parts.iter().map(|p| p.bytes).sum::<u64>(), host);
            let want = DecoderLayer::new(own.config, own.weights, Backend::Cpu).unwrap();
            assert_eq!(got.layer.has_next_norm(), l < 5);
            let (a, b) = (step(&got.layer, got.kind, got.local_start), step(&want, own.kind, own.local_start));
            assert_eq!((a.stream, a.hidden, a.topk_ids), (b.stream, b.hidden, b.topk_ids), "layer {l}");
        }
    }
    assert!(checkpoint.load_layers(4..4, 0, 1, Backend::Cpu, &|_| ()).unwrap().is_empty());
    let error = text(checkpoint.load_layers(4..7, 0, 1, Backend::Cpu, &|_| ()).unwrap_err());
    assert!(error.contains("num_hidden_layers"), "{error}");
    // Dimensions that the GPU does not take are refused before a GPU is looked for.
    if !cfg!(feature = "cuda") {
        let error = text(checkpoint.load_layers(0..1, 0, 1, Backend::Cuda { device: 0 }, &|_| ()).unwrap_err());
        assert!(error.contains("hidden = 64"), "{error}");
    }
}

/// A value that only shows when data is read: the load ends with the tensor's name, whatever was loaded is
/// dropped, and layers that were not yet begun are left alone.
#[test]
fn the_first_error_ends_a_load_and_nothing_remains() {
    let name = format!("{PREFIX}3.mlp.experts.down_proj_weight_scale");
    let dir = rewritten("load-nan", |all| *all.get_mut(&name).unwrap().data.last_mut().unwrap() = 0xff);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let error = text(checkpoint.load_layers(0..6, 1, 2, Backend::Cpu, &|_| ()).unwrap_err());
    assert!(
        error.contains("model.safetensors") && error.contains(&name) && error.contains("NaN at [31, 31, 1]"),
        "{error}"
    );
    checkpoint.load_layers(0..6, 0, 2, Backend::Cpu, &|_| ()).expect("rank 0 has other experts");

    struct Kept<'a>(&'a AtomicUsize);
    impl Drop for Kept<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let (alive, begun) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let result = checkpoint.load(0..6, 1, 2, |l, layer| {
        begun.fetch_add(1, Ordering::Relaxed);
        assert_eq!(layer.local_start, 16);
        // Layer 3 has failed by then: the layers after it are not begun.
        std::thread::sleep(Duration::from_millis(if l < 3 { 300 } else { 0 }));
        alive.fetch_add(1, Ordering::Relaxed);
        Ok(Kept(&alive))
    });
    assert!(text(result.err().unwrap()).contains(&name));
    assert_eq!((alive.load(Ordering::Relaxed), begun.into_inner()), (0, 3));
    // Some are finished by the time that the last one fails.
    let result = checkpoint.load(0..6, 0, 2, |l, _| {
        if l == 5 {
            return Err(Error::NoCuda);
        }
        alive.fetch_add(1, Ordering::Relaxed);
        Ok(Kept(&alive))
    });
    assert!(matches!(result.err(), Some(Error::NoCuda)));
    assert_eq!(alive.into_inner(), 0);
}

/// What headers tell is checked of all layers before data of any is taken.
#[test]
fn shapes_are_checked_before_anything_is_loaded() {
    let dir = small("load-shapes");
    let name = format!("{PREFIX}5.mlp.pre_expert_norm.weight");
    let shard = shards(&dir).into_iter().rfind(|path| {
        edit_header_of(path, |map| {
            let found = map.contains_key(&name);
            if found {
                map[&name]["shape"] = json!([1, 32]);
            }
            found
        })
    });
    let file = shard.expect("the tensor").file_name().unwrap().to_str().unwrap().to_string();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let calls = AtomicUsize::new(0);
    let count = |_| _ = calls.fetch_add(1, Ordering::Relaxed);
    let error = text(checkpoint.load_layers(0..6, 0, 2, Backend::Cpu, &count).unwrap_err());
    for part in [&file, &name, "[32]", "[1, 32]"] {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
    assert_eq!(calls.into_inner(), 0);
}

/// A checkpoint of some layers and ranks has the whole one's bytes there, and zeros in little room elsewhere.
#[test]
fn holes_leave_what_is_asked_for() {
    let whole = small("holes-whole");
    let spec =
        SynthSpec { only_layers: Some(vec![1, 5]), only_experts: Some(vec![4..8, 28..32]), ..SynthSpec::small() };
    let (dir, written) = (folder("holes"), AtomicU64::new(0));
    write(&dir, &spec, &|n| _ = written.fetch_add(n, Ordering::Relaxed)).unwrap();
    assert_eq!(written.into_inner(), spec.written_bytes());
    assert_eq!(spec.bytes(), SynthSpec::small().bytes());
    assert!(spec.written_bytes() < spec.bytes() / 4, "{} of {}", spec.written_bytes(), spec.bytes());
    let (whole, holes) = (Checkpoint::open(&whole).unwrap(), Checkpoint::open(&dir).unwrap());
    for layer in [1, 5] {
        for rank in [1, 7] {
            let [a, b] = [&whole, &holes].map(|c| tensors_of(&c.layer(layer, rank, 8).unwrap()));
            assert_eq!(a, b, "layer {layer} rank {rank}");
        }
    }
    let other = tensors_of(&holes.layer(1, 2, 8).unwrap());
    assert!(other.get("w13").unwrap().bytes().iter().all(|b| *b == 0));
    assert!(tensors_of(&holes.layer(2, 1, 8).unwrap()).get("o").unwrap().bytes().iter().all(|b| *b == 0));
}
