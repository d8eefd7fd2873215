//! A layer's weights in one safetensors file, by the reference's names, memory-mapped.
#![allow(unsafe_code)]

use crate::config::LayerConfig;
use crate::error::{Error, Result};
use crate::tensor::{DType, HostTensor, NamedTensors};
use crate::weights::LayerWeights;
use memmap2::Mmap;
use safetensors::tensor::Dtype;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// A mapped file. Tensors borrow from it; nothing is copied until a backend takes them.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
}

impl SafetensorsFile {
    /// Maps the file. It must not be changed while it is mapped.
    ///
    /// Errors: [`Error::File`].
    pub fn open(path: impl AsRef<Path>) -> Result<SafetensorsFile> {
        let path = path.as_ref().to_path_buf();
        let fail = |source| Error::File { path: path.clone(), source };
        let file = std::fs::File::open(&path).map_err(fail)?;
        // SAFETY: mapped read-only; that others leave the file alone is what every user of a map relies on.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        Ok(SafetensorsFile { path, map })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub(crate) fn map(&self) -> &Mmap {
        &self.map
    }

    fn parse(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map)
            .map_err(|e| Error::Format { path: self.path.clone(), problem: format!("not a safetensors file: {e}") })
    }

    /// Every tensor of the file.
    ///
    /// Errors: [`Error::Format`].
    pub fn tensors(&self) -> Result<NamedTensors<'_>> {
        let parsed = self.parse()?;
        let mut all = NamedTensors::new();
        for (name, view) in parsed.iter() {
            let dtype = dtype(view.dtype()).ok_or_else(|| Error::Format {
                path: self.path.clone(),
                problem: format!("{name}: element type {:?} is not one the layer knows", view.dtype()),
            })?;
            all.insert(name, tensor(name, dtype, view.shape(), view.data())?);
        }
        Ok(all)
    }

    /// The layer's weights, checked against `config`. Tensors the layer does not know are left alone.
    pub fn weights(&self, config: &LayerConfig) -> Result<LayerWeights<'_>> {
        let mut tensors = self.tensors()?;
        let specs = crate::weights::names::specs(config);
        tensors.0.retain(|name, _| specs.iter().any(|s| s.name == name));
        LayerWeights::from_host(config, tensors).map_err(|e| match e {
            Error::Missing { tensor } => {
                Error::Format { path: self.path.clone(), problem: format!("{tensor}: missing") }
            }
            other => other,
        })
    }
}

/// A view where the file aligns the elements, a copy where it does not.
pub(crate) fn tensor<'m>(name: &str, dtype: DType, shape: &[usize], data: &'m [u8]) -> Result<HostTensor<'m>> {
    match HostTensor::from_bytes(name, dtype, shape, data) {
        Err(Error::Alignment { .. }) => {
            let mut copy = HostTensor::zeros(dtype, shape);
            copy.bytes_mut().copy_from_slice(data);
            Ok(copy)
        }
        other => other,
    }
}

fn dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        Dtype::F8_E4M3 => DType::E4m3,
        Dtype::U8 => DType::U8,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}
