//! What a step will launch: plain data, decided once from shapes, printable, and the same for every
//! replay of a captured graph.
//!
//! A [`PlanKey`] says which steps are meant; [`DecoderLayer::plan`](crate::DecoderLayer::plan) checks it,
//! takes every launch decision (`backend/cuda/heuristics.rs`) and sizes the workspace.

use crate::backend::cuda::heuristics;
use crate::backend::cuda::model as m;
use crate::config::{check_page_size, names, LayerKind, QueryPrecision, Taps, WeightKind};
use crate::error::{Error, Result};
use crate::workspace::Layout;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The most tokens a step may have.
pub const MAX_TOKENS: u32 = 32768;
/// The most requests a step may have.
pub const MAX_REQUESTS: u32 = 16384;
/// The most multiprocessors a device may have.
#[doc(hidden)]
pub const MAX_SM_COUNT: u32 = 1024;
/// The longest request, in tokens, that the attention's index arithmetic is made for.
pub const MAX_TABLE_TOKENS: u64 = 1 << 24;

/// Which attention runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionEngine {
    /// The crate's own, for every query length.
    #[default]
    Own,
    /// FlashAttention-3 (feature `fa3`), with E4M3 queries. Its limits: page ids of every 160-key block in
    /// which a token sees a key must be in range and the bytes there finite, and a token's bits depend on the
    /// lengths of the whole batch (by the splits).
    Fa3,
}

names!(AttentionEngine { Own = "own", Fa3 = "fa3" });

/// The last requests of a mixed batch, which have few tokens each: decode rows and verify blocks behind prefill
/// chunks. Their attention takes the kernels made for them; without this all requests take the longest one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShortRequests {
    /// How many: fewer than all.
    pub requests: u32,
    /// Rows of the step from the first of them on, padding behind them included: `cu_seqlens_q` of the first of
    /// them is the step's tokens less these.
    pub tokens: u32,
    /// Bound on the query length of each, at most 16.
    pub max_q_len: u32,
}

/// The steps a plan is for. Steps of one key may differ in lengths, positions, pages, scales and
/// activations: those are read on the device.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PlanKey {
    /// T: rows of the step, padding rows included. 0 is legal.
    pub tokens: u32,
    /// B: requests, zero-length ones included.
    pub requests: u32,
    /// Bound on a request's query length (cut to `tokens` in the plan).
    pub max_q_len: u32,
    /// The short requests that stand behind long ones, if there are both.
    #[serde(default)]
    pub short: Option<ShortRequests>,
    /// Valid columns of the page table.
    pub table_width: u32,
    /// Tokens a cache page holds: a power of two from 1 to 256.
    pub page_size: u32,
    /// Full or sliding attention.
    pub kind: LayerKind,
    /// The attention engine.
    pub engine: AttentionEngine,
    /// What queries are rounded to.
    pub query: QueryPrecision,
    /// This rank of the deployment: selects the unpooler's slice at up to 8 tokens.
    pub rank: u32,
    /// Whether a call may ask for intermediate results.
    pub taps: Taps,
    /// Programmatic dependent launch between the step's kernels.
    pub dependent_launch: bool,
    /// Local routes that one pass of the experts holds; routes beyond it cost extra passes. `None`: chosen.
    pub route_bound: Option<u32>,
    /// Tokens whose `cache_loc` is 0 store nothing (runtimes that use slot 0 as a sink).
    pub skip_slot_zero: bool,
    /// Debugging: print each operation, synchronise after it and name the one that failed. Not for capture.
    pub synchronize: bool,
}

impl PlanKey {
    /// One new token for each of `requests` requests, page size 1, a page table of `table_width` columns.
    pub fn decode(requests: u32, table_width: u32) -> PlanKey {
        PlanKey {
            tokens: requests,
            requests,
            max_q_len: 1,
            short: None,
            table_width,
            page_size: 1,
            kind: LayerKind::Full,
            engine: AttentionEngine::Own,
            query: QueryPrecision::Fp16,
            rank: 0,
            taps: Taps::None,
            dependent_launch: true,
            route_bound: None,
            skip_slot_zero: false,
            synchronize: false,
        }
    }

    /// `q_len` new tokens for each request: a verify block or a prefill chunk.
    pub fn block(requests: u32, q_len: u32, table_width: u32) -> PlanKey {
        PlanKey { tokens: requests.saturating_mul(q_len), max_q_len: q_len, ..PlanKey::decode(requests, table_width) }
    }

