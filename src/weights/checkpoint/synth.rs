//! Synthetic checkpoints in the public format: sharded safetensors, index and configuration, at small
//! dimensions or full size, so that loading is tested without the real files. Elements come from the
//! integer generator of [`crate::synthetic`], each tensor under its full name; tensors are made and
//! written piece by piece, many pieces at once, so that a 17 GB one takes no more memory than a small one.
//! A checkpoint for a few layers or ranks only has files of the same size, with holes in place of the rest.

use crate::error::{Error, Result};
use crate::synthetic::Random;
use half::bf16;
use rayon::prelude::*;
use serde_json::{json, Map, Value};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes made and written at a time by a thread.
const PIECE: usize = 1 << 23;
/// Bytes a parallel task makes.
const CHUNK: usize = 1 << 18;

/// What to write.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthSpec {
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
    /// Layers of the model.
    pub layers: usize,
    /// Whether the first and the last layer keep BF16 experts, as the export does.
    pub bf16_ends: bool,
    /// Seed of every weight.
    pub seed: u64,
    /// A shard ends when the next tensor would take it past this.
    pub shard_bytes: u64,
    /// Layers whose data is written (of the others only the norm that the layer before needs); the rest are
    /// holes in the files, which take no room and read as zeros. `None`: all.
    pub only_layers: Option<Vec<usize>>,
    /// Experts whose weights are written, for ranks that will be loaded; the rest are holes. `None`: all.
    pub only_experts: Option<Vec<Range<usize>>>,
}

impl SynthSpec {
    /// A megabyte: six layers of every kind in several shards, for 1, 2, 4 or 8 ranks.
    pub fn small() -> SynthSpec {
        SynthSpec {
            hidden: 64,
            head_dim: 16,
            q_heads: 16,
            kv_heads: 8,
            window: 24,
            expert_dim: 32,
            n_experts: 32,
            top_k: 4,
            layers: 6,
            bf16_ends: true,
            seed: 1,
            shard_bytes: 200_000,
            only_layers: None,
            only_experts: None,
        }
    }

    /// The released dimensions: 7.8 GB a layer, 26.3 GB one with BF16 experts.
    pub fn full(layers: usize) -> SynthSpec {
        SynthSpec {
            hidden: 8192,
            head_dim: 64,
            q_heads: 128,
            kv_heads: 16,
            window: 2048,
            expert_dim: 4096,
            n_experts: 256,
            top_k: 8,
            layers,
            shard_bytes: 5 << 30,
            ..SynthSpec::small()
        }
    }

    /// Bytes of tensor data.
    pub fn bytes(&self) -> u64 {
        self.tensors().iter().map(Planned::bytes).sum()
    }

    /// Of those, bytes that are written.
    pub fn written_bytes(&self) -> u64 {
        self.tensors().iter().flat_map(|t| self.written(t)).map(|r| r.end - r.start).sum()
    }

    /// The bytes of `tensor` that are written.
    fn written(&self, tensor: &Planned) -> Vec<Range<u64>> {
        let (whole, only) = (0..tensor.bytes(), self.only_layers.as_deref());
        if only.is_some_and(|only| !tensor.layer.is_none_or(|l| only.contains(&l))) {
            let needed = tensor.name.ends_with(".input_layernorm.weight");
            return if needed { vec![whole] } else { Vec::new() };
        }
        match &self.only_experts {
            Some(only) if tensor.shape.len() == 3 => {
                let each = tensor.bytes() / self.n_experts as u64;
                only.iter().map(|r| r.start as u64 * each..r.end as u64 * each).collect()
            }
            _ => vec![whole],
        }
    }

    /// Whether `layer` has BF16 experts.
    pub fn has_bf16_experts(&self, layer: usize) -> bool {
        self.bf16_ends && (layer == 0 || layer + 1 == self.layers)
    }

    fn full_attention(&self, layer: usize) -> bool {
        (self.layers - 1 - layer) % 4 == 0
    }

