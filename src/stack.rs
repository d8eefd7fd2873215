//! A stack of decoder layers: one workspace, one set of step tensors, one call.
//!
//! Layers of both kinds share positions and query offsets; full and sliding layers have page tables, cache
//! rows and lengths of their own ([`PerKind`]), since a runtime keeps sliding layers in a pool of their own.
//! Each layer has its cache. Layer `i` leaves the stream and, through the next layer's input norm that its
//! weights hold, layer `i + 1`'s attention input; the last layer of a model has no such norm and leaves
//! the stream only.
//!
//! [`DecoderStack::forward`] queues everything on the caller's stream, so a step of the whole stack is
//! captured as one graph. The caller can read the residual stream between layers, for a draft model for
//! instance: [`StackOutput::streams`] has layers write it into the caller's tensors, and
//! [`DecoderStack::forward_range`] runs some of the layers, so that the caller can queue work between two calls.

use crate::backend::cpu::{Batch, Cache, StepInput, StepOptions, StepOutput};
use crate::backend::cuda::model as m;
use crate::collective::{Collective, Identity};
use crate::config::{LayerKind, Taps};
use crate::error::{Error, Result};
use crate::kv_cache::PagedKvCache;
use crate::layer::{not_on_cpu, Backend, DecoderLayer};
use crate::plan::{Plan, PlanKey};
use crate::scheduler::SchedulerMetadata;
use crate::step::{AttentionInput, DeviceInput, DeviceOutput, DeviceTaps};
use crate::stream::Stream;
use crate::tensor::{DType, DeviceTensor};
use crate::workspace::{Borders, Workspace};
use half::bf16;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// One for each kind of layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PerKind<T> {
    /// For layers of full attention.
    pub full: T,
    /// For layers of sliding attention.
    pub sliding: T,
}

impl<T> PerKind<T> {
    /// That of `kind`.
    pub fn get(&self, kind: LayerKind) -> &T {
        match kind {
            LayerKind::Full => &self.full,
            LayerKind::Sliding => &self.sliding,
        }
    }
}

impl<T: Clone> PerKind<T> {
    /// The same for both.
    pub fn both(value: T) -> PerKind<T> {
        PerKind { full: value.clone(), sliding: value }
    }
}

/// Layers that run one after the other.
#[derive(Debug)]
pub struct DecoderStack {
    layers: Vec<(LayerKind, DecoderLayer)>,
}

/// What a step of the stack launches: a plan for each kind of layer and form of experts among its layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackPlan {
    /// The plans.
    pub plans: Vec<Plan>,
    /// The plan of each layer, an index into `plans`.
    pub of_layer: Vec<usize>,
    /// Workspace that a call needs, in bytes: the largest plan's scratch, and what layers hand on.
    pub workspace_bytes: u64,
}

impl StackPlan {
    /// Layer `i`'s plan.
    pub fn layer(&self, i: usize) -> &Plan {
        &self.plans[self.of_layer[i]]
    }

    /// Tokens of the step.
    pub fn tokens(&self) -> u32 {
        self.plans.first().map_or(0, |p| p.key.tokens)
    }
}

impl fmt::Display for StackPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.workspace_bytes as f64 / (1 << 20) as f64;
        write!(f, "{} layers, workspace {mib:.1} MiB", self.of_layer.len())?;
        for (i, plan) in self.plans.iter().enumerate() {
            let layers: Vec<String> =
                self.of_layer.iter().enumerate().filter(|(_, p)| **p == i).map(|(l, _)| l.to_string()).collect();
            write!(f, "\nlayers {}: {plan}", layers.join(", "))?;
        }
        Ok(())
    }
}

/// What the layers of one kind share in a step.
#[derive(Clone, Debug)]
pub struct KindInput {
    /// i64 `[T]`: flat cache row of each new token in this kind's pools; below 0: not stored.
    pub cache_loc: DeviceTensor,
    /// i32 `[B]`: lengths, new tokens included.
    pub cache_seqlens: DeviceTensor,
    /// i32 `[B, table_width]`, any row stride.
    pub page_table: DeviceTensor,
    /// The engine fa3's tile schedule for these lengths; `None`: prepared by each layer.
    pub scheduler_metadata: Option<SchedulerMetadata>,
}

/// A layer's own cache.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// The pool.
    pub cache: PagedKvCache,
    /// f32 `[1]`.
    pub k_scale: DeviceTensor,
    /// f32 `[1]`.
    pub v_scale: DeviceTensor,
}

