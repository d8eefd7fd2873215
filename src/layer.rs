//! The decoder layer: [`DecoderLayer::new`], [`DecoderLayer::plan`], [`DecoderLayer::forward`].
//!
//! `forward` runs a step on device memory: it allocates nothing, synchronises nothing, uses only the
//! caller's stream, and may be captured into a CUDA graph, even as the first call. The layer can be called
//! whole, for one rank whose partials are taken for the sums; over ranks ([`DecoderLayer::forward_with`], with a
//! [`Collective`] between the segments); or in three segments, with the caller's communication between them:
//!
//! 1. [`DecoderLayer::attention_block`] to `attn_out`, a partial to be summed over the ranks;
//! 2. [`DecoderLayer::moe_block`] to `moe_mix`, a partial to be summed over the ranks;
//! 3. [`DecoderLayer::final_block`]; up to 8 tokens [`DecoderLayer::unpool_block`] to this rank's slice, to be
//!    gathered over the ranks, and [`DecoderLayer::ffn_block`].
//!
//! [`DecoderLayer::forward_host`] runs a step on host arrays, on either backend: for checks and examples.

use crate::backend::cpu::{Cache, CpuLayer, StepInput, StepOptions, StepOutput};
use crate::backend::cuda::model as m;
use crate::collective::{self, Collective, Identity};
use crate::config::LayerConfig;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::plan::AttentionEngine;
use crate::plan::{Plan, PlanKey};
use crate::step::{
    self, Args, AttentionInput, Checked, DeviceInput, DeviceOutput, FfnInput, FinalInput, FinalOutput, MoeInput,
    MoeOutput, Tap,
};
use crate::stream::Stream;
use crate::tensor::DeviceTensor;
use crate::weights::LayerWeights;
use crate::workspace::{Layout, Workspace};

#[cfg(feature = "cuda")]
use crate::backend::cuda::{ops::Step, params::Launch, Device};
#[cfg(feature = "cuda")]
use crate::weights::device::DeviceWeights;

/// Where a layer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The reference, on host memory.
    Cpu,
    /// A Hopper GPU, by ordinal.
    Cuda {
        /// CUDA device ordinal.
        device: i32,
    },
}

#[derive(Debug)]
enum Engine {
    Cpu(CpuLayer<'static>),
    #[cfg(feature = "cuda")]
    Cuda {
        device: Device,
        weights: Box<DeviceWeights>,
    },
}

/// One rank's part of a decoder layer, its weights in the backend's form.
#[derive(Debug)]
pub struct DecoderLayer {
    config: LayerConfig,
    has_next_norm: bool,
    engine: Engine,
}

impl DecoderLayer {
    /// Takes the weights to the backend. May allocate and synchronise; the originals may be dropped or
    /// freed afterwards.
    ///
    /// Errors: [`Error::Config`]; on CUDA [`Error::CudaDimensions`], [`Error::NoCuda`], [`Error::NoDriver`],
    /// [`Error::NoDevice`], [`Error::UnsupportedGpu`], [`Error::OutOfMemory`], [`Error::NanScale`]; on the CPU
    /// [`Error::Memory`] for weights in device memory.
    pub fn new(config: LayerConfig, weights: LayerWeights, backend: Backend) -> Result<DecoderLayer> {
        config.validate()?;
        let has_next_norm = weights.has_next_norm();
        let engine = match backend {
            Backend::Cpu => Engine::Cpu(CpuLayer::new(config.clone(), weights.into_host()?)?),
            Backend::Cuda { device } => cuda_engine(device, &config, &weights)?,
        };
        Ok(DecoderLayer { config, has_next_norm, engine })
    }

    /// The configuration.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// Where the layer runs.
    pub fn backend(&self) -> Backend {
        match &self.engine {
            Engine::Cpu(_) => Backend::Cpu,
            #[cfg(feature = "cuda")]
            Engine::Cuda { device, .. } => Backend::Cuda { device: device.ordinal() },
        }
    }

