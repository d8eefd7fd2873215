//! The released TP8/EP8 dimensions: the only ones the CUDA backend runs. Mirrors `csrc/include/model.h`.

use crate::config::LayerConfig;
use crate::error::{Error, Result};

/// Width of the residual stream.
pub const HIDDEN: u32 = 8192;
/// Width of a head.
pub const HEAD_DIM: u32 = 64;
/// Query heads of a rank.
pub const Q_HEADS: u32 = 16;
/// Key/value heads of a rank.
pub const KV_HEADS: u32 = 2;
/// Rows of q, and of the output gate.
pub const Q_SIZE: u32 = Q_HEADS * HEAD_DIM;
/// Rows of k, and of v.
pub const KV_SIZE: u32 = KV_HEADS * HEAD_DIM;
/// Rows of the fused projection: q, k, v, gate.
pub const QKV_ROWS: u32 = 2 * Q_SIZE + 2 * KV_SIZE;
/// Keys a token of a sliding layer sees.
pub const SLIDING_WINDOW: u32 = 2048;
/// Width of the MoE block, and each expert's intermediate size.
pub const EXPERT_DIM: u32 = 4096;
/// Experts over all ranks.
pub const EXPERTS: u32 = 256;
/// Experts of a rank.
pub const LOCAL_EXPERTS: u32 = 32;
/// Ranks of the deployment.
pub const RANKS: u32 = EXPERTS / LOCAL_EXPERTS;
/// Experts a token is routed to.
pub const TOP_K: u32 = 8;
/// Unpooler rows of a rank at up to 8 tokens.
pub const UNPOOL_SLICE: u32 = 1024;

/// Refuses every configuration but the released one, naming the first field that differs.
pub fn check_dimensions(config: &LayerConfig) -> Result<()> {
    let released = LayerConfig { experts: config.experts, ..LayerConfig::muse_spark_tp8() };
    macro_rules! same {
        ($($field:ident),*) => {$(
            if config.$field != released.$field {
                return Err(Error::CudaDimensions {
                    field: stringify!($field),
                    wanted: format!("{}", released.$field),
                    got: format!("{}", config.$field),
                });
            }
        )*};
    }
    same!(hidden, head_dim, q_heads, kv_heads, window, rope_theta, qk_scale_factor, rms_eps, post_norm_eps);
    same!(expert_dim, n_experts, local_experts, top_k, router_multiplier, route_scale, route_eps);
    same!(residual_temperature, residual_gate_eps, unpool_slice, sliced_max_tokens);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_the_released_configuration() {
        let c = LayerConfig::muse_spark_tp8();
        let got = [c.hidden, c.q_size(), c.kv_size(), c.qkv_rows(), c.window, c.expert_dim, c.unpool_slice, c.ranks()];
        let ours = [HIDDEN, Q_SIZE, KV_SIZE, QKV_ROWS, SLIDING_WINDOW, EXPERT_DIM, UNPOOL_SLICE, RANKS];
        assert_eq!(got, ours.map(|x| x as usize));
        check_dimensions(&c).unwrap();
    }

    #[test]
    fn other_dimensions_are_refused_by_name() {
        let text = check_dimensions(&LayerConfig::small()).unwrap_err().to_string();
        assert!(text.contains("hidden = 64") && text.contains("8192"), "{text}");
    }
}
