//! The engine `fa3`: FlashAttention-3 in the place of `attention`, and the scheduler metadata it runs by.
#![allow(unsafe_code)]

use super::{Step, SOFTMAX_SCALE};
use crate::backend::cuda::params::{Fa3AttentionParams, Launch};
use crate::backend::cuda::{bridge, Device};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::scheduler::Lengths;
use crate::stream::Stream;

/// What `fa3_schedule` reads: the plan's shape, lengths and metadata at these addresses.
fn fa3_params(plan: &Plan, cu_seqlens_q: u64, cache_seqlens: u64, metadata: u64) -> Fa3AttentionParams {
    let (key, l) = (&plan.key, &plan.launches.attention);
    Fa3AttentionParams {
        cache_seqlens: cache_seqlens as *const i32,
        cu_seqlens_q: cu_seqlens_q as *const i32,
        metadata: metadata as *mut i32,
        table_width: key.table_width as i32,
        page_log2: key.page_size.trailing_zeros() as i32,
        tokens: key.tokens as i32,
        requests: key.requests as i32,
        max_q_len: key.max_q_len as i32,
        window: l.window as i32,
        splits: l.splits as i32,
        ..Default::default()
    }
}

/// [`SchedulerMetadata::prepare`](crate::SchedulerMetadata::prepare) after its checks: on the device that the
/// memory is of.
pub(crate) fn prepare_metadata(plan: &Plan, lengths: &Lengths, stream: Stream) -> Result<()> {
    if plan.key.tokens == 0 || plan.key.requests == 0 {
        return Ok(());
    }
    let memory = lengths.memory.ptr();
    let ordinal = match bridge::pointer_location(memory)? {
        bridge::Location::Device(ordinal) => ordinal,
        _ => return Err(Error::Memory { tensor: "memory".into(), wanted: "device", got: "host" }),
    };
    let device = Device::new(ordinal)?;
    if plan.sm_count != device.sm_count() {
        let (planned, got) = (plan.sm_count.to_string(), device.sm_count().to_string());
        return Err(Error::Plan { field: "sm_count", planned, got });
    }
    let _current = device.make_current()?;
    device.check_pointer("cu_seqlens_q", lengths.cu_seqlens_q.ptr())?;
    device.check_pointer("cache_seqlens", lengths.cache_seqlens.ptr())?;
    let params = fa3_params(plan, lengths.cu_seqlens_q.ptr(), lengths.cache_seqlens.ptr(), memory);
    let launch = Launch { stream: stream.as_ptr(), sm_count: device.sm_count() as i32, dependent: 0 };
    // SAFETY: addresses of checked tensors of this device.
    unsafe { bridge::fa3_schedule(&params, &launch) }
}

impl Step<'_> {
    /// The scheduler metadata, unless the caller brought one.
    pub fn fa3_schedule(&self) -> Result<()> {
        let a = &self.args;
        if a.scheduler_metadata != 0 {
            return Ok(());
        }
        let params = fa3_params(self.plan, a.cu_seqlens_q, a.cache_seqlens, self.scratch.fa3_metadata);
        // SAFETY: as in `qkv_gate`.
        self.launched("fa3_schedule", unsafe { bridge::fa3_schedule(&params, &self.launch) })
    }

    /// Attention by FlashAttention-3: BF16 `[T, 1024]`.
    pub fn fa3_attention(&self) -> Result<()> {
        let (a, s) = (&self.args, &self.scratch);
        let metadata = if a.scheduler_metadata != 0 { a.scheduler_metadata } else { s.fa3_metadata };
        let params = Fa3AttentionParams {
            q_half: s.q as *const _,
            q: s.fa3_q as *mut _,
            k_cache: a.k_cache as *const _,
            v_cache: a.v_cache as *const _,
            page_table: a.page_table as *const i32,
            k_scale: a.k_scale as *const f32,
            v_scale: a.v_scale as *const f32,
            out: s.fa3_out as *mut _,
            lse: s.fa3_lse as *mut f32,
            acc: s.acc as *mut f32,
            acc_lse: s.fa3_acc_lse as *mut f32,
            pages: a.pages,
            table_stride: a.table_stride,
            softmax_scale: SOFTMAX_SCALE,
            ..fa3_params(self.plan, a.cu_seqlens_q, a.cache_seqlens, metadata)
        };
        // SAFETY: as in `qkv_gate`.
        self.launched("fa3_attention", unsafe { bridge::fa3_attention(&params, &self.launch) })
    }
}
