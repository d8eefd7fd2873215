//! FlashAttention-3's scheduler metadata: how a step's attention is cut into tiles and splits, worked out on
//! the device from the step's lengths. The engine [`AttentionEngine::Fa3`] runs by it; a call without one
//! prepares its own.

use crate::config::LayerKind;
use crate::error::{Error, Result};
use crate::plan::{AttentionEngine, Plan};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};
use std::fmt;

/// A step's lengths, and the memory that the metadata goes to. Views of device memory: they keep nothing
/// alive.
#[derive(Clone, Debug)]
pub struct Lengths {
    /// i32 `[B + 1]`, as in the step.
    pub cu_seqlens_q: DeviceTensor,
    /// i32 `[B]`, as in the step, new tokens included.
    pub cache_seqlens: DeviceTensor,
    /// i32 `[SchedulerMetadata::words(plan)]`, 16-byte aligned: written here and by every call it is passed to.
    pub memory: DeviceTensor,
}

/// The part of a plan that metadata is made for: plans that agree in it may share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Made {
    requests: u32,
    max_q_len: u32,
    windowed: bool,
    splits: u32,
    sm_count: u32,
}

impl Made {
    fn of(plan: &Plan) -> Made {
        let (key, attention) = (&plan.key, &plan.launches.attention);
        let reach = key.table_width as u64 * key.page_size as u64;
        Made {
            requests: key.requests,
            max_q_len: key.max_q_len,
            windowed: key.kind == LayerKind::Sliding && reach > attention.window as u64,
            splits: attention.splits,
            sm_count: plan.sm_count,
        }
    }
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, Made { requests, max_q_len, splits, sm_count, .. }) =
            (["causal", "windowed"][self.windowed as usize], self);
        write!(f, "{kind}, {requests} requests of q_len <= {max_q_len}, {splits} splits, {sm_count} SMs")
    }
}

/// Prepared once a step, passed to the calls of all layers of a kind on one stream, in order. Requests and
/// query lengths must be those of the calls; cache lengths may be others (stale ones cost balance, not
/// results).
#[derive(Clone, Debug)]
pub struct SchedulerMetadata {
    memory: DeviceTensor,
    made: Made,
}

impl SchedulerMetadata {
    /// i32 words that the metadata of `plan` takes; 0 for plans of another engine.
    pub fn words(plan: &Plan) -> usize {
        match plan.key.engine {
            AttentionEngine::Own => 0,
            // Four arrays over the requests, and the tile counter.
            AttentionEngine::Fa3 => 4 * (plan.key.requests as usize).next_multiple_of(4) + 4,
        }
    }

    /// Queues the kernel that fills `lengths.memory` on `stream`. Allocates nothing, synchronises nothing and
    /// may be captured: a replay prepares from the lengths of the replay.
    ///
    /// Errors: [`Error::Plan`] for a plan of another engine; a tensor of another type, shape, alignment or
    /// device by its name; [`Error::Alias`]; [`Error::NoCuda`] in a build without the engine.
    pub fn prepare(plan: &Plan, lengths: &Lengths, stream: Stream) -> Result<SchedulerMetadata> {
        if plan.key.engine != AttentionEngine::Fa3 {
            let planned = plan.key.engine.to_string();
            return Err(Error::Plan { field: "engine", planned, got: "scheduler metadata, which fa3 has".into() });
        }
        let requests = plan.key.requests as usize;
        let Lengths { cu_seqlens_q, cache_seqlens, memory } = lengths;
        cu_seqlens_q.expect_contiguous("cu_seqlens_q", DType::I32, &[requests + 1], 4)?;
        cache_seqlens.expect_contiguous("cache_seqlens", DType::I32, &[requests], 4)?;
        memory.expect_contiguous("memory", DType::I32, &[SchedulerMetadata::words(plan)], 16)?;
        for (name, t) in [("cu_seqlens_q", cu_seqlens_q), ("cache_seqlens", cache_seqlens)] {
            if memory.overlaps(t) {
                return Err(Error::Alias { tensor: "memory".into(), other: name.into() });
            }
        }
        queue(plan, lengths, stream)?;
        Ok(SchedulerMetadata { memory: memory.clone(), made: Made::of(plan) })
    }

    /// Where the metadata lies.
    pub fn memory(&self) -> &DeviceTensor {
        &self.memory
    }

    /// Whether a call of `plan` may run by it.
    pub(crate) fn check(&self, plan: &Plan) -> Result<()> {
        let wanted = Made::of(plan);
        if plan.key.engine == AttentionEngine::Fa3 && self.made == wanted {
            return Ok(());
        }
        let planned = match plan.key.engine {
            AttentionEngine::Fa3 => wanted.to_string(),
            other => format!("none (engine {other})"),
        };
        Err(Error::Plan { field: "scheduler_metadata", planned, got: self.made.to_string() })
    }
}

#[cfg(not(feature = "cuda"))]
fn queue(_plan: &Plan, _lengths: &Lengths, _stream: Stream) -> Result<()> {
    Err(Error::NoCuda)
}

#[cfg(feature = "cuda")]
fn queue(plan: &Plan, lengths: &Lengths, stream: Stream) -> Result<()> {
    crate::backend::cuda::ops::prepare_metadata(plan, lengths, stream)
}
