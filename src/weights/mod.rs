//! A layer's weights: host arrays, device memory or a safetensors file, by the reference's names.
//!
//! [`LayerWeights`] is a checked set of named tensors, wherever they lie. Backends make their own form of
//! it once, in [`DecoderLayer::new`](crate::DecoderLayer::new): the CUDA backend repacks on the device
//! (`device.rs`), after which the originals may go.

pub mod checkpoint;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod cuts;
#[cfg(feature = "cuda")]
pub(crate) mod device;
pub mod names;
pub mod nvfp4;
pub(crate) mod pieces;
pub mod safetensors;

use crate::config::LayerConfig;
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceTensor, NamedTensors};
use pieces::Pieces;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt;

pub use self::checkpoint::Checkpoint;
pub use self::safetensors::SafetensorsFile;

/// Where the tensors lie.
#[derive(Clone, Debug)]
pub(crate) enum Source<'a> {
    Host(NamedTensors<'a>),
    /// Where they lie in the files of a checkpoint.
    Files(BTreeMap<&'static str, Pieces<'a>>),
    Device(BTreeMap<String, DeviceTensor>),
}

/// Is called with the bytes that were taken to a backend.
#[derive(Clone, Copy)]
pub(crate) struct Progress<'a>(pub &'a (dyn Fn(u64) + Sync));

impl fmt::Debug for Progress<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// One layer's weights, names, shapes and types checked.
#[derive(Clone, Debug)]
pub struct LayerWeights<'a> {
    pub(crate) source: Source<'a>,
    pub(crate) progress: Progress<'a>,
}

impl<'a> LayerWeights<'a> {
    /// Host arrays. Also checks that no NVFP4 block scale is NaN.
    pub fn from_host(config: &LayerConfig, tensors: NamedTensors<'a>) -> Result<LayerWeights<'a>> {
        config.validate()?;
        check_host(config, &tensors)?;
        Ok(LayerWeights { source: Source::Host(tensors), progress: Progress(&|_| ()) })
    }

    /// Device memory, contiguous and 16-byte aligned. It is read in `DecoderLayer::new` only. (That the
    /// memory is the right device's, and that block scales are not NaN, is checked there.)
    pub fn from_device(
        config: &LayerConfig,
        tensors: impl IntoIterator<Item = (String, DeviceTensor)>,
    ) -> Result<LayerWeights<'static>> {
        config.validate()?;
        let tensors: BTreeMap<String, DeviceTensor> = tensors.into_iter().collect();
        check(config, tensors.keys(), |name| tensors.get(name).map(|t| (t.dtype(), t.shape())))?;
        for (name, t) in &tensors {
            t.expect_contiguous(name, t.dtype(), t.shape(), 16)?;
        }
        Ok(LayerWeights { source: Source::Device(tensors), progress: Progress(&|_| ()) })
    }

    /// Tensors in mapped files. What their elements are worth is checked when they are taken.
    pub(crate) fn from_files(
        config: &LayerConfig,
        tensors: BTreeMap<&'static str, Pieces<'a>>,
    ) -> Result<LayerWeights<'a>> {
        config.validate()?;
        let names: Vec<String> = tensors.keys().map(|name| name.to_string()).collect();
        check(config, names.iter(), |name| tensors.get(name).map(|t| (t.dtype, t.shape.as_slice())))?;
        Ok(LayerWeights { source: Source::Files(tensors), progress: Progress(&|_| ()) })
    }

    /// Calls `progress`, from any thread, with the bytes that [`DecoderLayer::new`](crate::DecoderLayer::new)
    /// has taken since the last call. (Device memory is taken where it lies: no calls.)
    pub fn on_progress(self, progress: &'a (dyn Fn(u64) + Sync)) -> LayerWeights<'a> {
        LayerWeights { progress: Progress(progress), ..self }
    }

    /// The host tensors, if that is what they are.
    pub fn host(&self) -> Option<&NamedTensors<'a>> {
        match &self.source {
            Source::Host(tensors) => Some(tensors),
            Source::Files(_) | Source::Device(_) => None,
        }
    }

    /// The tensors in host memory of their own (copied where they are not).
    pub(crate) fn into_host(self) -> Result<NamedTensors<'static>> {
        let Progress(progress) = self.progress;
        let own = match self.source {
            Source::Host(tensors) => {
                let own = tensors.0.into_iter().map(|(name, t)| {
                    let t = t.into_owned();
                    progress(t.bytes().len() as u64);
                    (name, t)
                });
                own.collect()
            }
            Source::Files(tensors) => {
                let own = tensors.into_par_iter().map(|(name, t)| {
                    let host = t.to_host();
                    progress(t.bytes() as u64);
                    (name.to_string(), host)
                });
                own.collect()
            }
            Source::Device(_) => {
                return Err(Error::Memory { tensor: "weights".into(), wanted: "host", got: "device" });
            }
        };
        Ok(NamedTensors(own))
    }

    /// Whether the layer has a next layer's norm (and so gives `hidden`).
    pub fn has_next_norm(&self) -> bool {
        const NAME: &str = "next_pre_attn_norm";
        match &self.source {
            Source::Host(t) => t.contains(NAME),
            Source::Files(t) => t.contains_key(NAME),
            Source::Device(t) => t.contains_key(NAME),
        }
    }
}