    /// Whether steps give `hidden` (the last layer of a model gives the stream only).
    pub fn has_next_norm(&self) -> bool {
        self.has_next_norm
    }

    /// Bytes of device memory that the weights take; 0 on the CPU.
    pub fn weight_bytes(&self) -> u64 {
        match &self.engine {
            Engine::Cpu(_) => 0,
            #[cfg(feature = "cuda")]
            Engine::Cuda { weights, .. } => weights.bytes(),
        }
    }

    /// Decides what steps of `key` launch. (Kernels were loaded in [`DecoderLayer::new`], so that none is
    /// loaded in capture.) `MUSE_SPARK_LAYER_SYNC=1` in the environment makes every plan a debugging one, which
    /// prints each operation to stderr, synchronises after it and names the one that failed.
    ///
    /// Errors: [`Error::Limit`] or [`Error::Value`] for a field of the key, [`Error::Unsupported`] for a choice that
    /// the backend does not have.
    #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
    pub fn plan(&self, mut key: PlanKey) -> Result<Plan> {
        match &self.engine {
            Engine::Cpu(_) => {
                let plan = Plan::new(key, self.config.experts, 0)?;
                Ok(Plan { workspace_bytes: 0, ..plan })
            }
            #[cfg(feature = "cuda")]
            Engine::Cuda { device, .. } => {
                key.synchronize |= std::env::var("MUSE_SPARK_LAYER_SYNC").is_ok_and(|v| v == "1");
                Plan::new(key, self.config.experts, device.sm_count())
            }
        }
    }

    /// A workspace large enough for `plan`, in memory of its own. Allocates and synchronises; [`Error::OutOfMemory`].
    pub fn workspace(&self, plan: &Plan) -> Result<Workspace> {
        self.workspace_of(plan.workspace_bytes)
    }

    /// A workspace of `bytes`, for all plans that fit. Allocates and synchronises.
    ///
    /// Errors: [`Error::OutOfMemory`].
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn workspace_of(&self, bytes: u64) -> Result<Workspace> {
        match &self.engine {
            Engine::Cpu(_) => Ok(Workspace::none()),
            #[cfg(feature = "cuda")]
            Engine::Cuda { device, .. } => Workspace::new(device, bytes),
        }
    }

    /// A workspace in the caller's memory, 256-byte aligned. Synchronises.
    ///
    /// Errors: [`Error::Null`], [`Error::Alignment`] and [`Error::Value`] for memory that does not fit.
    ///
    /// # Safety
    /// `ptr .. ptr + bytes` is memory of the layer's device that nothing else uses while the workspace lives
    /// and while work that used it is queued or captured.
    #[allow(unsafe_code)]
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub unsafe fn workspace_from_raw(&self, ptr: u64, bytes: u64) -> Result<Workspace> {
        match &self.engine {
            Engine::Cpu(_) => Ok(Workspace::none()),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's promise.
            Engine::Cuda { device, .. } => unsafe { Workspace::from_raw(device, ptr, bytes) },
        }
    }

    /// A step on host arrays: shapes at [`StepInput`] and [`Cache`], whose new rows are written. On CUDA it uploads, runs
    /// and downloads: convenient, not fast. Errors name the array that does not fit.
    pub fn forward_host(&self, input: &StepInput, cache: &mut Cache, options: &StepOptions) -> Result<StepOutput> {
        self.forward_host_with(input, cache, options, &Identity)
    }

