//! Checkpoints on disk for tests: made, rewritten and edited.

use muse_spark_layer::tensor::NamedTensors;
use muse_spark_layer::weights::checkpoint::synth::{write, SynthSpec};
use muse_spark_layer::weights::checkpoint::CheckpointLayer;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub const PREFIX: &str = "model.language_model.layers.";
pub const INDEX: &str = "model.safetensors.index.json";

/// A new folder of the test `name`.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoint").join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// The small synthetic checkpoint, written for the test `name`.
pub fn small(name: &str) -> PathBuf {
    let dir = folder(name);
    write(&dir, &SynthSpec::small(), &|_| ()).unwrap();
    dir
}

pub fn shards(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path());
    let mut shards: Vec<PathBuf> = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

pub fn tensors_of(layer: &CheckpointLayer) -> NamedTensors<'static> {
    NamedTensors(layer.weights.host().unwrap().0.iter().map(|(k, v)| (k.clone(), v.clone().into_owned())).collect())
}

pub fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A tensor in memory.
pub struct Raw {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

pub type RawTensors = BTreeMap<String, Raw>;

/// The small checkpoint with its tensors changed, in one file without an index.
pub fn rewritten(name: &str, change: impl FnOnce(&mut RawTensors)) -> PathBuf {
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

pub fn edit_json(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let Ok(Value::Object(mut map)) = serde_json::from_slice(&std::fs::read(path).unwrap()) else { panic!("{path:?}") };
    change(&mut map);
    std::fs::write(path, Value::Object(map).to_string()).unwrap();
}

pub fn text_config(map: &mut Map<String, Value>) -> &mut Map<String, Value> {
    map["text_config"].as_object_mut().unwrap()
}

/// Changes the header of the first shard.
pub fn edit_header(dir: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    edit_header_of(&shards(dir)[0], |map| {
        change(map);
        true
    });
}

/// Changes a shard's header where `change` says so, and says so too.
pub fn edit_header_of(path: &Path, change: impl FnOnce(&mut Map<String, Value>) -> bool) -> bool {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let Ok(Value::Object(mut map)) = serde_json::from_slice(&bytes[8..8 + length]) else { panic!() };
    if !change(&mut map) {
        return false;
    }
    let header = Value::Object(map).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[8 + length..]);
    std::fs::write(path, out).unwrap();
    true
}
