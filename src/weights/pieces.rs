//! Tensors where they lie in host memory, perhaps in pieces.

use crate::error::Result;
use crate::tensor::{DType, HostTensor};
use crate::weights::safetensors;
use rayon::prelude::*;

/// A tensor as runs of bytes of one length that follow each other: one run for a tensor that lies in one
/// piece, a run for each row where rows are permuted, fused or cut.
#[derive(Clone, Debug)]
pub(crate) struct Pieces<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    runs: Vec<&'a [u8]>,
}

impl<'a> Pieces<'a> {
    /// `runs` are of one length and together hold the tensor's bytes.
    pub fn new(dtype: DType, shape: &[usize], runs: Vec<&'a [u8]>) -> Pieces<'a> {
        let pieces = Pieces { dtype, shape: shape.to_vec(), runs };
        debug_assert!(pieces.runs.iter().all(|r| r.len() == pieces.runs[0].len()));
        debug_assert_eq!(pieces.runs.iter().map(|r| r.len()).sum::<usize>(), pieces.bytes());
        pieces
    }

    /// Puts the rows of `more`, which is as wide and in runs as long, below this tensor's.
    pub fn append(&mut self, more: Pieces<'a>) {
        debug_assert_eq!(
            (self.shape[1..].to_vec(), self.runs[0].len()),
            (more.shape[1..].to_vec(), more.runs[0].len())
        );
        self.shape[0] += more.shape[0];
        self.runs.extend(more.runs);
    }

    /// A host tensor, in one run.
    #[cfg(any(test, feature = "cuda"))]
    pub fn of(tensor: &'a HostTensor) -> Pieces<'a> {
        Pieces::new(tensor.dtype(), &tensor.shape, vec![tensor.bytes()])
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// The tensor's bytes from `start` on, into `out`.
    pub fn copy(&self, start: usize, mut out: &mut [u8]) {
        let each = self.runs.first().map_or(0, |r| r.len()).max(1);
        let mut at = start;
        while !out.is_empty() {
            let rest = &self.runs[at / each][at % each..];
            let n = rest.len().min(out.len());
            let (now, later) = out.split_at_mut(n);
            now.copy_from_slice(&rest[..n]);
            (out, at) = (later, at + n);
        }
    }

    /// The tensor in host memory of its own, copied in parallel.
    pub fn to_host(&self) -> HostTensor<'static> {
        const PART: usize = 1 << 20;
        let mut host = HostTensor::zeros(self.dtype, &self.shape);
        host.bytes_mut().par_chunks_mut(PART).enumerate().for_each(|(i, part)| self.copy(i * PART, part));
        host
    }

    /// The tensor where it lies, if in one run that is aligned, else a copy; `name` is for errors.
    pub fn view(&self, name: &str) -> Result<HostTensor<'a>> {
        match self.runs[..] {
            [run] => safetensors::tensor(name, self.dtype, &self.shape, run),
            _ => Ok(self.to_host()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_tensor_from_any_byte_on() {
        let bytes: Vec<u8> = (0..48).collect();
        // Rows in reverse.
        let rows: Vec<&[u8]> = bytes.chunks_exact(8).rev().collect();
        let whole: Vec<u8> = rows.concat();
        let pieces = Pieces::new(DType::Bf16, &[6, 4], rows);
        assert_eq!((pieces.len(), pieces.bytes()), (24, 48));
        for start in 0..48 {
            for end in start..=48 {
                let mut out = vec![0xff; end - start];
                pieces.copy(start, &mut out);
                assert_eq!(out, whole[start..end]);
            }
        }
        assert_eq!(pieces.to_host().bytes(), whole);
        let host = HostTensor::u8(&[48], bytes);
        assert_eq!(Pieces::of(&host).to_host(), host);
    }
}