    /// The same on one of several ranks, each in a thread or process of its own.
    ///
    /// Errors also [`Error::Plan`] for another rank than the options', and [`Error::RankLost`].
    pub fn forward_host_with(
        &self,
        input: &StepInput,
        cache: &mut Cache,
        options: &StepOptions,
        ranks: &dyn Collective,
    ) -> Result<StepOutput> {
        match &self.engine {
            Engine::Cpu(layer) => layer.forward_with(input, cache, options, ranks),
            #[cfg(feature = "cuda")]
            Engine::Cuda { device, .. } => {
                crate::backend::cuda::host::forward(self, device, input, cache, options, ranks)
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda_engine(_device: i32, config: &LayerConfig, _weights: &LayerWeights) -> Result<Engine> {
    m::check_dimensions(config)?;
    Err(Error::NoCuda)
}

#[cfg(feature = "cuda")]
fn cuda_engine(device: i32, config: &LayerConfig, weights: &LayerWeights) -> Result<Engine> {
    m::check_dimensions(config)?;
    let device = Device::new(device)?;
    let weights = Box::new(DeviceWeights::new(&device, config, weights)?);
    Ok(Engine::Cuda { device, weights })
}

/// Steps on device memory. What can be checked without a device is checked first, in every build.
impl DecoderLayer {
    /// A whole step: the collectives are the identity. Shapes and types at [`DeviceInput`] and [`DeviceOutput`].
    ///
    /// Errors, all before anything is launched: the tensor that does not fit by its name ([`Error::Shape`],
    /// [`Error::DType`], [`Error::Stride`], [`Error::Alignment`], [`Error::Null`], [`Error::Alias`], [`Error::Missing`],
    /// [`Error::Device`], [`Error::Memory`]), [`Error::Plan`] for a call that does not fit the plan, [`Error::Value`] for a
    /// workspace that is too small. Then [`Error::Cuda`] or [`Error::ContextLost`], where CUDA fails.
    pub fn forward(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &DeviceInput,
        output: &DeviceOutput,
        stream: Stream,
    ) -> Result<()> {
        self.whole(plan, workspace, input, output, Call { stream, after: None, ranks: &Identity })
    }

    /// A whole step on one of several ranks: `ranks` sums and gathers between the segments, on `stream`. The taps
    /// `attn_out` and `moe_mix` are the sums then, and `ffn_out` has every slice. All ranks make the same calls.
    ///
    /// Errors as [`DecoderLayer::forward`], and the collective's own.
    pub fn forward_with(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &DeviceInput,
        output: &DeviceOutput,
        stream: Stream,
        ranks: &dyn Collective,
    ) -> Result<()> {
        self.whole(plan, workspace, input, output, Call { stream, after: None, ranks })
    }

    /// A step that calls `after` with the name of each operation once it is queued, so that a benchmark
    /// can put events between them (with a plan without dependent launch: else they overlap).
    #[doc(hidden)]
    pub fn profile(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &DeviceInput,
        output: &DeviceOutput,
        stream: Stream,
        after: &After,
    ) -> Result<()> {
        self.whole(plan, workspace, input, output, Call { stream, after: Some(after), ranks: &Identity })
    }

    fn whole(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &DeviceInput,
        output: &DeviceOutput,
        call: Call,
    ) -> Result<()> {
        let checked = step::check_step(plan, input, output, self.has_next_norm)?;
        collective::check_rank(call.ranks, plan.key.rank as usize, m::RANKS as usize)?;
        self.run(plan, workspace, checked, call, Segment::Whole, |args, scratch| {
            let tap = |tap| output.taps.get(tap).map(DeviceTensor::ptr);
            attention_args(args, &input.attention);
            args.attn_core = tap(Tap::AttnCore).unwrap_or(0);
            args.attn_out = tap(Tap::AttnOut).unwrap_or(scratch.attn_out);
            args.stream = input.stream.ptr();
            args.stream_after_attn = tap(Tap::StreamAfterAttn).unwrap_or(scratch.stream_after_attn);
            args.ffn_input = tap(Tap::FfnInput).unwrap_or(scratch.ffn_input);
            args.router_logits = tap(Tap::RouterLogits).unwrap_or(0);
            args.local_start = input.local_start.ptr();
            args.num_tokens_non_padded = input.num_tokens_non_padded.as_ref().map_or(0, DeviceTensor::ptr);
            args.topk_ids = output.topk_ids.ptr();
            args.topk_scores = tap(Tap::TopkScores).unwrap_or(scratch.topk_scores);
            args.expert_input = tap(Tap::ExpertInput).unwrap_or(0);
            args.moe_mix = tap(Tap::MoeMix).unwrap_or(scratch.moe_mix);
            args.ffn_out = tap(Tap::FfnOut).unwrap_or(0);
            if plan.sliced() && !call.ranks.is_identity() {
                let bytes = 4 * u64::from(plan.key.tokens * m::UNPOOL_SLICE);
                args.slices = scratch.slices;
                args.slice = scratch.slices + call.ranks.rank() as u64 * bytes;
                args.slice_ranks = call.ranks.ranks() as u32;
            }
            args.hidden = output.hidden.as_ref().map_or(0, DeviceTensor::ptr);
            args.stream_out = output.stream.ptr();
        })
    }

    /// Segment 1: `attn_out` BF16 `[T, 8192]`, this rank's partial; the cache gets the step's entries.
    ///
    /// Errors as [`DecoderLayer::forward`].
    pub fn attention_block(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &AttentionInput,
        attn_out: &DeviceTensor,
        stream: Stream,
    ) -> Result<()> {
        let checked = step::check_attention_block(plan, input, attn_out)?;
        self.run(plan, workspace, checked, Call::own(stream), Segment::Attention, |args, _| {
            attention_args(args, input);
            args.attn_out = attn_out.ptr();
        })
    }

    /// Segment 2: boundary, routing and experts; `moe_mix` BF16 `[T, 4096]` is this rank's partial.
    ///
    /// Errors as [`DecoderLayer::forward`].
    pub fn moe_block(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &MoeInput,
        output: &MoeOutput,
        stream: Stream,
    ) -> Result<()> {
        let checked = step::check_moe_block(plan, input, output)?;
        self.run(plan, workspace, checked, Call::own(stream), Segment::Moe, |args, scratch| {
            args.stream = input.stream.ptr();
            args.attn_out = input.attn_out.ptr();
            args.local_start = input.local_start.ptr();
            args.num_tokens_non_padded = input.num_tokens_non_padded.as_ref().map_or(0, DeviceTensor::ptr);
            args.stream_after_attn = output.stream_after_attn.ptr();
            args.ffn_input = scratch.ffn_input;
            args.topk_ids = output.topk_ids.ptr();
            args.topk_scores = scratch.topk_scores;
            args.moe_mix = output.moe_mix.ptr();
        })
    }

    /// Segment 3: the unpooler and the final boundary. Up to 8 tokens the unpooler is sliced over the ranks, and
    /// this takes the own slice for the whole: with ranks it is [`DecoderLayer::unpool_block`], a gather, and
    /// [`DecoderLayer::ffn_block`] then.
    ///
    /// Errors as [`DecoderLayer::forward`].
    pub fn final_block(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &FinalInput,
        output: &FinalOutput,
        stream: Stream,
    ) -> Result<()> {
        let checked = step::check_final_block(plan, input, output, self.has_next_norm)?;
        self.run(plan, workspace, checked, Call::own(stream), Segment::Final, |args, _| {
            args.stream_after_attn = input.stream_after_attn.ptr();
            args.moe_mix = input.moe_mix.ptr();
            args.hidden = output.hidden.as_ref().map_or(0, DeviceTensor::ptr);
            args.stream_out = output.stream.ptr();
        })
    }

    /// The first half of segment 3 at up to 8 tokens: `moe_mix` BF16 `[T, 4096]`, summed over the ranks, to this
    /// rank's `slice` FP32 `[T, 1024]`, to be gathered over the ranks.
    ///
    /// Errors as [`DecoderLayer::forward`]; [`Error::Plan`] above 8 tokens, where the unpooler is not sliced.
    pub fn unpool_block(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        moe_mix: &DeviceTensor,
        slice: &DeviceTensor,
        stream: Stream,
    ) -> Result<()> {
        let checked = step::check_unpool_block(plan, moe_mix, slice)?;
        self.run(plan, workspace, checked, Call::own(stream), Segment::Unpool, |args, _| {
            args.moe_mix = moe_mix.ptr();
            args.slice = slice.ptr();
        })
    }

    /// The second half: the final boundary over the gathered slices.
    ///
    /// Errors as [`DecoderLayer::unpool_block`].
    pub fn ffn_block(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        input: &FfnInput,
        output: &FinalOutput,
        stream: Stream,
    ) -> Result<()> {
        let checked = step::check_ffn_block(plan, input, output, self.has_next_norm)?;
        self.run(plan, workspace, checked, Call::own(stream), Segment::Ffn, |args, _| {
            args.stream_after_attn = input.stream_after_attn.ptr();
            args.slices = input.slices.ptr();
            args.slice_ranks = input.slices.shape()[0] as u32;
            args.hidden = output.hidden.as_ref().map_or(0, DeviceTensor::ptr);
            args.stream_out = output.stream.ptr();
        })
    }

    /// Fills the arguments and launches a segment.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn run(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        checked: Checked,
        call: Call,
        segment: Segment,
        fill: impl FnOnce(&mut Args, &Layout),
    ) -> Result<()> {
        match &self.engine {
            Engine::Cpu(_) => Err(not_on_cpu()),
            #[cfg(feature = "cuda")]
            Engine::Cuda { device, weights } => {
                self.check_on_device(plan, &checked, device)?;
                if plan.key.tokens == 0 {
                    return Ok(());
                }
                if workspace.device() != device.ordinal() {
                    let (wanted, got) = (device.ordinal(), workspace.device());
                    return Err(Error::Device { tensor: "workspace".into(), wanted, got });
                }
                let _current = device.make_current()?;
                let scratch = workspace.layout(plan)?;
                let mut args = Args::default();
                fill(&mut args, &scratch);
                let launch = Launch {
                    stream: call.stream.as_ptr(),
                    sm_count: device.sm_count() as i32,
                    dependent: plan.key.dependent_launch as i32,
                };
                let Call { ranks, after, .. } = call;
                Step { device, weights, plan, scratch, args, launch, ranks, after }.run(segment)
            }
        }
    }

    /// The checks of [`DecoderLayer::forward`] alone.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn check(&self, plan: &Plan, input: &DeviceInput, output: &DeviceOutput) -> Result<()> {
        let checked = step::check_step(plan, input, output, self.has_next_norm)?;
        match &self.engine {
            Engine::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Engine::Cuda { device, .. } => self.check_on_device(plan, &checked, device),
        }
    }

    /// The plan is this layer's, the tensors are the device's.
    #[cfg(feature = "cuda")]
    fn check_on_device(&self, plan: &Plan, checked: &Checked, device: &Device) -> Result<()> {
        self.check_plan(plan, device)?;
        if plan.key.tokens == 0 {
            return Ok(());
        }
        let _current = device.make_current()?;
        checked.all().try_for_each(|(name, tensor)| device.check_pointer(name, tensor.ptr()))
    }

    /// A plan made by this layer or one like it.
    #[cfg(feature = "cuda")]
    fn check_plan(&self, plan: &Plan, device: &Device) -> Result<()> {
        let (planned, own) = (plan.launches.experts.weight_kind, self.config.experts);
        if planned != own {
            return Err(Error::Plan { field: "experts", planned: planned.to_string(), got: own.to_string() });
        }
        let (planned, own) = (plan.sm_count, device.sm_count());
        if planned != own {
            return Err(Error::Plan { field: "sm_count", planned: planned.to_string(), got: own.to_string() });
        }
        Ok(())
    }
}

/// A step on device memory was asked of the CPU backend.
pub(crate) fn not_on_cpu() -> Error {
    Error::Unsupported { backend: "CPU", what: "a step on device memory (use `forward_host`)".into() }
}

/// What a measured step does between its operations, by name.
#[doc(hidden)]
pub type After<'a> = dyn Fn(&'static str) -> Result<()> + 'a;

/// How a call runs: where, over which ranks, and what a caller who measures does in between.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
struct Call<'a> {
    stream: Stream,
    ranks: &'a dyn Collective,
    after: Option<&'a After<'a>>,
}

impl Call<'_> {
    /// A segment: the communication is the caller's.
    fn own(stream: Stream) -> Self {
        Call { stream, ranks: &Identity, after: None }
    }
}