    fn tensors(&self) -> Vec<Planned> {
        use Make::*;
        let (h, d, n) = (self.hidden, self.expert_dim, self.n_experts);
        let (q, kv) = (self.q_heads * self.head_dim, self.kv_heads * self.head_dim);
        let fan_in = |k: usize| (1.0 / (k as f64).sqrt()) as f32;
        let mut all = Vec::new();
        for layer in 0..self.layers {
            let mut put = |suffix: &str, shape: &[usize], make: Make| {
                let name = format!("model.language_model.layers.{layer}.{suffix}");
                all.push(Planned { name, layer: Some(layer), shape: shape.to_vec(), make });
            };
            put("input_layernorm.weight", &[h], Bf16(0.1));
            put("mlp.experts.post_expert_norm.weight", &[d], Bf16(0.1));
            // NVFP4 experts' outputs are small: the norm after them cancels the down projection's scale and
            // up's, but where its epsilon of 1e-8 counts.
            for (w, rows, per, small) in [("down_proj", d, 1, 2f32.powi(-13)), ("gate_up_proj", 2 * d, 2, 1.0)] {
                let w = format!("mlp.experts.{w}");
                if self.has_bf16_experts(layer) {
                    put(&w, &[n, rows, d], Experts { std: fan_in(d), each: rows * d });
                    continue;
                }
                put(&w, &[n, rows, d / 2], Codes);
                put(&format!("{w}_weight_scale"), &[n, rows, d / 16], BlockScales);
                // A code times a scale has a root mean square of 220.
                let unit = (1.0 / (220.0 * (d as f64).sqrt())) as f32 * small;
                let shape = [n, 2];
                put(&format!("{w}_weight_scale_2"), &shape[..per], GlobalScales(unit));
                // ModelOpt's activation scales, which a layer with BF16 activations leaves alone.
                put(&format!("{w}_input_scale"), &shape[..per], GlobalScales(1.0));
            }
            put("mlp.gate.e_score_correction_bias", &[n], F32(0.055));
            put("mlp.gate.weight", &[n, h], F32((0.07 * (8192.0 / h as f64).sqrt()) as f32));
            put("mlp.post_expert_proj.weight", &[h, d], Bf16(fan_in(d)));
            put("mlp.pre_expert_norm.weight", &[d], Bf16(0.1));
            put("mlp.pre_expert_proj.weight", &[d, h], Bf16(fan_in(h)));
            put("post_attention_residual_gate.gate", &[h], Bf16(0.3));
            put("post_feedforward_layernorm.weight", &[h], Bf16(0.1));
            put("post_feedforward_residual_gate.gate", &[h], Bf16(0.3));
            put("pre_feedforward_layernorm.weight", &[h], Bf16(0.1));
            put("self_attn.gate_proj.weight", &[q, h], Bf16(fan_in(h)));
            put("self_attn.k_proj.weight", &[kv, h], Bf16(fan_in(h)));
            put("self_attn.o_proj.weight", &[h, q], Bf16(fan_in(q)));
            put("self_attn.q_proj.weight", &[q, h], Bf16(fan_in(h)));
            put("self_attn.v_proj.weight", &[kv, h], Bf16(fan_in(h)));
        }
        let name = "model.language_model.norm.weight".into();
        all.push(Planned { name, layer: None, shape: vec![h], make: Bf16(1.0) });
        all
    }

    fn config(&self) -> Value {
        let each = |f: &dyn Fn(usize) -> Value| (0..self.layers).map(f).collect::<Vec<_>>();
        let kind = |i| if self.full_attention(i) { "full_attention" } else { "sliding_attention" };
        let theta = |i| if self.full_attention(i) { 0.0 } else { 500_000.0 };
        json!({
            "architectures": ["MuseSparkForConditionalGeneration"],
            "model_type": "muse_spark",
            "text_config": {
                "model_type": "muse_spark_text",
                "hidden_size": self.hidden,
                "head_dim": self.head_dim,
                "num_attention_heads": self.q_heads,
                "num_key_value_heads": self.kv_heads,
                "num_hidden_layers": self.layers,
                "sliding_window": self.window,
                "moe_hidden_size": self.expert_dim,
                "moe_intermediate_size": self.expert_dim,
                "num_local_experts": self.n_experts,
                "num_experts_per_tok": self.top_k,
                "layer_types": each(&|i| kind(i).into()),
                "layer_rope_theta": each(&|i| theta(i).into()),
                "mlp_layer_types": each(&|_| "sparse".into()),
                "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
                "hidden_act": "silu",
                "attention_bias": false,
                "qk_scale_factor": 5.473_006_486_387_5,
                "output_multiplier": 0.176_776_695_296_636_9,
                "rms_norm_eps": 1e-5,
                "post_norm_eps": 1e-8,
                "routed_scaling_factor": 1.0,
                "residual_gate_temperature": 0.3,
            },
        })
    }

