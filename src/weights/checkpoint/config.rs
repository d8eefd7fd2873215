//! A checkpoint's `config.json` (and `hf_quant_config.json`): the model's dimensions, the kind of each
//! layer, and refusals, by name, of what the layer does not do.

use super::fault;
use crate::config::{LayerConfig, LayerKind, WeightKind};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// What the configuration says of one layer.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ModelLayer {
    /// Full or sliding attention.
    pub kind: LayerKind,
    /// Base of the RoPE frequencies; 0 on full layers, which have no RoPE.
    pub rope_theta: f64,
}

/// The text model's dimensions, over all ranks.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelConfig {
    /// The layers in order.
    pub layers: Vec<ModelLayer>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Query heads of the whole model.
    pub q_heads: usize,
    /// Key and value heads of the whole model.
    pub kv_heads: usize,
    /// Keys a token of a sliding layer sees, itself included.
    pub window: usize,
    /// Width of pooled activations and of an expert.
    pub expert_dim: usize,
    /// Experts of a layer.
    pub n_experts: usize,
    /// Experts a token goes to.
    pub top_k: usize,
    /// Factor on normed queries and keys together.
    pub qk_scale_factor: f64,
    /// Epsilon of the RMS norms.
    pub rms_eps: f64,
    /// Epsilon of the norms after a block.
    pub post_norm_eps: f64,
    /// Factor on router logits before the sigmoid.
    pub router_multiplier: f64,
    /// Factor on the chosen experts' weights.
    pub route_scale: f64,
    /// Temperature of the residual gates.
    pub residual_temperature: f64,
    /// The quantisation method that the configuration names.
    pub quantization: Option<String>,
    #[serde(skip)]
    path: PathBuf,
}

impl ModelConfig {
    /// Reads `config.json`, and `hf_quant_config.json` where there is one, of the folder `dir`.
    ///
    /// Errors: [`Error::File`], [`Error::Format`]; [`Error::Checkpoint`] names the setting that is refused.
    pub fn read(dir: &Path) -> Result<ModelConfig> {
        let path = dir.join("config.json");
        let root = object(&path, &path)?;
        let text = match root.get("text_config") {
            None | Some(Value::Null) => &root,
            Some(Value::Object(text)) => text,
            Some(other) => return Err(fault(&path, "text_config", "an object", other)),
        };
        let mut config = Reader { path: &path, map: text }.model()?;
        for (key, value) in &root {
            // Vision and audio have settings of their own, which are none of the layer's.
            if !value.is_object() || ["text_config", "quantization_config"].contains(&key.as_str()) {
                refuse_flag(&path, key, key, value)?;
            }
        }
        for map in [&root, text] {
            if let Some(value) = map.get("quantization_config").filter(|v| !v.is_null()) {
                config.quantization = Some(quantization(&path, "quantization_config", value)?);
            }
        }
        let path = dir.join("hf_quant_config.json");
        if path.exists() {
            let root = Value::Object(object(&path, &path)?);
            refuse_flag(&path, "quantization", "", &root)?;
            config.quantization = Some(quantization(&path, "quantization", &root)?);
        }
        Ok(config)
    }

    /// The layer's configuration on one of `ranks` ranks.
    pub fn layer(&self, layer: usize, ranks: usize, experts: WeightKind) -> Result<LayerConfig> {
        let wrong = |what: &str, wanted: String, got: usize| Err(fault(&self.path, what, wanted, got));
        let Some(found) = self.layers.get(layer) else {
            return wrong("layer", format!("below num_hidden_layers = {}", self.layers.len()), layer);
        };
        if ranks == 0 {
            return wrong("ranks", "at least 1".into(), ranks);
        }
        for (what, n) in [
            ("num_attention_heads", self.q_heads),
            ("num_key_value_heads", self.kv_heads),
            ("num_local_experts", self.n_experts),
            ("hidden_size", self.hidden),
        ] {
            if n % ranks != 0 {
                return wrong(what, format!("a multiple of {ranks} ranks"), n);
            }
        }
        let released = LayerConfig::muse_spark_tp8();
        let config = LayerConfig {
            hidden: self.hidden,
            head_dim: self.head_dim,
            q_heads: self.q_heads / ranks,
            kv_heads: self.kv_heads / ranks,
            window: self.window,
            // Full layers never read it, but the configuration wants a base.
            rope_theta: if found.rope_theta > 0.0 { found.rope_theta } else { 500_000.0 },
            qk_scale_factor: near(self.qk_scale_factor, released.qk_scale_factor.into()) as f32,
            rms_eps: near(self.rms_eps, released.rms_eps.into()) as f32,
            post_norm_eps: near(self.post_norm_eps, released.post_norm_eps.into()) as f32,
            expert_dim: self.expert_dim,
            n_experts: self.n_experts,
            local_experts: self.n_experts / ranks,
            top_k: self.top_k,
            router_multiplier: near(self.router_multiplier, released.router_multiplier),
            route_scale: near(self.route_scale, released.route_scale.into()) as f32,
            residual_temperature: near(self.residual_temperature, released.residual_temperature.into()) as f32,
            unpool_slice: self.hidden / ranks,
            experts,
            ..released
        };
        config.validate().map_err(|e| match e {
            Error::Config { field, wanted, got } => fault(&self.path, field, wanted, got),
            other => other,
        })?;
        Ok(config)
    }
}

