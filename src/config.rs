//! The layer's dimensions and constants, and the choices a step makes.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a layer attends to. The weights are the same for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// Every cached token, no RoPE (layers 1, 5, ..., 61).
    Full,
    /// The last [`LayerConfig::window`] tokens, itself included, with interleaved RoPE.
    Sliding,
}

impl LayerKind {
    /// The kind of layer `index` of the released model.
    pub const fn of_layer(index: usize) -> LayerKind {
        if index % 4 == 1 {
            LayerKind::Full
        } else {
            LayerKind::Sliding
        }
    }
}

/// What queries are rounded to before they meet the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QueryPrecision {
    /// Not rounded. CPU backend only.
    Fp32,
    /// `bf16(q * qk_scale_factor)`, as the reference does. CPU backend only.
    Bf16,
    /// `fp16(q) * qk_scale_factor`: the default of the CUDA backend.
    Fp16,
    /// `e4m3(q) * qk_scale_factor`, as FA3's FP8 path does.
    E4m3,
}

/// How the experts' weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightKind {
    /// 4-bit codes, an E4M3 scale per 16 of them along K, FP32 global scales.
    Nvfp4,
    /// BF16 (layers 0 and 61 of the export).
    Bf16,
}

/// Each variant's name, by which it is shown and parsed.
macro_rules! names {
    ($t:ty { $($v:ident = $n:literal),* $(,)? }) => {
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(<$t>::$v => $n),* })
            }
        }
        impl std::str::FromStr for $t {
            type Err = Error;
            fn from_str(s: &str) -> Result<Self> {
                match s {
                    $($n => Ok(<$t>::$v),)*
                    _ => Err(Error::Value {
                        what: stringify!($t).into(),
                        wanted: [$($n),*].join(", "),
                        got: s.into(),
                    }),
                }
            }
        }
    };
}
pub(crate) use names;

names!(LayerKind { Full = "full", Sliding = "sliding" });
names!(QueryPrecision { Fp32 = "fp32", Bf16 = "bf16", Fp16 = "fp16", E4m3 = "e4m3" });
names!(WeightKind { Nvfp4 = "nvfp4", Bf16 = "bf16" });

/// Dimensions and constants of one rank's part of a decoder layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Query heads of this rank; a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key/value heads of this rank.
    pub kv_heads: usize,
    /// Keys a token of a sliding layer sees, itself included.
    pub window: usize,
    /// Base of the RoPE frequencies of sliding layers.
    pub rope_theta: f64,
    /// Multiplies the normalised queries. The softmax scale is this over `sqrt(head_dim)`.
    pub qk_scale_factor: f32,
    /// Epsilon of the pre-norms, the QK norms and the attention output norm.
    pub rms_eps: f32,
    /// Epsilon of the post-attention, post-expert and post-FFN norms.
    pub post_norm_eps: f32,
    /// Width of the mixture of experts, and each expert's intermediate size; a multiple of 16.
    pub expert_dim: usize,
    /// Experts the router chooses from, over all ranks.
    pub n_experts: usize,
    /// Experts this rank holds: `local_start ..`, wrapping at `n_experts`.
    pub local_experts: usize,
    /// Experts a token is routed to.
    pub top_k: usize,
    /// Multiplies the router's logits before the sigmoid.
    pub router_multiplier: f64,
    /// Multiplies the normalised route weights.
    pub route_scale: f32,
    /// Added to the sum of a token's scores before they are divided by it.
    pub route_eps: f32,
    /// Divides the residual gates before the sigmoid.
    pub residual_temperature: f32,
    /// Lower bound of the radicand of a residual gate's alpha.
    pub residual_gate_eps: f32,
    /// Unpooler rows a rank computes at up to `sliced_max_tokens` tokens; divides `hidden`.
    pub unpool_slice: usize,
    /// Up to this many tokens the unpooler is sliced over the ranks.
    pub sliced_max_tokens: usize,
    /// How the experts are stored.
    pub experts: WeightKind,
}

impl LayerConfig {
    /// The released model on one rank of TP8/EP8.
    pub fn muse_spark_tp8() -> LayerConfig {
        LayerConfig {
            hidden: 8192,
            head_dim: 64,
            q_heads: 16,
            kv_heads: 2,
            window: 2048,
            rope_theta: 500_000.0,
            qk_scale_factor: 5.473_006_2,
            rms_eps: 1e-5,
            post_norm_eps: 1e-8,
            expert_dim: 4096,
            n_experts: 256,
            local_experts: 32,
            top_k: 8,
            router_multiplier: 0.176_776_695_296_636_9,
            route_scale: 1.0,
            route_eps: 1e-15,
            residual_temperature: 0.3,
            residual_gate_eps: 1e-3,
            unpool_slice: 1024,
            sliced_max_tokens: 8,
            experts: WeightKind::Nvfp4,
        }
    }

    /// Small dimensions for tests: same structure, a fraction of a millisecond a token.
    pub fn small() -> LayerConfig {
        LayerConfig {
            hidden: 64,
            head_dim: 16,
            q_heads: 4,
            kv_heads: 2,
            window: 24,
            expert_dim: 32,
            n_experts: 32,
            local_experts: 8,
            top_k: 4,
            unpool_slice: 8,
            ..LayerConfig::muse_spark_tp8()
        }
    }