    /// Checks every field against the limits.
    pub fn validate(&self) -> Result<()> {
        let limit = |what: &str, limit: u64, got: u64| {
            if got <= limit {
                return Ok(());
            }
            Err(Error::Limit { what: what.into(), limit, got })
        };
        limit("tokens", MAX_TOKENS as u64, self.tokens as u64)?;
        limit("requests", MAX_REQUESTS as u64, self.requests as u64)?;
        check_page_size(self.page_size as usize)?;
        let columns = self.table_width as u64 * self.page_size as u64;
        limit("table_width * page_size", MAX_TABLE_TOKENS, columns)?;
        limit("rank", m::RANKS as u64 - 1, self.rank as u64)?;
        let needed = |what: &str, got: u32| {
            if got > 0 || self.tokens == 0 {
                return Ok(());
            }
            Err(Error::Value {
                what: what.into(),
                wanted: "at least 1 when there are tokens".into(),
                got: got.to_string(),
            })
        };
        needed("requests", self.requests)?;
        needed("max_q_len", self.max_q_len)?;
        needed("table_width", self.table_width)?;
        if (self.requests as u64 * self.max_q_len as u64) < self.tokens as u64 {
            return Err(Error::Value {
                what: "max_q_len".into(),
                wanted: format!("at least tokens / requests = {} / {}", self.tokens, self.requests),
                got: self.max_q_len.to_string(),
            });
        }
        if let Some(short) = &self.short {
            let fewer = |what: &str, all: u32, got: u32| {
                if (1..all).contains(&got) {
                    return Ok(());
                }
                let wanted = format!("some of the {all} there are, not all");
                Err(Error::Value { what: what.into(), wanted, got: got.to_string() })
            };
            fewer("short.requests", self.requests, short.requests)?;
            fewer("short.tokens", self.tokens, short.tokens)?;
            if !(1..=heuristics::SPLIT_ATTENTION_Q_LEN).contains(&short.max_q_len) {
                return Err(Error::Value {
                    what: "short.max_q_len".into(),
                    wanted: format!("1 to {}", heuristics::SPLIT_ATTENTION_Q_LEN),
                    got: short.max_q_len.to_string(),
                });
            }
        }
        if self.route_bound == Some(0) {
            return Err(Error::Value { what: "route_bound".into(), wanted: "at least 1".into(), got: "0".into() });
        }
        Ok(())
    }
}

impl PlanKey {
    /// Choices that the CUDA backend does not have.
    fn validate_cuda(&self) -> Result<()> {
        let unsupported = |what: String| Err(Error::Unsupported { backend: "CUDA", what });
        match self.query {
            QueryPrecision::Fp16 | QueryPrecision::E4m3 => {}
            other => return unsupported(format!("query precision {other} (fp16 and e4m3 are)")),
        }
        match (self.engine, self.query) {
            (AttentionEngine::Fa3, _) if !cfg!(feature = "fa3") => {
                unsupported("the attention engine fa3 in this build (it lacks the feature `fa3`)".into())
            }
            (AttentionEngine::Fa3, QueryPrecision::Fp16) => {
                unsupported("query precision fp16 with the attention engine fa3 (e4m3 is)".into())
            }
            _ => Ok(()),
        }
    }
}

/// One dense projection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DensePlan {
    /// First weight row (the unpooler's slice).
    pub row_begin: u32,
    /// Weight rows.
    pub rows: u32,
    /// Columns.
    pub k: u32,
    /// K splits, added in order by the consumer.
    pub splits: u32,
    /// Tokens a tile of the skinny kernel (8, 16, 32, 64, 96, 128) or of the wide one, or 0: the tiled kernel.
    pub tile_n: u32,
    /// Weight rows a tile of the wide kernel, or 0: the skinny or the tiled kernel.
    pub tile_rows: u32,
    /// Whether the output is FP32 (always with splits), else BF16.
    pub out_f32: bool,
}

/// The two forms of the router's logits, both FP32-grade.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouterForm {
    /// FP32 fused multiply-adds over the FP32 rows.
    Rows,
    /// Three products of two FP16 halves of weights and residual stream on the tensor cores.
    Tiled,
}