/// The released value where `value` is the same to FP32's precision: kernels are built with the crate's
/// rounding of it, and a configuration may spell it with more digits or fewer.
fn near(value: f64, released: f64) -> f64 {
    if (value - released).abs() <= 1e-7 * released {
        released
    } else {
        value
    }
}

/// The file `path` as a JSON object; `at` names it in errors.
pub(super) fn object(path: &Path, at: &Path) -> Result<Map<String, Value>> {
    let bytes = std::fs::read(path).map_err(|source| Error::File { path: at.into(), source })?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::Format { path: at.into(), problem: "wanted a JSON object".into() }),
        Err(e) => Err(Error::Format { path: at.into(), problem: format!("not JSON: {e}") }),
    }
}

/// Refuses settings that change what the weights mean, wherever they stand: rows of gate and up (or of q
/// and k) interleaved in the file, and shared experts.
fn refuse_flag(path: &Path, name: &str, key: &str, value: &Value) -> Result<()> {
    let on = match value {
        Value::Bool(b) => *b,
        Value::Number(n) => n.as_f64() != Some(0.0),
        Value::String(s) => !s.is_empty(),
        _ => false,
    };
    if on && key.contains("interleave") {
        return Err(fault(path, name, "rows in halves (gate then up; q and k half-split)", value));
    }
    if on && key.contains("shared_expert") {
        return Err(fault(path, name, "no shared experts", value));
    }
    match value {
        Value::Object(map) => map.iter().try_for_each(|(k, v)| refuse_flag(path, &format!("{name}.{k}"), k, v)),
        _ => Ok(()),
    }
}

/// Checks a quantisation's settings: ModelOpt's NVFP4 with blocks of 16, or none. Gives its name.
fn quantization(path: &Path, at: &str, value: &Value) -> Result<String> {
    let Value::Object(map) = value else {
        return Err(fault(path, at, "an object", value));
    };
    let producer = map.get("producer").and_then(|p| p.get("name"));
    for (key, method) in [("quant_method", map.get("quant_method")), ("producer.name", producer)] {
        match method.filter(|v| !v.is_null()) {
            Some(v) if v != "modelopt" && v != "modelopt_fp4" => {
                return Err(fault(path, key, "the quantisation method \"modelopt\"", v));
            }
            _ => {}
        }
    }
    let inner = map.get("quantization").and_then(Value::as_object).unwrap_or(map);
    let algorithm = inner.get("quant_algo").or(map.get("quant_algo")).filter(|v| !v.is_null());
    let Some(algorithm) = algorithm else {
        return match map.get("quant_method") {
            Some(method) => Err(fault(path, "quant_algo", "\"NVFP4\"", format!("none for {method}"))),
            None => Ok("none".into()),
        };
    };
    if algorithm != "NVFP4" {
        return Err(fault(path, "quant_algo", "\"NVFP4\"", algorithm));
    }
    let mut sizes: Vec<&Value> = [inner, map].iter().filter_map(|m| m.get("group_size")).collect();
    if let Some(Value::Object(groups)) = map.get("config_groups") {
        sizes.extend(groups.values().filter_map(|g| g.get("weights")?.get("group_size")));
    }
    if let Some(size) = sizes.into_iter().find(|s| !s.is_null() && s.as_u64() != Some(16)) {
        return Err(fault(path, "group_size", "16", size));
    }
    Ok("modelopt NVFP4".into())
}