/// The parts of a layer between which ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
enum Segment {
    Whole,
    Attention,
    Moe,
    Final,
    Unpool,
    Ffn,
}

fn attention_args(args: &mut Args, x: &AttentionInput) {
    args.attn_input = x.attn_input.ptr();
    args.positions = x.positions.ptr();
    args.cache_loc = x.cache_loc.ptr();
    args.cu_seqlens_q = x.cu_seqlens_q.ptr();
    args.cache_seqlens = x.cache_seqlens.ptr();
    args.page_table = x.page_table.ptr();
    args.table_stride = x.page_table.strides()[0];
    args.k_scale = x.k_scale.ptr();
    args.v_scale = x.v_scale.ptr();
    args.k_cache = x.cache.k().ptr();
    args.v_cache = x.cache.v().ptr();
    args.pages = x.cache.pages() as i64;
    args.scheduler_metadata = x.scheduler_metadata.as_ref().map_or(0, |metadata| metadata.memory().ptr());
}

/// The dataflow: each line is one operation. Shapes are at the methods, in `backend/cuda/ops.rs`.
#[cfg(feature = "cuda")]
impl Step<'_> {
    fn run(&self, segment: Segment) -> Result<()> {
        match segment {
            Segment::Whole => {
                self.attention_block()?;
                self.sum_attn_out()?;
                self.moe_block()?;
                self.sum_moe_mix()?;
                self.unpooler()?;
                self.gather_slices()?;
                self.ffn_boundary()
            }
            Segment::Attention => self.attention_block(),
            Segment::Moe => self.moe_block(),
            Segment::Final => {
                self.unpooler()?;
                self.ffn_boundary()
            }
            Segment::Unpool => {
                self.unpooler()?;
                self.slice_sum()
            }
            Segment::Ffn => self.ffn_boundary(),
        }
    }

    fn attention_block(&self) -> Result<()> {
        self.qkv_gate()?;
        if self.plan.launches.attention.append {
            self.append_attention()?;
        } else {
            self.qk_norm_rope_append()?;
            match self.plan.launches.attention.engine {
                AttentionEngine::Own => self.attention()?,
                AttentionEngine::Fa3 => {
                    self.fa3_schedule()?;
                    self.fa3_attention()?;
                }
            }
        }
        self.out_norm_gate()?;
        self.o()
    }

    fn moe_block(&self) -> Result<()> {
        // Routing before the pooler, or beside it, so that the experts' kernels know their weights while it streams.
        let (boundary, behind) = (self.plan.launches.router.boundary, self.plan.launches.router.topk_behind);
        if boundary {
            self.boundary_router()?;
            self.boundary_topk()?;
        } else {
            self.attn_boundary()?;
            self.router()?;
        }
        if !boundary && !behind {
            self.router_topk()?;
        }
        self.pooler()?;
        if !boundary && behind {
            self.router_topk()?;
        }
        for pass in 0..self.plan.launches.experts.passes {
            self.pre_expert_norm(pass)?;
            self.w13(pass)?;
            self.w2(pass)?;
            self.combine(pass)?;
        }
        Ok(())
    }
}
