//! The collectives between the segments, and what stands around them; nothing where there is one rank.
#![allow(unsafe_code)]

use super::Step;
use crate::backend::cuda::model as m;
use crate::backend::cuda::params::Launch;
use crate::collective::Queue;
use crate::error::Result;
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};

impl Step<'_> {
    fn stream(&self) -> Stream {
        // SAFETY: the caller's stream, which the caller vouched for.
        unsafe { Stream::from_raw(self.launch.stream) }
    }

    /// The edge to an operation behind a collective of `bytes` a rank: a plain one where the collective lets nothing
    /// start early.
    pub(super) fn behind_collective(&self, bytes: u32) -> Launch {
        let dependent = self.ranks.is_identity() || self.ranks.dependent(bytes as usize);
        Launch { dependent: self.launch.dependent * i32::from(dependent), ..self.launch }
    }

    fn queue(&self) -> Queue {
        Queue { stream: self.stream(), dependent: self.launch.dependent != 0 }
    }

    fn sum(&self, name: &'static str, address: u64, columns: u32) -> Result<()> {
        if self.ranks.is_identity() {
            return Ok(());
        }
        let shape = [self.plan.key.tokens as usize, columns as usize];
        // SAFETY: a segment's border: the caller's tensor, a tap or scratch, of this shape.
        let partial = unsafe { DeviceTensor::contiguous(address, DType::Bf16, &shape) };
        self.launched("all_reduce", self.ranks.all_reduce(name, &partial, self.queue()))
    }

    /// The ranks' sum in place of `attn_out`.
    pub fn sum_attn_out(&self) -> Result<()> {
        self.sum("attn_out", self.args.attn_out, m::HIDDEN)
    }

    /// The ranks' sum in place of `moe_mix`.
    pub fn sum_moe_mix(&self) -> Result<()> {
        self.sum("moe_mix", self.args.moe_mix, m::EXPERT_DIM)
    }

    /// All ranks' slices, where the unpooler made a slice.
    pub fn gather_slices(&self) -> Result<()> {
        let a = &self.args;
        if a.slices == 0 {
            return Ok(());
        }
        self.slice_sum()?;
        let (tokens, width, ranks) = (self.plan.key.tokens as usize, m::UNPOOL_SLICE as usize, a.slice_ranks as usize);
        // SAFETY: the region `slices` of the workspace, and this rank's part of it.
        let (part, gathered) = unsafe {
            (
                DeviceTensor::contiguous(a.slice, DType::F32, &[tokens, width]),
                DeviceTensor::contiguous(a.slices, DType::F32, &[ranks, tokens, width]),
            )
        };
        self.launched("all_gather", self.ranks.all_gather("ffn_out", &part, &gathered, self.queue()))
    }
}
