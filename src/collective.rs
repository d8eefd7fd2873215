//! Sums and gathers over the ranks of a deployment, between the segments of a layer.
//!
//! | after | what | elements | at |
//! |---|---|---|---|
//! | the attention block | `attn_out`, summed | BF16 `[T, 8192]` | any T |
//! | the MoE block | `moe_mix`, summed | BF16 `[T, 4096]` | any T |
//! | the unpooler | the ranks' slices, gathered | FP32 `[T, 1024]` a rank | up to 8 tokens |
//!
//! [`DecoderLayer::forward_with`](crate::DecoderLayer::forward_with) takes a [`Collective`];
//! [`Identity`] stands for a rank on its own, whose partials are taken for the sums. Between threads of one process
//! there is [`threads`] (host memory, for the CPU backend and tests); between GPUs `backend::cuda::nccl::Nccl`
//! (feature `nccl`) and, for a few tokens, `backend::cuda::peers::Peers` (feature `cuda`).
//!
//! # Order
//!
//! Every rank gets the same bits, and the same inputs give the same bits again. [`threads`] and `Peers` add in FP32 in the
//! order of the ranks. NCCL's order is a function of the communicator and of the message's size: it may differ from
//! row to row of a step and from step size to step size, and partial sums are rounded to BF16 on the way.

use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::tensor::DeviceTensor;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Where a collective is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// The caller's stream.
    pub stream: Stream,
    /// The operation before it is one of the layer's, and triggers its dependents early.
    pub dependent: bool,
}

/// Sums and gathers over ranks. All ranks call the same methods in the same order with equal lengths.
///
/// Device methods queue on a stream, neither synchronise it nor wait for other ranks' calls, and may be
/// captured; a rank that is lost shows when the stream is waited for. Host methods return when done. `call`
/// names the tensor, for errors.
pub trait Collective: fmt::Debug + Send + Sync {
    /// This rank, from 0. A step's plan must be of the same rank.
    fn rank(&self) -> usize;

    /// How many there are.
    fn ranks(&self) -> usize;

    /// Whether this is the only rank. Then none of the methods below is called; the partials are taken for the
    /// sums, and the unpooler's slice for the whole, with zeros beside it.
    fn is_identity(&self) -> bool {
        false
    }

    /// Whether messages of `bytes` a rank are exchanged by kernels that keep the rules of dependent launch
    /// (docs/scheduling.md): then the edges to and from them are dependent ones where the plan wants that.
    fn dependent(&self, bytes: usize) -> bool {
        let _ = bytes;
        false
    }

    /// Replaces `partial`, in device memory, by its sum over the ranks.
    fn all_reduce(&self, call: &'static str, partial: &DeviceTensor, at: Queue) -> Result<()> {
        let _ = (partial, at);
        unsupported("CUDA", self, call)
    }

    /// Puts every rank's `part` at `[rank]` of `gathered`, in device memory. `part` may lie there already.
    fn all_gather(&self, call: &'static str, part: &DeviceTensor, gathered: &DeviceTensor, at: Queue) -> Result<()> {
        let _ = (part, gathered, at);
        unsupported("CUDA", self, call)
    }

    /// Waits for the work queued on `stream`, collectives included; [`Error::RankLost`] if a rank was lost. Not for capture.
    fn wait(&self, stream: Stream) -> Result<()> {
        let _ = stream;
        unsupported("CUDA", self, "wait")
    }

    /// Replaces `partial`, in host memory, by its sum over the ranks.
    fn all_reduce_host(&self, call: &'static str, partial: &mut [f32]) -> Result<()> {
        let _ = partial;
        unsupported("CPU", self, call)
    }

    /// Every rank's `part`, one after the other.
    fn all_gather_host(&self, call: &'static str, part: &[f32]) -> Result<Vec<f32>> {
        let _ = part;
        unsupported("CPU", self, call)
    }
}

fn unsupported<T>(backend: &'static str, collective: &(impl fmt::Debug + ?Sized), call: &str) -> Result<T> {
    Err(Error::Unsupported { backend, what: format!("{call} over {collective:?}") })
}

/// A rank on its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity;

impl Collective for Identity {
    fn rank(&self) -> usize {
        0
    }
    fn ranks(&self) -> usize {
        1
    }
    fn is_identity(&self) -> bool {
        true
    }
}