    fn quantization(&self) -> Value {
        let kept = (0..self.layers).filter(|&l| self.has_bf16_experts(l));
        let excluded: Vec<String> = kept.map(|l| format!("model.language_model.layers.{l}.*")).collect();
        json!({
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16,
                             "exclude_modules": excluded},
        })
    }
}

/// How a tensor's elements are made.
#[derive(Clone, Copy, Debug)]
enum Make {
    /// BF16 normals of this deviation.
    Bf16(f32),
    /// FP32 normals of this deviation.
    F32(f32),
    /// BF16 normals, each expert's `each` elements with a factor of their own.
    Experts { std: f32, each: usize },
    /// Two E2M1 codes a byte.
    Codes,
    /// E4M3 from 32 to 120, one in 64 anything from 0 to 448, subnormals included.
    BlockScales,
    /// This times a factor of each element's own.
    GlobalScales(f32),
}

/// A factor from 1/4 to 3.875.
fn factor(bits: u64) -> f32 {
    (16 + ((bits >> 2) & 15)) as f32 * 2f32.powi((bits & 3) as i32 - 6)
}

struct Planned {
    name: String,
    layer: Option<usize>,
    shape: Vec<usize>,
    make: Make,
}

impl Planned {
    fn dtype(&self) -> (&'static str, usize) {
        match self.make {
            Make::Bf16(_) | Make::Experts { .. } => ("BF16", 2),
            Make::F32(_) | Make::GlobalScales(_) => ("F32", 4),
            Make::Codes => ("U8", 1),
            Make::BlockScales => ("F8_E4M3", 1),
        }
    }

    fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype().1) as u64
    }

    /// The tensor's bytes from `start` on, into `out`; both in whole elements (codes: in whole words of 8).
    fn fill(&self, seed: u64, start: usize, out: &mut [u8]) {
        let (random, size) = (Random::new(seed, &self.name), self.dtype().1);
        let rare = Random::new(seed, &format!("{}/rare", self.name));
        let factors = Random::new(seed, &format!("{}/factor", self.name));
        let normal = |i: usize, std: f32| bf16::from_f32(random.normal(i as u64) * std).to_le_bytes();
        let byte = |i: usize, drawn: u8| match (self.make, drawn) {
            (Make::BlockScales, 0..=3) => (rare.byte(i as u64) & 0x7f).min(0x7e),
            (Make::BlockScales, b) => 0x60 + (b & 15),
            (_, b) => b,
        };
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(c, part)| {
            let first = (start + c * CHUNK) / size;
            match self.make {
                Make::Codes | Make::BlockScales => {
                    for (w, word) in part.chunks_mut(8).enumerate() {
                        let drawn = random.bits((first / 8 + w) as u64).to_le_bytes();
                        for (j, b) in word.iter_mut().enumerate() {
                            *b = byte(first + w * 8 + j, drawn[j]);
                        }
                    }
                }
                Make::Bf16(std) => {
                    for (i, v) in part.chunks_exact_mut(2).enumerate() {
                        v.copy_from_slice(&normal(first + i, std));
                    }
                }
                Make::Experts { std, each } => {
                    for (i, v) in part.chunks_exact_mut(2).enumerate() {
                        let std = std * factor(factors.bits(((first + i) / each) as u64));
                        v.copy_from_slice(&normal(first + i, std));
                    }
                }
                Make::F32(std) => {
                    for (i, v) in part.chunks_exact_mut(4).enumerate() {
                        v.copy_from_slice(&(random.normal((first + i) as u64) * std).to_le_bytes());
                    }
                }
                Make::GlobalScales(unit) => {
                    for (i, v) in part.chunks_exact_mut(4).enumerate() {
                        v.copy_from_slice(&(unit * factor(random.bits((first + i) as u64))).to_le_bytes());
                    }
                }
            }
        });
    }
}