/// A step's inputs, T tokens of B requests.
#[derive(Clone, Debug)]
pub struct StackInput {
    /// BF16 `[T, 8192]`: the attention input of the first layer that runs.
    pub attn_input: DeviceTensor,
    /// FP32 `[T, 8192]`: the residual stream before it.
    pub stream: DeviceTensor,
    /// i64 `[T]`: for RoPE only.
    pub positions: DeviceTensor,
    /// i32 `[B + 1]`: the only truth on query lengths.
    pub cu_seqlens_q: DeviceTensor,
    /// What each kind of layer has of its own.
    pub kinds: PerKind<KindInput>,
    /// Every layer's cache, also of those that do not run.
    pub caches: Vec<LayerCache>,
    /// i32 `[1]`: the first expert of this rank.
    pub local_start: DeviceTensor,
    /// i32 `[1]`: tokens from this one on are padding and take no route here.
    pub num_tokens_non_padded: Option<DeviceTensor>,
}

/// A step's outputs.
#[derive(Clone, Debug)]
pub struct StackOutput {
    /// BF16 `[T, 8192]`: the attention input of the layer after the last that runs; `None` only without its norm.
    pub hidden: Option<DeviceTensor>,
    /// FP32 `[T, 8192]`: the residual stream after the last layer that runs.
    pub stream: DeviceTensor,
    /// Layers (not the last that runs) whose FP32 `[T, 8192]` stream is wanted, and where: written in place
    /// of scratch, which costs nothing.
    pub streams: Vec<(usize, DeviceTensor)>,
    /// i32 `[layers that run, T, 8]`: the experts chosen, if they are wanted.
    pub topk_ids: Option<DeviceTensor>,
}

impl DecoderStack {
    /// Takes layers in their order, each with its kind ([`LayerKind::of_layer`] knows the released model's). They
    /// are on one backend and have one configuration (apart from the experts' form), and all but the last
    /// hold the next layer's input norm.
    ///
    /// Errors: [`Error::Missing`] without layers or without such a norm, [`Error::Value`] for a layer unlike the first.
    pub fn new(layers: Vec<(LayerKind, DecoderLayer)>) -> Result<DecoderStack> {
        let Some((_, first)) = layers.first() else {
            return Err(Error::Missing { tensor: "layers".into() });
        };
        for (i, (_, layer)) in layers.iter().enumerate() {
            let mut config = first.config().clone();
            config.experts = layer.config().experts;
            if *layer.config() != config {
                return Err(Error::Value {
                    what: format!("layers[{i}]"),
                    wanted: "the configuration of layer 0".into(),
                    got: "another one".into(),
                });
            }
            if layer.backend() != first.backend() {
                return Err(Error::Value {
                    what: format!("layers[{i}]"),
                    wanted: format!("{:?}, as layer 0", first.backend()),
                    got: format!("{:?}", layer.backend()),
                });
            }
            if i + 1 < layers.len() && !layer.has_next_norm() {
                return Err(Error::Missing { tensor: format!("layers[{i}].next_pre_attn_norm") });
            }
        }
        Ok(DecoderStack { layers })
    }

    /// The layers, each with its kind.
    pub fn layers(&self) -> &[(LayerKind, DecoderLayer)] {
        &self.layers
    }

    /// Where the layers run.
    pub fn backend(&self) -> Backend {
        self.layers[0].1.backend()
    }

    /// Bytes of device memory that the weights take.
    pub fn weight_bytes(&self) -> u64 {
        self.layers.iter().map(|(_, l)| l.weight_bytes()).sum()
    }

    /// Decides what steps of these keys launch. The keys' kinds are set here; what may differ between the two is
    /// how the caches are laid out and read (table width, page size, the sink, engine, query precision).
    ///
    /// Errors as [`DecoderLayer::plan`]; [`Error::Plan`] for keys that belong to different steps, [`Error::Unsupported`] for taps.
    pub fn plan(&self, keys: &PerKind<PlanKey>) -> Result<StackPlan> {
        let (full, sliding) = (&keys.full, &keys.sliding);
        for (field, full, sliding) in [
            ("tokens", full.tokens, sliding.tokens),
            ("requests", full.requests, sliding.requests),
            ("max_q_len", full.max_q_len, sliding.max_q_len),
            ("rank", full.rank, sliding.rank),
        ] {
            if full != sliding {
                let (planned, got) = (format!("{full} for full layers"), format!("{sliding} for sliding ones"));
                return Err(Error::Plan { field, planned, got });
            }
        }
        if full.short != sliding.short {
            let planned = format!("{:?} for full layers", full.short);
            return Err(Error::Plan { field: "short", planned, got: format!("{:?} for sliding ones", sliding.short) });
        }
        let mut plan = StackPlan { plans: Vec::new(), of_layer: Vec::new(), workspace_bytes: 0 };
        let mut kinds = Vec::new();
        for (kind, layer) in &self.layers {
            let key = PlanKey { kind: *kind, ..keys.get(*kind).clone() };
            if key.taps != Taps::None {
                let what = "taps of a stack (plan a single layer for them)".into();
                return Err(Error::Unsupported { backend: "stack", what });
            }
            let sort = (*kind, layer.config().experts);
            let index = match kinds.iter().position(|k| *k == sort) {
                Some(index) => index,
                None => {
                    kinds.push(sort);
                    plan.plans.push(layer.plan(key)?);
                    kinds.len() - 1
                }
            };
            plan.of_layer.push(index);
        }
        if self.backend() != Backend::Cpu {
            plan.workspace_bytes = Borders::measure(&plan);
        }
        Ok(plan)
    }