/// Names, shapes, types and block scales of host arrays.
pub(crate) fn check_host(config: &LayerConfig, tensors: &NamedTensors) -> Result<()> {
    check(config, tensors.0.keys(), |name| tensors.0.get(name).map(|t| (t.dtype(), t.shape.as_slice())))?;
    for name in ["w13_sf", "w2_sf"] {
        if let Some(t) = tensors.0.get(name) {
            nvfp4::check_scales(name, t.bytes())?;
        }
    }
    Ok(())
}

/// Every tensor that is needed is there with a shape and a type that are taken, and no other is.
pub(crate) fn check<'t>(
    config: &LayerConfig,
    given: impl Iterator<Item = &'t String>,
    get: impl Fn(&str) -> Option<(DType, &'t [usize])>,
) -> Result<()> {
    let specs = names::specs(config);
    for spec in &specs {
        let Some((dtype, shape)) = get(spec.name) else {
            if spec.optional {
                continue;
            }
            return Err(Error::Missing { tensor: spec.name.into() });
        };
        let tensor = || spec.name.to_string();
        if !spec.dtypes.contains(&dtype) {
            return Err(Error::DType { tensor: tensor(), wanted: spec.dtypes[0], got: dtype });
        }
        if !spec.shapes.iter().any(|s| s == shape) {
            return Err(Error::Shape { tensor: tensor(), wanted: spec.shapes[0].clone(), got: shape.to_vec() });
        }
    }
    for name in given {
        if !specs.iter().any(|s| s.name == name) {
            let known: Vec<&str> = specs.iter().map(|s| s.name).collect();
            return Err(Error::Value {
                what: "weights".into(),
                wanted: format!("only {}", known.join(", ")),
                got: format!("an unknown tensor `{name}`"),
            });
        }
    }
    Ok(())
}

/// Vectors derived from the weights, in FP32 as the reference computes them.
pub mod derived {
    use crate::config::LayerConfig;
    use crate::numerics::sigmoid;

    /// `(alpha, beta)` of a residual boundary: `new = alpha * stream + beta * branch`.
    pub fn residual_coefficients(config: &LayerConfig, gate: &[f32]) -> (Vec<f32>, Vec<f32>) {
        gate.iter()
            .map(|&g| {
                let w = g / config.residual_temperature;
                let beta = sigmoid(w);
                let alpha = (sigmoid(-w) * (1.0 + beta)).max(config.residual_gate_eps).sqrt();
                (alpha, beta)
            })
            .unzip()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn residual_coefficients_keep_the_norm() {
            let config = LayerConfig::muse_spark_tp8();
            let (alpha, beta) = residual_coefficients(&config, &[0.0, -1.0, 0.5, 9.0]);
            assert_eq!((alpha[0], beta[0]), (0.75f32.sqrt(), 0.5));
            for (a, b) in alpha.iter().zip(&beta).take(3) {
                assert!((a * a + b * b - 1.0).abs() < 1e-6, "alpha^2 = (1 - beta)(1 + beta)");
            }
            assert_eq!(alpha[3], 1e-3f32.sqrt(), "the radicand is clamped");
        }
    }
}