/// Writes the checkpoint into `dir`, which is made and must be empty; calls `progress`, from any thread, with
/// the bytes written since the last call. Index and configuration come last: a checkpoint that was cut short
/// does not open.
pub fn write(dir: &Path, spec: &SynthSpec, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
    let fail = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::File { path, source }
    };
    std::fs::create_dir_all(dir).map_err(fail(dir))?;
    if std::fs::read_dir(dir).map_err(fail(dir))?.next().is_some() {
        return Err(super::fault(dir, "--out", "a new or empty folder", "one with files in it"));
    }
    if spec.layers == 0 || spec.expert_dim % 16 != 0 || spec.head_dim % 2 != 0 {
        let got = format!("{} layers, expert_dim {}, head_dim {}", spec.layers, spec.expert_dim, spec.head_dim);
        return Err(super::fault(dir, "dimensions", "layers, whole NVFP4 blocks and even heads", got));
    }
    if let Some(layer) = spec.only_layers.iter().flatten().find(|l| **l >= spec.layers) {
        return Err(super::fault(dir, "layers to write", format!("below {}", spec.layers), layer));
    }
    if let Some(r) = spec.only_experts.iter().flatten().find(|r| r.start > r.end || r.end > spec.n_experts) {
        return Err(super::fault(dir, "experts to write", format!("within 0..{}", spec.n_experts), format!("{r:?}")));
    }

    let mut shards: Vec<Vec<Planned>> = vec![Vec::new()];
    let mut filled = 0;
    for tensor in spec.tensors() {
        if filled > 0 && filled + tensor.bytes() > spec.shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += tensor.bytes();
        shards.last_mut().expect("at least one").push(tensor);
    }
    let paths: Vec<PathBuf> =
        (1..=shards.len()).map(|i| dir.join(format!("model-{i:05}-of-{:05}.safetensors", shards.len()))).collect();
    let mut pieces = Vec::new();
    for (path, tensors) in paths.iter().zip(&shards) {
        let mut begin = header(path, tensors).map_err(fail(path))?;
        for tensor in tensors {
            for written in spec.written(tensor) {
                let parts = written.clone().step_by(PIECE).map(|at| at..written.end.min(at + PIECE as u64));
                pieces.extend(parts.map(|bytes| Piece { path, begin, tensor, bytes }));
            }
            begin += tensor.bytes();
        }
    }
    pieces.par_iter().with_max_len(1).try_for_each_init(Vec::new, |buffer, piece| {
        piece.write(spec.seed, buffer).map_err(fail(piece.path))?;
        progress(piece.bytes.end - piece.bytes.start);
        Ok(())
    })?;
    let mut weight_map = Map::new();
    for (path, tensors) in paths.iter().zip(&shards) {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
        weight_map.extend(tensors.iter().map(|t| (t.name.clone(), name.clone().into())));
    }
    let index = json!({"metadata": {"total_size": spec.bytes()}, "weight_map": weight_map});
    let quantization = spec.quantization();
    let files = [
        ("hf_quant_config.json", quantization),
        ("config.json", spec.config()),
        ("model.safetensors.index.json", index),
    ];
    for (name, value) in files {
        let path = dir.join(name);
        std::fs::write(&path, format!("{value:#}\n")).map_err(fail(&path))?;
    }
    Ok(())
}

/// Makes a shard: its header, and room for the data, which begins at the byte that is returned.
fn header(path: &Path, tensors: &[Planned]) -> std::io::Result<u64> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes();
        header.insert(t.name.clone(), json!({"dtype": t.dtype().0, "shape": t.shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = File::create(path)?;
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(&text)?;
    let begin = 8 + text.len() as u64;
    file.set_len(begin + at)?;
    Ok(begin)
}

/// Bytes of a tensor that begins at `begin` of a file.
struct Piece<'a> {
    path: &'a Path,
    begin: u64,
    tensor: &'a Planned,
    bytes: Range<u64>,
}

impl Piece<'_> {
    fn write(&self, seed: u64, buffer: &mut Vec<u8>) -> std::io::Result<()> {
        buffer.resize((self.bytes.end - self.bytes.start) as usize, 0);
        self.tensor.fill(seed, self.bytes.start as usize, buffer);
        let mut file = File::options().write(true).open(self.path)?;
        file.seek(SeekFrom::Start(self.begin + self.bytes.start))?;
        file.write_all(buffer)
    }
}