    /// A workspace large enough for `plan`, in memory of its own. Allocates and synchronises. A single layer's
    /// calls may use it too.
    ///
    /// Errors: [`Error::OutOfMemory`].
    pub fn workspace(&self, plan: &StackPlan) -> Result<Workspace> {
        self.layers[0].1.workspace_of(plan.workspace_bytes)
    }

    /// A step of all layers on device memory: nothing is allocated or synchronised, all is queued on `stream`.
    ///
    /// Errors as [`DecoderLayer::forward`], before anything is launched, with `layers[i]` before the name.
    pub fn forward(
        &self,
        plan: &StackPlan,
        workspace: &mut Workspace,
        input: &StackInput,
        output: &StackOutput,
        stream: Stream,
    ) -> Result<()> {
        self.forward_range(plan, workspace, 0..self.layers.len(), input, output, stream)
    }

    /// The same for the layers of `range` only: `input` is before the first of them, `output` after the last.
    ///
    /// Errors as [`DecoderStack::forward`].
    pub fn forward_range(
        &self,
        plan: &StackPlan,
        workspace: &mut Workspace,
        range: Range<usize>,
        input: &StackInput,
        output: &StackOutput,
        stream: Stream,
    ) -> Result<()> {
        self.queue(plan, workspace, range, (input, output), stream, &Identity)
    }

    /// A step of all layers on one of several ranks: `ranks` sums and gathers between the segments of each layer, as
    /// in [`DecoderLayer::forward_with`].
    ///
    /// Errors as [`DecoderStack::forward`], and the collective's own.
    pub fn forward_with(
        &self,
        plan: &StackPlan,
        workspace: &mut Workspace,
        input: &StackInput,
        output: &StackOutput,
        stream: Stream,
        ranks: &dyn Collective,
    ) -> Result<()> {
        self.queue(plan, workspace, 0..self.layers.len(), (input, output), stream, ranks)
    }

    fn queue(
        &self,
        plan: &StackPlan,
        workspace: &mut Workspace,
        range: Range<usize>,
        (input, output): (&StackInput, &StackOutput),
        stream: Stream,
        ranks: &dyn Collective,
    ) -> Result<()> {
        let steps = self.steps(plan, workspace, range.clone(), input, output)?;
        // Every layer's arguments before the first launch.
        for (i, (input, output)) in range.clone().zip(&steps) {
            let checked = self.layers[i].1.check(plan.layer(i), input, output);
            checked.map_err(|e| e.within(&format!("layers[{i}]")))?;
        }
        for (i, (input, output)) in range.zip(&steps) {
            let queued = self.layers[i].1.forward_with(plan.layer(i), workspace, input, output, stream, ranks);
            queued.map_err(|e| e.within(&format!("layers[{i}]")))?;
        }
        Ok(())
    }

