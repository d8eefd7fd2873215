//! From router logits to routes: the top experts of each token, their weights, and the lists of tokens
//! by local expert. Written for the CPU; the CUDA backend's `router_topk` gives the same.

use crate::config::LayerConfig;

/// The experts each token is routed to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopK {
    /// Expert ids over all ranks `[T, top_k]`, by descending biased score, lowest id first among equals.
    pub ids: Vec<i32>,
    /// Weights `[T, top_k]`: the unbiased score over the sum of the token's scores.
    pub scores: Vec<f32>,
}

/// `sigmoid(logit * router_multiplier)`, in FP64, rounded to FP32.
#[doc(hidden)]
pub fn route_score(config: &LayerConfig, logit: f64) -> f32 {
    (1.0 / (1.0 + (-logit * config.router_multiplier).exp())) as f32
}

/// The `k` largest of `biased`, largest first, lowest index first among equals. A NaN ranks below
/// everything, so the ids are distinct and in range whatever the values are.
#[doc(hidden)]
pub fn top_k(biased: &[f32], k: usize) -> Vec<usize> {
    // Positive and negative zero are equal; NaN becomes the least key.
    let key = |i: usize| {
        let x = biased[i];
        if x.is_nan() {
            None
        } else {
            Some(x)
        }
    };
    let mut best: Vec<usize> = Vec::with_capacity(k + 1);
    for i in 0..biased.len() {
        // Insert after everything that is not smaller: earlier (lower) ids stay in front.
        let at = best.iter().position(|&b| key(i) > key(b)).unwrap_or(best.len());
        if at < k {
            best.insert(at, i);
            best.truncate(k);
        }
    }
    best
}

/// Top experts and their weights for logits `[T, n_experts]` (before the multiplier).
/// `bias` `[n_experts]` chooses only: weights come from the unbiased scores.
pub fn router_topk(config: &LayerConfig, logits: &[f64], bias: &[f32]) -> TopK {
    let mut out = TopK::default();
    for row in logits.chunks_exact(config.n_experts) {
        let scores: Vec<f32> = row.iter().map(|&l| route_score(config, l)).collect();
        let biased: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
        let chosen = top_k(&biased, config.top_k);
        out.ids.extend(chosen.iter().map(|&e| e as i32));
        out.scores.extend(route_weights(config, chosen.iter().map(|&e| scores[e])));
    }
    out
}

/// The weights of one token's routes from their unbiased scores: normalised over all of them, local or not.
#[doc(hidden)]
pub fn route_weights(config: &LayerConfig, scores: impl Iterator<Item = f32> + Clone) -> Vec<f32> {
    let sum: f32 = scores.clone().sum::<f32>() + config.route_eps;
    scores.map(|s| s / sum * config.route_scale).collect()
}

/// The local expert that holds id `expert`, if this rank does: ids `local_start ..` wrap at `n_experts`.
#[doc(hidden)]
pub fn local_expert(config: &LayerConfig, expert: i32, local_start: i32) -> Option<usize> {
    let local = (i64::from(expert) - i64::from(local_start)).rem_euclid(config.n_experts as i64) as usize;
    (local < config.local_experts).then_some(local)
}

/// The routes to this rank's experts, sorted by (local expert, token, slot).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertLists {
    /// `[local_experts + 1]`: the first route of each local expert; the last entry is their number.
    pub offsets: Vec<usize>,
    /// `[R]`: the token of each route.
    pub route_token: Vec<usize>,
    /// `[T, top_k]`: the route of each (token, slot), `None` where the expert is another rank's.
    pub token_route: Vec<Option<usize>>,
}

impl ExpertLists {
    /// Lists for `ids` `[T, top_k]`. Tokens from `valid_tokens` on (padding) take no route.
    pub fn new(config: &LayerConfig, ids: &[i32], local_start: i32, valid_tokens: usize) -> ExpertLists {
        let mut by_expert: Vec<Vec<usize>> = vec![Vec::new(); config.local_experts];
        for (i, &id) in ids.iter().enumerate().take(valid_tokens.saturating_mul(config.top_k)) {
            if let Some(e) = local_expert(config, id, local_start) {
                by_expert[e].push(i);
            }
        }
        let mut lists = ExpertLists { offsets: vec![0], token_route: vec![None; ids.len()], ..Default::default() };
        for slots in by_expert {
            for i in slots {
                lists.token_route[i] = Some(lists.route_token.len());
                lists.route_token.push(i / config.top_k);
            }
            lists.offsets.push(lists.route_token.len());
        }
        lists
    }

    /// The number of local routes.
    pub fn routes(&self) -> usize {
        self.route_token.len()
    }

    /// The number of local experts that have a route.
    pub fn touched(&self) -> usize {
        self.offsets.windows(2).filter(|w| w[0] < w[1]).count()
    }
}

/// The `local_start` (a multiple of `local_experts`) whose experts `ids` choose most, the first such.
#[doc(hidden)]
pub fn busiest_start(config: &LayerConfig, ids: &[i32]) -> i32 {
    let mut pairs = vec![0usize; config.ranks()];
    for &id in ids {
        pairs[id as usize / config.local_experts] += 1;
    }
    let most = pairs.iter().max().copied().unwrap_or(0);
    let rank = pairs.iter().position(|&n| n == most).unwrap_or(0);
    (rank * config.local_experts) as i32
}