/// Typed access to a configuration's fields. A field that is absent or null takes its documented default.
struct Reader<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl Reader<'_> {
    fn wrong(&self, key: &str, wanted: impl Display, got: impl Display) -> Error {
        fault(self.path, key, wanted, got)
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn size(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => match v.as_u64() {
                Some(n) if (1..=1 << 24).contains(&n) => Ok(n as usize),
                _ => Err(self.wrong(key, "an integer from 1 to 2^24", v)),
            },
        }
    }

    fn number(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.wrong(key, "a number", v)),
        }
    }

    fn only(&self, key: &str, wanted: &[Value]) -> Result<()> {
        match self.get(key) {
            Some(v) if !wanted.contains(v) => Err(self.wrong(key, &wanted[0], v)),
            _ => Ok(()),
        }
    }

    /// `key` as a list with one element a layer.
    fn per_layer(&self, key: &str, layers: usize) -> Result<Option<&Vec<Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) if list.len() == layers => Ok(Some(list)),
            Some(Value::Array(list)) => Err(self.wrong(key, format!("{layers} elements"), list.len())),
            Some(other) => Err(self.wrong(key, "a list", other)),
        }
    }

    fn model(&self) -> Result<ModelConfig> {
        self.only("model_type", &["muse_spark_text".into(), "muse_spark".into()])?;
        self.only("hidden_act", &["silu".into()])?;
        self.only("attention_bias", &[false.into()])?;
        if let Some(null @ Value::Null) = self.map.get("sliding_window") {
            return Err(self.wrong("sliding_window", "a number of tokens", null));
        }
        let layers = self.size("num_hidden_layers", 62)?;
        if let Some(types) = self.per_layer("mlp_layer_types", layers)? {
            if let Some(i) = types.iter().position(|t| t != "sparse") {
                return Err(self.wrong(&format!("mlp_layer_types[{i}]"), "\"sparse\"", &types[i]));
            }
        }
        let expert_dim = self.size("moe_intermediate_size", 4096)?;
        let moe_hidden = self.size("moe_hidden_size", 4096)?;
        if moe_hidden != expert_dim {
            return Err(self.wrong("moe_hidden_size", format!("moe_intermediate_size = {expert_dim}"), moe_hidden));
        }
        Ok(ModelConfig {
            layers: self.layers(layers)?,
            hidden: self.size("hidden_size", 8192)?,
            head_dim: self.size("head_dim", 64)?,
            q_heads: self.size("num_attention_heads", 128)?,
            kv_heads: self.size("num_key_value_heads", 16)?,
            window: self.size("sliding_window", 2048)?,
            expert_dim,
            n_experts: self.size("num_local_experts", 256)?,
            top_k: self.size("num_experts_per_tok", 8)?,
            qk_scale_factor: self.number("qk_scale_factor", 5.473_006_486_387_5)?,
            rms_eps: self.number("rms_norm_eps", 1e-5)?,
            post_norm_eps: self.number("post_norm_eps", 1e-8)?,
            router_multiplier: self.number("output_multiplier", 0.176_776_695_296_636_9)?,
            route_scale: self.number("routed_scaling_factor", 1.0)?,
            residual_temperature: self.number("residual_gate_temperature", 0.3)?,
            quantization: None,
            path: self.path.into(),
        })
    }

    /// Each layer's kind. The layer has full attention without RoPE and sliding attention with it, no other
    /// pairing. By default every fourth layer, counted backward from the last, is full.
    fn layers(&self, n: usize) -> Result<Vec<ModelLayer>> {
        let theta = self.theta()?;
        let types = self.per_layer("layer_types", n)?;
        let thetas = self.per_layer("layer_rope_theta", n)?;
        (0..n)
            .map(|i| {
                let full = (n - 1 - i) % 4 == 0;
                let kind = match types.map(|t| (&t[i], t[i].as_str())) {
                    None if full => LayerKind::Full,
                    None => LayerKind::Sliding,
                    Some((_, Some("full_attention"))) => LayerKind::Full,
                    Some((_, Some("sliding_attention"))) => LayerKind::Sliding,
                    Some((other, _)) => {
                        let wanted = "\"full_attention\" or \"sliding_attention\"";
                        return Err(self.wrong(&format!("layer_types[{i}]"), wanted, other));
                    }
                };
                let name = || format!("layer_rope_theta[{i}]");
                let rope_theta = match thetas.map(|t| &t[i]) {
                    None if full => 0.0,
                    None => theta,
                    Some(v) => match v.as_f64() {
                        Some(x) if x >= 0.0 && x.is_finite() => x,
                        _ => return Err(self.wrong(&name(), "a number, 0 for no RoPE", v)),
                    },
                };
                if (kind == LayerKind::Full) != (rope_theta == 0.0) {
                    let wanted = if kind == LayerKind::Full {
                        "0: full attention has no RoPE"
                    } else {
                        "a base: sliding attention has RoPE"
                    };
                    return Err(self.wrong(&name(), wanted, rope_theta));
                }
                Ok(ModelLayer { kind, rope_theta })
            })
            .collect()
    }

    /// The RoPE base of layers without their own. Scaled and partial RoPE are refused.
    fn theta(&self) -> Result<f64> {
        let mut theta = self.number("rope_theta", 500_000.0)?;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(value) = self.get(key) else { continue };
            let Value::Object(map) = value else {
                return Err(self.wrong(key, "an object", value));
            };
            for (field, v) in map.iter().filter(|(_, v)| !v.is_null()) {
                let plain = match field.as_str() {
                    "rope_type" | "type" => v == "default",
                    "factor" | "partial_rotary_factor" => v.as_f64() == Some(1.0),
                    "rope_theta" => match v.as_f64() {
                        Some(x) if x > 0.0 => {
                            theta = x;
                            true
                        }
                        _ => return Err(self.wrong(&format!("{key}.rope_theta"), "a positive number", v)),
                    },
                    _ => false,
                };
                if !plain {
                    return Err(self.wrong(&format!("{key}.{field}"), "plain RoPE, not scaled", v));
                }
            }
        }
        Ok(theta)
    }
}
