//! Layers of a checkpoint to a backend, many at once.

use super::Checkpoint;
use super::CheckpointLayer;
use crate::config::LayerKind;
use crate::error::{Error, Result};
use crate::layer::{Backend, DecoderLayer};
use crate::weights::LayerWeights;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Layers that are in hand at a time. One fills the bus or the disk but for its beginning and end.
const AT_ONCE: usize = 4;

/// One rank's part of a layer, on a backend.
#[derive(Debug)]
pub struct LoadedLayer {
    /// The layer. It keeps nothing of the checkpoint.
    pub layer: DecoderLayer,
    /// What its steps attend to.
    pub kind: LayerKind,
    /// Its first expert, for the steps' `local_start`.
    pub local_start: i32,
}

impl Checkpoint {
    /// Bytes that a rank takes of `layers`, as the files hold them. Finds and checks their tensors; reads no data.
    pub fn bytes(&self, layers: Range<usize>, rank: usize, ranks: usize) -> Result<u64> {
        let of_layer = |l| Ok(self.parts(l, rank, ranks)?.iter().map(|p| p.bytes).sum::<u64>());
        layers.map(of_layer).sum()
    }

    /// Loads rank `rank`'s part of `layers` (of `ranks` ranks) to a backend, in parallel, a few layers at a
    /// time, and gives them in order.
    ///
    /// On CUDA matrices go from the map through pinned memory, 72 MiB a device however many layers and loads
    /// there are, and are packed on the device; the host holds nothing else of them. (The map's own pages are the
    /// system's to keep or drop.) On the CPU a layer is copied.
    ///
    /// `progress` is called with the bytes taken since the last call, from any thread; all calls together give
    /// [`Checkpoint::bytes`]. All layers' tensors are found and checked before any is loaded; the first error
    /// ends the load, names file, tensor, wanted and got, and leaves nothing loaded.
    pub fn load_layers(
        &self,
        layers: Range<usize>,
        rank: usize,
        ranks: usize,
        backend: Backend,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<LoadedLayer>> {
        self.bytes(layers.clone(), rank, ranks)?;
        #[cfg(feature = "cuda")]
        let _ring = match backend {
            // From the first layer to the last.
            Backend::Cuda { device } => Some(crate::backend::cuda::Device::new(device)?.staging()?),
            Backend::Cpu => None,
        };
        many(layers, |l| self.load_layer(l, rank, ranks, backend, progress))
    }

    fn load_layer(
        &self,
        at: usize,
        rank: usize,
        ranks: usize,
        backend: Backend,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<LoadedLayer> {
        let config = self.layer_config(at, ranks)?;
        let sources = self.sources(&config, at, rank, ranks)?;
        self.prefetch(&sources);
        let weights = LayerWeights::from_files(&config, self.pieces(&sources)?)?.on_progress(progress);
        if backend == Backend::Cpu {
            self.check_block_scales(&sources)?;
        }
        let local_start = (rank * config.local_experts) as i32;
        let layer = DecoderLayer::new(config, weights, backend).map_err(|error| match &error {
            // Found on the device.
            Error::NanScale { tensor, index } => match sources.iter().find(|s| s.tensor == tensor) {
                Some(source) => self.nan_scale(source, *index),
                None => error,
            },
            _ => error,
        })?;
        Ok(LoadedLayer { layer, kind: self.model.layers[at].kind, local_start })
    }

    /// As [`Checkpoint::load_layers`], but hands the host tensors of each layer to `take`, with its index, on
    /// one of a few threads, and gives what that returns.
    pub fn load<T: Send>(
        &self,
        layers: Range<usize>,
        rank: usize,
        ranks: usize,
        take: impl Fn(usize, CheckpointLayer<'_>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        many(layers, |l| take(l, self.layer(l, rank, ranks)?))
    }
}

/// `make` of every layer, a few at a time on threads of their own, in order; or the first error, and nothing.
fn many<T: Send>(layers: Range<usize>, make: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(layers.start);
    let made = Mutex::new(Ok(Vec::new()));
    let lock = || made.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(layers.len()) {
            scope.spawn(|| loop {
                let l = next.fetch_add(1, Ordering::Relaxed);
                if l >= layers.end || lock().is_err() {
                    return;
                }
                match (make(l), &mut *lock()) {
                    (Ok(one), Ok(all)) => all.push((l, one)),
                    (Err(error), all @ Ok(_)) => *all = Err(error),
                    (_, Err(_)) => {}
                }
            });
        }
    });
    let mut all = made.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    all.sort_by_key(|(l, _)| *l);
    Ok(all.into_iter().map(|(_, one)| one).collect())
}