    /// Rows of q in `qkv_gate`, and columns of `o`.
    pub fn q_size(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Rows of k, and of v, in `qkv_gate`; elements of K (or V) per cached token.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Rows of `qkv_gate`: q, k, v, then the output gate.
    pub fn qkv_rows(&self) -> usize {
        2 * self.q_size() + 2 * self.kv_size()
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// `head_dim^-0.5`.
    pub fn sm_scale(&self) -> f32 {
        (self.head_dim as f64).powf(-0.5) as f32
    }

    /// RoPE frequencies `[head_dim / 2]`: `1 / theta^(2i / head_dim)`, the power and the quotient each
    /// rounded to FP32, as the reference has them. Angles are FP32 `position * inv_freq`.
    pub fn inv_freq(&self) -> Vec<f32> {
        (0..self.head_dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / self.head_dim as f32;
                1.0 / self.rope_theta.powf(f64::from(exponent)) as f32
            })
            .collect()
    }

    /// Ranks of expert parallelism: `n_experts / local_experts`.
    pub fn ranks(&self) -> usize {
        self.n_experts / self.local_experts
    }

    /// Keys a token sees at most: 0 for no bound.
    pub fn window_of(&self, kind: LayerKind) -> usize {
        match kind {
            LayerKind::Full => 0,
            LayerKind::Sliding => self.window,
        }
    }

    /// Whether the unpooler of a step of `tokens` tokens is sliced over the ranks.
    pub fn sliced(&self, tokens: usize) -> bool {
        tokens <= self.sliced_max_tokens
    }

    /// The unpooler's rows that rank `rank` computes at `tokens` tokens.
    pub fn unpool_rows(&self, tokens: usize, rank: usize) -> std::ops::Range<usize> {
        if self.sliced(tokens) {
            rank * self.unpool_slice..(rank + 1) * self.unpool_slice
        } else {
            0..self.hidden
        }
    }

    /// Checks that the dimensions make a layer.
    pub fn validate(&self) -> Result<()> {
        fn check(ok: bool, field: &'static str, wanted: impl Into<String>, got: impl fmt::Display) -> Result<()> {
            if ok {
                Ok(())
            } else {
                Err(Error::Config { field, wanted: wanted.into(), got: got.to_string() })
            }
        }
        for (field, n) in [
            ("hidden", self.hidden),
            ("head_dim", self.head_dim),
            ("q_heads", self.q_heads),
            ("kv_heads", self.kv_heads),
            ("window", self.window),
            ("expert_dim", self.expert_dim),
            ("n_experts", self.n_experts),
            ("local_experts", self.local_experts),
            ("top_k", self.top_k),
            ("unpool_slice", self.unpool_slice),
        ] {
            check(n > 0, field, "positive", n)?;
            check(n <= 1 << 24, field, "at most 2^24", n)?;
        }
        // What is multiplied below and by those who make memory of it: the rows of q, the experts' elements.
        let product = |a: usize, b: usize| a as u128 * b as u128;
        check(product(self.q_heads, self.head_dim) <= 1 << 24, "q_heads", "at most 2^24 rows of q", self.q_heads)?;
        check(product(self.kv_heads, self.head_dim) <= 1 << 24, "kv_heads", "at most 2^24 rows of k", self.kv_heads)?;
        let experts = product(self.expert_dim, self.expert_dim) * self.local_experts as u128;
        check(experts <= 1 << 48, "local_experts", "at most 2^48 elements of w2", self.local_experts)?;
        check(self.head_dim % 2 == 0, "head_dim", "even (RoPE rotates pairs)", self.head_dim)?;
        check(
            self.q_heads % self.kv_heads == 0,
            "q_heads",
            format!("a multiple of kv_heads = {}", self.kv_heads),
            self.q_heads,
        )?;
        if self.experts == WeightKind::Nvfp4 {
            check(self.expert_dim % 16 == 0, "expert_dim", "a multiple of 16 (NVFP4 blocks)", self.expert_dim)?;
        }
        check(
            self.n_experts % self.local_experts == 0,
            "local_experts",
            format!("a divisor of n_experts = {}", self.n_experts),
            self.local_experts,
        )?;
        check(self.top_k <= self.n_experts, "top_k", format!("at most n_experts = {}", self.n_experts), self.top_k)?;
        check(
            self.hidden % self.unpool_slice == 0,
            "unpool_slice",
            format!("a divisor of hidden = {}", self.hidden),
            self.unpool_slice,
        )?;
        check(self.rope_theta.is_finite() && self.rope_theta > 0.0, "rope_theta", "positive", self.rope_theta)?;
        check(self.router_multiplier.is_finite(), "router_multiplier", "finite", self.router_multiplier)?;
        for (field, x) in [
            ("qk_scale_factor", self.qk_scale_factor),
            ("rms_eps", self.rms_eps),
            ("post_norm_eps", self.post_norm_eps),
            ("route_scale", self.route_scale),
            ("residual_temperature", self.residual_temperature),
        ] {
            check(x.is_finite() && x > 0.0, field, "positive", x)?;
        }
        for (field, x) in [("route_eps", self.route_eps), ("residual_gate_eps", self.residual_gate_eps)] {
            check(x.is_finite() && x >= 0.0, field, "not negative", x)?;
        }
        Ok(())
    }
}

impl Default for LayerConfig {
    fn default() -> Self {
        LayerConfig::muse_spark_tp8()
    }
}

/// Which intermediate results a step keeps. Names and shapes: [`TapValues`](crate::backend::cpu::TapValues).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Taps {
    /// Only the outputs.
    #[default]
    None,
    /// Every tap point.
    All,
}

/// A page size the cache supports: a power of two from 1 to 256.
#[doc(hidden)]
pub fn check_page_size(page_size: usize) -> Result<()> {
    if page_size.is_power_of_two() && page_size <= 256 {
        return Ok(());
    }
    Err(Error::Value {
        what: "page_size".into(),
        wanted: "a power of two from 1 to 256".into(),
        got: page_size.to_string(),
    })
}