/// The router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterPlan {
    /// Which kernel.
    pub form: RouterForm,
    /// Parts that K is cut into; the reader adds them.
    pub splits: u32,
    /// Whether the pooler goes on as soon as the router says that the boundary is complete, beside the routing.
    pub releases: bool,
    /// Whether the top 8 are launched behind the pooler, whose CTAs leave them room, instead of before it.
    pub topk_behind: bool,
    /// Whether it and the top 8 do the work of `attn_boundary` too (one token, no taps).
    pub boundary: bool,
}

/// The attention.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionPlan {
    /// Whose kernels.
    pub engine: AttentionEngine,
    /// The tiled kernel (long query blocks) instead of the split kernel; own engine.
    pub tiled: bool,
    /// Whether the attention kernel does the work of `qk_norm_rope_append` too (one token a request; own engine).
    pub append: bool,
    /// Bound on a request's KV splits; of fa3 1 to 64, and the metadata's too.
    pub splits: u32,
    /// Keys a token sees at most; 0: all.
    pub window: u32,
    /// Scratch for FP16 copies of the visible pages.
    pub kv_scratch_bytes: u64,
}

/// The experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertPlan {
    /// The experts' weights.
    pub weight_kind: WeightKind,
    /// The few-token kernel instead of the many-token one.
    pub few: bool,
    /// K splits of w2.
    pub w2_splits: u32,
    /// Routes a pass holds.
    pub route_bound: u32,
    /// Passes launched; those past the step's routes exit at once.
    pub passes: u32,
    /// Bound on one expert's routes in a pass.
    pub max_routes_per_expert: u32,
    /// FP32 words for sums that one CTA begins and the next goes on with; 0: none does.
    #[serde(default)]
    pub carry_words: u32,
}

/// Every launch decision of a step, in the order of the step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launches {
    /// Query, key, value and gate rows.
    pub qkv_gate: DensePlan,
    /// Of all requests, or of the long ones.
    pub attention: AttentionPlan,
    /// Of the key's short requests.
    #[serde(default)]
    pub short_attention: Option<AttentionPlan>,
    /// Output projection of the attention block.
    pub o: DensePlan,
    /// Router logits.
    pub router: RouterPlan,
    /// 8192 to 4096.
    pub pooler: DensePlan,
    /// w13, w2 and their scratch.
    pub experts: ExpertPlan,
    /// 4096 to 8192, or this rank's slice of it.
    pub unpooler: DensePlan,
}

/// A checked key, the launches chosen for it, and the workspace it needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What the plan is for.
    pub key: PlanKey,
    /// Multiprocessors the decisions were taken for (0: the CPU backend).
    pub sm_count: u32,
    /// The launches.
    pub launches: Launches,
    /// Scratch a call needs, in bytes. May be shared by all layers on one stream.
    pub workspace_bytes: u64,
}

impl Plan {
    /// Decides everything for `key` on a GPU of `sm_count` multiprocessors (0: the CPU backend, for which
    /// the launches mean nothing). Pure: the same arguments give the same plan anywhere.
    ///
    /// Errors: [`Error::Limit`], [`Error::Value`] or [`Error::Unsupported`] for a field of the key.
    pub fn new(mut key: PlanKey, experts: WeightKind, sm_count: u32) -> Result<Plan> {
        key.validate()?;
        if sm_count > MAX_SM_COUNT {
            return Err(Error::Limit { what: "sm_count".into(), limit: MAX_SM_COUNT.into(), got: sm_count.into() });
        }
        if sm_count > 0 {
            key.validate_cuda()?;
        }
        key.max_q_len = key.max_q_len.min(key.tokens);
        if key.max_q_len <= heuristics::SPLIT_ATTENTION_Q_LEN || key.engine == AttentionEngine::Fa3 {
            key.short = None; // All take the same kernel anyway.
        }
        let launches = heuristics::choose(&key, experts, sm_count.max(1));
        Ok(Plan::with_launches(key, launches, sm_count))
    }

    /// A plan with launches of the caller's choice (benchmarks, tests).
    #[doc(hidden)]
    pub fn with_launches(key: PlanKey, launches: Launches, sm_count: u32) -> Plan {
        let mut plan = Plan { key, sm_count, launches, workspace_bytes: 0 };
        plan.workspace_bytes = Layout::measure(&plan);
        plan
    }

    /// Whether the unpooler computes this rank's slice of its columns only.
    pub fn sliced(&self) -> bool {
        self.launches.unpooler.rows < m::HIDDEN
    }