    /// The tensors of each layer of `range`: the caller's at both ends, the workspace's between.
    fn steps(
        &self,
        plan: &StackPlan,
        workspace: &Workspace,
        range: Range<usize>,
        input: &StackInput,
        output: &StackOutput,
    ) -> Result<Vec<(DeviceInput, DeviceOutput)>> {
        let value = |what: &str, wanted: String, got: String| Err(Error::Value { what: what.into(), wanted, got });
        let layers = self.layers.len();
        if self.backend() == Backend::Cpu {
            return Err(not_on_cpu());
        }
        if plan.of_layer.len() != layers {
            let (planned, got) = (plan.of_layer.len().to_string(), layers.to_string());
            return Err(Error::Plan { field: "layers", planned, got });
        }
        if range.is_empty() || range.end > layers {
            return value("range", format!("some of layers 0..{layers}"), format!("{range:?}"));
        }
        if input.caches.len() != layers {
            return value("caches", format!("one for each of {layers} layers"), input.caches.len().to_string());
        }
        let last = range.end - 1;
        if let Some((i, _)) = output.streams.iter().find(|(i, _)| !range.contains(i) || *i == last) {
            return value("streams", format!("layers of {}..{last}", range.start), format!("layer {i}"));
        }
        let borders = workspace.borders(plan)?;
        let ids = |i: usize| match &output.topk_ids {
            None => Ok(borders.topk_ids.clone()),
            Some(all) => {
                let shape = [range.len(), plan.tokens() as usize, m::TOP_K as usize];
                all.expect_contiguous("topk_ids", DType::I32, &shape, 16)?;
                Ok(all.index(i - range.start))
            }
        };
        let mut steps: Vec<(DeviceInput, DeviceOutput)> = Vec::with_capacity(range.len());
        for i in range.clone() {
            let (shared, own) = (input.kinds.get(self.layers[i].0), &input.caches[i]);
            let before = steps.last().map(|(_, before)| before);
            let step = DeviceInput {
                attention: AttentionInput {
                    attn_input: before.and_then(|b| b.hidden.clone()).unwrap_or_else(|| input.attn_input.clone()),
                    positions: input.positions.clone(),
                    cache_loc: shared.cache_loc.clone(),
                    cu_seqlens_q: input.cu_seqlens_q.clone(),
                    cache_seqlens: shared.cache_seqlens.clone(),
                    page_table: shared.page_table.clone(),
                    k_scale: own.k_scale.clone(),
                    v_scale: own.v_scale.clone(),
                    cache: own.cache.clone(),
                    scheduler_metadata: shared.scheduler_metadata.clone(),
                },
                stream: before.map_or_else(|| input.stream.clone(), |b| b.stream.clone()),
                local_start: input.local_start.clone(),
                num_tokens_non_padded: input.num_tokens_non_padded.clone(),
            };
            let kept = output.streams.iter().find(|(layer, _)| *layer == i).map(|(_, t)| t);
            let made = if i == last {
                (output.hidden.clone(), output.stream.clone())
            } else {
                (Some(borders.hidden[i % 2].clone()), kept.unwrap_or(&borders.stream[i % 2]).clone())
            };
            let (hidden, stream) = made;
            steps.push((step, DeviceOutput { hidden, stream, topk_ids: ids(i)?, taps: DeviceTaps::default() }));
        }
        Ok(steps)
    }
}

/// A step's inputs on the host.
#[derive(Clone, Copy, Debug)]
pub struct HostStackInput<'a> {
    /// `[T, hidden]`: the residual stream before the first layer.
    pub stream: &'a [f32],
    /// `[T, hidden]`: the first layer's attention input.
    pub attn_input: &'a [bf16],
    /// The requests, as each kind of layer sees them.
    pub batches: PerKind<Batch<'a>>,
    /// The first expert of this rank.
    pub local_start: i32,
    /// Tokens from this one on are padding and take no route; `None`: there is no padding.
    pub num_tokens_non_padded: Option<usize>,
}

impl DecoderStack {
    /// A step on host arrays, on either backend: every layer's outputs, in order. `options` apart from the kind;
    /// `caches` are the layers'.
    ///
    /// Errors as [`DecoderLayer::forward_host`], with `layers[i]` before the name.
    pub fn forward_host(
        &self,
        input: &HostStackInput,
        caches: &mut [Cache],
        options: &StepOptions,
    ) -> Result<Vec<StepOutput>> {
        self.forward_host_with(input, caches, options, &Identity)
    }

    /// The same on one of several ranks, each in a thread or process of its own.
    ///
    /// Errors as [`DecoderLayer::forward_host_with`].
    pub fn forward_host_with(
        &self,
        input: &HostStackInput,
        caches: &mut [Cache],
        options: &StepOptions,
        ranks: &dyn Collective,
    ) -> Result<Vec<StepOutput>> {
        if caches.len() != self.layers.len() {
            return Err(Error::Value {
                what: "caches".into(),
                wanted: format!("one for each of {} layers", self.layers.len()),
                got: caches.len().to_string(),
            });
        }
        let mut outputs: Vec<StepOutput> = Vec::with_capacity(self.layers.len());
        for (i, ((kind, layer), cache)) in self.layers.iter().zip(caches).enumerate() {
            let (stream, attn_input) = match outputs.last() {
                Some(before) => (&before.stream[..], &before.hidden[..]),
                None => (input.stream, input.attn_input),
            };
            let step = StepInput {
                stream,
                attn_input,
                batch: *input.batches.get(*kind),
                local_start: input.local_start,
                num_tokens_non_padded: input.num_tokens_non_padded,
            };
            let options = StepOptions { kind: *kind, ..*options };
            let output = layer.forward_host_with(&step, cache, &options, ranks);
            outputs.push(output.map_err(|e| e.within(&format!("layers[{i}]")))?);
        }
        Ok(outputs)
    }
}