/// Checks that a step planned for `rank`, with an unpooler of `slices` slices, is one of `collective`'s.
pub(crate) fn check_rank(collective: &dyn Collective, rank: usize, slices: usize) -> Result<()> {
    if collective.is_identity() {
        return Ok(());
    }
    if collective.rank() != rank {
        let got = format!("a collective of rank {}", collective.rank());
        return Err(Error::Plan { field: "rank", planned: rank.to_string(), got });
    }
    if collective.ranks() > slices {
        return Err(Error::Limit { what: "ranks".into(), limit: slices as u64, got: collective.ranks() as u64 });
    }
    Ok(())
}

/// One rank of a group of threads. Dropping it tells the others that it has left.
#[derive(Debug)]
pub struct ThreadRank {
    rank: usize,
    timeout: Duration,
    group: Arc<Group>,
}

/// What the threads share: the parts of the round under way, and those of the last one.
#[derive(Debug)]
struct Group {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    round: u64,
    parts: Vec<Option<Vec<f32>>>,
    done: Arc<Vec<Vec<f32>>>,
    /// Why there will be no further round.
    lost: Option<String>,
}

/// A group of `ranks` threads of this process, in host memory. A rank that waits longer than `timeout` for the others
/// gives [`Error::RankLost`], and so does every rank from then on.
pub fn threads(ranks: usize, timeout: Duration) -> Vec<ThreadRank> {
    let state = State { parts: vec![None; ranks], ..State::default() };
    let group = Arc::new(Group { ranks, state: Mutex::new(state), changed: Condvar::new() });
    (0..ranks).map(|rank| ThreadRank { rank, timeout, group: group.clone() }).collect()
}

impl Group {
    /// A panic between two statements of this file leaves the state whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn lose(&self, state: &mut State, reason: String) {
        state.lost.get_or_insert(reason);
        self.changed.notify_all();
    }
}

impl ThreadRank {
    fn fail<T>(&self, call: &str, reason: &str) -> Result<T> {
        Err(Error::RankLost { rank: self.rank, ranks: self.group.ranks, call: call.into(), reason: reason.into() })
    }

    /// Brings this rank's part and takes every rank's, by rank.
    fn exchange(&self, call: &'static str, part: Vec<f32>) -> Result<Arc<Vec<Vec<f32>>>> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.group.state();
        if let Some(reason) = &state.lost {
            return self.fail(call, reason);
        }
        let round = state.round;
        state.parts[self.rank] = Some(part);
        if state.parts.iter().all(Option::is_some) {
            state.done = Arc::new(state.parts.iter_mut().filter_map(Option::take).collect());
            state.round += 1;
            self.group.changed.notify_all();
        }
        while state.round == round {
            if let Some(reason) = &state.lost {
                return self.fail(call, reason);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = (0..self.group.ranks).filter(|&r| state.parts[r].is_none());
                let missing: Vec<String> = missing.map(|r| r.to_string()).collect();
                let reason = format!("waited {:?} for rank {}", self.timeout, missing.join(", "));
                self.group.lose(&mut state, reason.clone());
                return self.fail(call, &reason);
            }
            state = self.group.changed.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        let done = state.done.clone();
        drop(state);
        match done.iter().position(|p| p.len() != done[self.rank].len()) {
            None => Ok(done),
            Some(other) => Err(Error::Value {
                what: format!("{call}: elements of rank {other}"),
                wanted: format!("{} as on rank {}", done[self.rank].len(), self.rank),
                got: done[other].len().to_string(),
            }),
        }
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        let mut state = self.group.state();
        self.group.lose(&mut state, format!("rank {} has left", self.rank));
    }
}

impl Collective for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.group.ranks
    }

    /// In the order of the ranks, on every rank.
    fn all_reduce_host(&self, call: &'static str, partial: &mut [f32]) -> Result<()> {
        let parts = self.exchange(call, partial.to_vec())?;
        partial.copy_from_slice(&parts[0]);
        for part in &parts[1..] {
            partial.iter_mut().zip(part).for_each(|(sum, v)| *sum += v);
        }
        Ok(())
    }

    fn all_gather_host(&self, call: &'static str, part: &[f32]) -> Result<Vec<f32>> {
        Ok(self.exchange(call, part.to_vec())?.concat())
    }
}