    /// BF16 planes of `ffn_input` that are written: three, whose sum is FP32-grade, for the router's rows and for a
    /// tap; else the first, which is what the pooler reads.
    pub(crate) fn ffn_planes(&self) -> u32 {
        let router = &self.launches.router;
        if (router.form == RouterForm::Rows && !router.boundary) || self.key.taps != Taps::None {
            3
        } else {
            1
        }
    }

    /// Whether any of the step's requests takes an attention that leaves the gate to `out_norm_gate`.
    pub(crate) fn gate_apart(&self) -> bool {
        let l = &self.launches;
        !l.attention.tiled || l.short_attention.as_ref().is_some_and(|short| !short.tiled)
    }

    /// Kernel launches of a step on its own, without what stands around collectives.
    pub fn launch_count(&self) -> u32 {
        // The 11 launches outside the experts, and 4 a pass. Large steps build the expert lists apart.
        // FlashAttention-3 adds the queries' bytes, its metadata and the join of splits.
        let attention = match self.key.engine {
            AttentionEngine::Own => 0,
            AttentionEngine::Fa3 => 2 + u32::from(self.launches.attention.splits > 1),
        };
        if self.key.tokens == 0 {
            0
        } else {
            let l = &self.launches;
            // Short requests add an attention and a join.
            let short = 2 * u32::from(l.short_attention.is_some());
            11 + attention + short - u32::from(l.attention.append) - u32::from(l.router.boundary) + 4 * l.experts.passes
        }
    }
}

impl fmt::Display for DensePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tile_rows, self.tile_n) {
            (0, 0) => write!(f, "tiled")?,
            (0, n) => write!(f, "skinny n={n}")?,
            (rows, n) => write!(f, "wide {rows} x {n}")?,
        }
        write!(f, ", [{}..{}, {}]", self.row_begin, self.row_begin + self.rows, self.k)?;
        write!(f, ", splits {}, out {}", self.splits, if self.out_f32 { "f32" } else { "bf16" })
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (k, l) = (&self.key, &self.launches);
        writeln!(
            f,
            "{} tokens of {} requests (q_len <= {}), {} attention, page {} x {}, queries {}, rank {}, {} SMs",
            k.tokens, k.requests, k.max_q_len, k.kind, k.table_width, k.page_size, k.query, k.rank, self.sm_count
        )?;
        writeln!(
            f,
            "dependent launch {}, taps {:?}, about {} launches, workspace {:.1} MiB",
            if k.dependent_launch { "on" } else { "off" },
            k.taps,
            self.launch_count(),
            self.workspace_bytes as f64 / (1 << 20) as f64
        )?;
        writeln!(f, "  qkv_gate   {}", l.qkv_gate)?;
        let a = &l.attention;
        let form = match a.engine {
            AttentionEngine::Fa3 => format!("fa3, at most {} splits a request", a.splits),
            AttentionEngine::Own if a.tiled => "tiled".into(),
            AttentionEngine::Own => format!("split, at most {} a request", a.splits),
        };
        let append = if a.append { "with append, " } else { "" };
        writeln!(f, "  attention  {append}{form}, window {}, kv scratch {} bytes", a.window, a.kv_scratch_bytes)?;
        if let (Some(short), Some(a)) = (&k.short, &l.short_attention) {
            let ShortRequests { requests, tokens, max_q_len } = short;
            write!(f, "  attention  of the last {requests} requests ({tokens} tokens, q_len <= {max_q_len}): ")?;
            writeln!(f, "split, at most {} a request", a.splits)?;
        }
        writeln!(f, "  o          {}", l.o)?;
        let beside = if l.router.releases { ", the pooler beside it" } else { "" };
        let behind = if l.router.topk_behind { ", the top 8 behind that" } else { "" };
        let boundary = if l.router.boundary { ", with the boundary" } else { "" };
        writeln!(f, "  router     {:?}, splits {}{boundary}{beside}{behind}", l.router.form, l.router.splits)?;
        writeln!(f, "  pooler     {}", l.pooler)?;
        let e = &l.experts;
        writeln!(
            f,
            "  experts    {}, {}-token kernel, w2 splits {}, {} pass(es) of {} routes",
            e.weight_kind,
            if e.few { "few" } else { "many" },
            e.w2_splits,
            e.passes,
            e.route_bound
        )?;
        write!(f, "  unpooler   {}", l.unpooler)
    }
}
