//! A checkpoint of the public model: sharded safetensors under the public names, one layer's shard of
//! one rank at a time.
//!
//! [`Checkpoint::open`] reads configuration, index and headers and maps the shards.
//! [`Checkpoint::load_layers`] takes a rank's part of many layers to a backend, straight from the map: to a GPU
//! through a bounded ring of pinned memory, without any other copy on the host.
//! [`Checkpoint::layer`] gives a layer's part as host tensors under the crate's names ([`super::names`]): row
//! slices are views of the map; only what has to be permuted, fused or cut by columns is copied (`qkv_gate`
//! and `o`, 55 MB of a released layer's 1.1 GB). All methods take `&self` and may run on many threads at
//! once. Errors name the file, the tensor, what was wanted and what was found; layers are given whole, all
//! that were asked for, or not at all.
//!
//! ```no_run
//! use muse_spark_layer::weights::Checkpoint;
//! use muse_spark_layer::Backend;
//!
//! # fn main() -> muse_spark_layer::Result<()> {
//! let checkpoint = Checkpoint::open("Muse-Spark-Open-NVFP4")?;
//! let (rank, ranks) = (3, 8);
//! let all = 0..checkpoint.model().layers.len();
//! let total = checkpoint.bytes(all.clone(), rank, ranks)?;
//! let layers = checkpoint.load_layers(all, rank, ranks, Backend::Cuda { device: 3 }, &|bytes| {
//!     println!("{bytes} more of {total} bytes");
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! What differs between the files and the layer:
//! * rows of q and k are half-split per head, the layer's RoPE rotates neighbours:
//!   `new[2 i + j] = old[head_dim / 2 * j + i]`, on every layer (q and k keep their product on layers
//!   without RoPE);
//! * norm weights are stored as `w` and used as `1 + w`, here as there;
//! * gate and up have a global scale each;
//! * the layer's last norm is the next layer's `input_layernorm`; the last layer has none.

mod config;
mod files;
mod load;
mod parts;
pub mod synth;

pub use config::{ModelConfig, ModelLayer};
pub use load::LoadedLayer;
pub use parts::Part;

use crate::config::{LayerConfig, LayerKind, WeightKind};
use crate::error::{Error, Result};
use crate::tensor::{DType, HostTensor};
use crate::weights::LayerWeights;
use files::{Entry, Files};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Prefixes of the text model's layers: inside the multimodal model, and alone.
const PREFIXES: [&str; 2] = ["model.language_model.layers.", "model.layers."];

pub(crate) fn fault(path: &Path, what: &str, wanted: impl Display, got: impl Display) -> Error {
    Error::Checkpoint { path: path.into(), what: what.into(), wanted: wanted.to_string(), got: got.to_string() }
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    model: ModelConfig,
    files: Files,
    prefix: &'static str,
}

/// One rank's part of a layer.
#[derive(Debug)]
pub struct CheckpointLayer<'a> {
    /// The rank's dimensions.
    pub config: LayerConfig,
    /// What its steps attend to.
    pub kind: LayerKind,
    /// Its first expert, for the steps' `local_start`.
    pub local_start: i32,
    /// The weights; they borrow from the checkpoint.
    pub weights: LayerWeights<'a>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `dir`. The files must not be changed while it is open.
    ///
    /// Errors: [`Error::File`], [`Error::Format`]; [`Error::Checkpoint`] names the file, the tensor or setting, wanted and found.
    pub fn open(dir: impl AsRef<Path>) -> Result<Checkpoint> {
        let dir = dir.as_ref();
        let model = ModelConfig::read(dir)?;
        let files = Files::open(dir, |name| PREFIXES.iter().any(|p| name.starts_with(p)))?;
        let prefix = PREFIXES.into_iter().find(|p| files.tensors.keys().any(|name| name.starts_with(p)));
        let prefix = prefix.ok_or_else(|| {
            fault(&files.listing, "layers", format!("tensors named {}... or {}...", PREFIXES[0], PREFIXES[1]), "none")
        })?;
        Ok(Checkpoint { dir: dir.into(), model, files, prefix })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The model's dimensions and layers.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// How the experts of `layer` are stored, by the type of `gate_up_proj`.
    ///
    /// Errors: [`Error::Checkpoint`] names the file, the tensor, what was wanted and what was found.
    pub fn experts(&self, layer: usize) -> Result<WeightKind> {
        let (name, entry) = self.entry(layer, "mlp.experts.gate_up_proj")?;
        match files::dtype(&entry.dtype) {
            Some(DType::U8) => Ok(WeightKind::Nvfp4),
            Some(DType::Bf16) => Ok(WeightKind::Bf16),
            _ => Err(fault(self.files.path(entry), &name, "U8 (NVFP4) or BF16", &entry.dtype)),
        }
    }

    /// The layer's configuration on one of `ranks` ranks.
    ///
    /// Errors as [`Checkpoint::experts`].
    pub fn layer_config(&self, layer: usize, ranks: usize) -> Result<LayerConfig> {
        // Dimensions first: an index past the last layer is that, not a missing tensor.
        self.model.layer(layer, ranks, WeightKind::Nvfp4)?;
        self.model.layer(layer, ranks, self.experts(layer)?)
    }

    /// What rank `rank` of `ranks` takes of a layer, and from where. Reads no data.
    ///
    /// Errors as [`Checkpoint::layer`].
    pub fn parts(&self, layer: usize, rank: usize, ranks: usize) -> Result<Vec<Part>> {
        let config = self.layer_config(layer, ranks)?;
        Ok(self.sources(&config, layer, rank, ranks)?.into_iter().map(|s| s.part(self)).collect())
    }

    /// Rank `rank`'s part of a layer, of `ranks` ranks of tensor and expert parallelism. Block scales are
    /// read (none may be NaN), `qkv_gate` and `o` copied; everything else is a view of the map.
    ///
    /// Errors: [`Error::Checkpoint`], [`Error::NanScale`].
    pub fn layer(&self, layer: usize, rank: usize, ranks: usize) -> Result<CheckpointLayer<'_>> {
        let config = self.layer_config(layer, ranks)?;
        let sources = self.sources(&config, layer, rank, ranks)?;
        let tensors = self.assemble(&sources)?;
        let weights = LayerWeights::from_host(&config, tensors)?;
        let local_start = (rank * config.local_experts) as i32;
        Ok(CheckpointLayer { kind: self.model.layers[layer].kind, local_start, weights, config })
    }

    /// A layer's own `input_layernorm` weight `w` (used as `1 + w`): layer 0's makes the first attention
    /// input of a stack; the others' come with the layer before, as `next_pre_attn_norm`.
    ///
    /// Errors as [`Checkpoint::layer`].
    pub fn input_norm(&self, layer: usize) -> Result<HostTensor<'_>> {
        self.model.layer(layer, 1, WeightKind::Nvfp4)?;
        self.vector(layer, "input_layernorm.weight", self.model.hidden)
    }

    fn name(&self, layer: usize, suffix: &str) -> String {
        format!("{}{layer}.{suffix}", self.prefix)
    }

    fn entry(&self, layer: usize, suffix: &str) -> Result<(String, &Entry)> {
        let name = self.name(layer, suffix);
        match self.files.tensors.get(&name) {
            Some(entry) => Ok((name, entry)),
            None => Err(fault(&self.files.listing, &name, "this tensor", "none of that name")),
        }
    }
}
