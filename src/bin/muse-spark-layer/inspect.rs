//! `inspect`: what a checkpoint holds for a rank, one layer in detail or all in a line each, after reading it;
//! and how fast that goes to a backend.

use crate::args::InspectArgs;
use crate::{machine, report};
use muse_spark_layer::numerics::e4m3_to_f32;
use muse_spark_layer::weights::checkpoint::{Checkpoint, Part};
use muse_spark_layer::{LayerConfig, LayerKind, NamedTensors, Result, WeightKind};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

/// The range of a tensor of scales.
#[derive(serde::Serialize)]
struct Scales {
    tensor: String,
    count: usize,
    min: f32,
    max: f32,
    zero: usize,
    /// E4M3 below its smallest normal number, 2^-6.
    subnormal: usize,
}

#[derive(serde::Serialize)]
struct InspectReport {
    checkpoint: PathBuf,
    layer: usize,
    layers: usize,
    rank: usize,
    ranks: usize,
    kind: LayerKind,
    rope_theta: f64,
    quantization: Option<String>,
    local_start: i32,
    has_next_norm: bool,
    parts: Vec<Part>,
    scales: Vec<Scales>,
    /// Bytes of the rank's part, as the files hold them.
    bytes: u64,
    /// Of those, read where they lie in the map.
    mapped_bytes: u64,
    /// Copied on the host: permuted, fused, cut by columns.
    copied_bytes: u64,
    /// What the CUDA backend keeps, packed.
    device_bytes: u64,
    load_seconds: f64,
    taken: Option<Taken>,
    config: LayerConfig,
}

/// Layers taken to a backend.
#[derive(serde::Serialize)]
struct Taken {
    device: String,
    layers: usize,
    bytes: u64,
    seconds: f64,
    gb_per_second: f64,
    /// By how much the process's own memory grew meanwhile, at most: what is not the files' map.
    host_bytes: Option<u64>,
    /// Bytes of device memory that they take there.
    device_bytes: u64,
}

impl Taken {
    fn facts(&self) -> [(&'static str, String); 3] {
        let mb = |bytes: u64| format!("{:.3} MB", bytes as f64 / 1e6);
        let rate = format!("{:.3} s, {:.2} GB/s", self.seconds, self.gb_per_second);
        let layers = if self.layers == 1 { "1 layer".into() } else { format!("{} layers", self.layers) };
        [
            ("taken to", format!("{}: {layers}, {:.3} GB, in {rate}", self.device, self.bytes as f64 / 1e9)),
            ("device memory there", mb(self.device_bytes)),
            (
                "host memory meanwhile",
                self.host_bytes.map_or("not told".into(), |b| format!("{} beyond the map", mb(b))),
            ),
        ]
    }
}

/// Takes layers to the backend that is asked for, if one is.
fn take(args: &InspectArgs, checkpoint: &Checkpoint, layers: Range<usize>) -> Result<Option<Taken>> {
    let Some(choice) = args.backend else { return Ok(None) };
    let backend = machine::chosen(choice, args.device);
    let (bytes, device) = (checkpoint.bytes(layers.clone(), args.rank, args.ranks)?, machine::name(backend));
    machine::open(backend)?;
    let (bar, start) = (report::bytes_bar(bytes), Instant::now());
    bar.set_message(format!("to {device}"));
    let ((loaded, seconds), host_bytes) = machine::with_growth(|| {
        let loaded = checkpoint.load_layers(layers, args.rank, args.ranks, backend, &|bytes| bar.inc(bytes));
        (loaded, start.elapsed().as_secs_f64())
    });
    let loaded = loaded?;
    bar.finish_and_clear();
    Ok(Some(Taken {
        device,
        layers: loaded.len(),
        bytes,
        seconds,
        gb_per_second: bytes as f64 / 1e9 / seconds,
        host_bytes,
        device_bytes: loaded.iter().map(|l| l.layer.weight_bytes()).sum(),
    }))
}

/// The CUDA backend's form: matrices in as many bytes, the router also as two FP16 halves with a scale an
/// expert, vectors in FP32 (each residual gate as two), and the RoPE frequencies.
fn device_bytes(config: &LayerConfig, parts: &[Part]) -> u64 {
    let vectors = [("attn_residual_gate", 2), ("ffn_residual_gate", 2)];
    let size = |p: &Part| {
        let elements = p.taken.iter().product::<usize>() as u64;
        match vectors.iter().find(|(name, _)| *name == p.tensor) {
            Some((_, copies)) => copies * 4 * elements,
            None if p.tensor.ends_with("_norm") => 4 * elements,
            None if p.tensor == "router" => p.bytes + 4 * elements + 4 * config.n_experts as u64,
            None => p.bytes,
        }
    };
    parts.iter().map(size).sum::<u64>() + 2 * config.head_dim as u64
}

fn scales(tensors: &NamedTensors) -> Vec<Scales> {
    let mut out = Vec::new();
    for name in ["w13_sf", "w2_sf"] {
        let Some(bytes) = tensors.0.get(name).map(|t| t.bytes()) else { continue };
        let mut counts = [0usize; 256];
        bytes.iter().for_each(|b| counts[*b as usize] += 1);
        let found = || (0..=255u8).filter(|b| counts[*b as usize] > 0);
        out.push(Scales {
            tensor: name.into(),
            count: bytes.len(),
            min: found().map(e4m3_to_f32).fold(f32::INFINITY, f32::min),
            max: found().map(e4m3_to_f32).fold(f32::NEG_INFINITY, f32::max),
            zero: counts[0] + counts[128],
            subnormal: found().filter(|b| (1..8).contains(&(b & 0x7f))).map(|b| counts[b as usize]).sum(),
        });
    }
    for name in ["w13_gs", "w2_gs"] {
        let Some(tensor) = tensors.0.get(name) else { continue };
        let Ok(values) = tensor.as_f32(name) else { continue };
        let per = if tensor.shape.len() == 2 { 2 } else { 1 };
        for offset in 0..per {
            let these = || values.iter().skip(offset).step_by(per).copied();
            let part = [" gate", " up"][offset];
            out.push(Scales {
                tensor: if per == 2 { format!("{name}{part}") } else { name.into() },
                count: these().count(),
                min: these().fold(f32::INFINITY, f32::min),
                max: these().fold(f32::NEG_INFINITY, f32::max),
                zero: these().filter(|v| *v == 0.0).count(),
                subnormal: 0,
            });
        }
    }
    out
}

/// A layer's line where all are listed.
#[derive(serde::Serialize)]
struct LayerLine {
    layer: usize,
    kind: LayerKind,
    experts: WeightKind,
    bytes: u64,
    mapped_bytes: u64,
    copied_bytes: u64,
    device_bytes: u64,
    has_next_norm: bool,
}

#[derive(serde::Serialize)]
struct AllReport {
    checkpoint: PathBuf,
    rank: usize,
    ranks: usize,
    quantization: Option<String>,
    layers: Vec<LayerLine>,
    load_seconds: f64,
    taken: Option<Taken>,
}

/// Bytes of the parts that are copied, or of those that are not.
fn bytes(parts: &[Part], copied: bool) -> u64 {
    parts.iter().filter(|p| p.copied == copied).map(|p| p.bytes).sum()
}

/// Loads every layer of the rank.
fn every_layer(args: &InspectArgs, checkpoint: &Checkpoint) -> Result<bool> {
    let n = checkpoint.model().layers.len();
    // First, while nothing of the files was read here.
    let taken = take(args, checkpoint, 0..n)?;
    let (bar, start) = (report::bar(n), Instant::now());
    bar.set_message("layers");
    let layers = checkpoint.load(0..n, args.rank, args.ranks, |l, layer| {
        let parts = checkpoint.parts(l, args.rank, args.ranks)?;
        bar.inc(1);
        Ok(LayerLine {
            layer: l,
            kind: layer.kind,
            experts: layer.config.experts,
            bytes: bytes(&parts, false) + bytes(&parts, true),
            mapped_bytes: bytes(&parts, false),
            copied_bytes: bytes(&parts, true),
            device_bytes: device_bytes(&layer.config, &parts),
            has_next_norm: layer.weights.has_next_norm(),
        })
    })?;
    bar.finish_and_clear();
    let report = AllReport {
        checkpoint: args.checkpoint.clone(),
        rank: args.rank,
        ranks: args.ranks,
        quantization: checkpoint.model().quantization.clone(),
        layers,
        load_seconds: start.elapsed().as_secs_f64(),
        taken,
    };
    report::show(args.json, &report, all_tables)?;
    Ok(true)
}

fn all_tables(report: &AllReport) -> String {
    let mut table =
        report::table(&["layer", "attention", "experts", "MB", "mapped", "copied", "device, packed", "next norm"]);
    let mb = |bytes: u64| format!("{:.3}", bytes as f64 / 1e6);
    for l in &report.layers {
        table.add_row([
            l.layer.to_string(),
            l.kind.to_string(),
            l.experts.to_string(),
            mb(l.bytes),
            mb(l.mapped_bytes),
            mb(l.copied_bytes),
            mb(l.device_bytes),
            if l.has_next_norm { "yes" } else { "none" }.to_string(),
        ]);
    }
    let sum = |f: fn(&LayerLine) -> u64| mb(report.layers.iter().map(f).sum());
    let mut facts = vec![
        ("checkpoint", report.checkpoint.display().to_string()),
        ("rank", format!("{} of {}", report.rank, report.ranks)),
        ("quantisation", report.quantization.clone().unwrap_or_else(|| "not named".into())),
        ("this rank's part", format!("{} MB", sum(|l| l.bytes))),
        ("device, packed", format!("{} MB", sum(|l| l.device_bytes))),
        ("read in", format!("{:.3} s", report.load_seconds)),
    ];
    facts.extend(report.taken.iter().flat_map(Taken::facts));
    format!("{table}\n{}", report::facts(&facts))
}

pub fn inspect(args: &InspectArgs) -> Result<bool> {
    let progress = report::spinner("opening the checkpoint");
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let Some(at) = args.layer else {
        progress.finish_and_clear();
        return every_layer(args, &checkpoint);
    };
    let parts = checkpoint.parts(at, args.rank, args.ranks)?;
    let taken = progress.suspend(|| take(args, &checkpoint, at..at + 1))?;
    progress.set_message(format!("loading layer {at} for rank {} of {}", args.rank, args.ranks));
    let start = Instant::now();
    let layer = checkpoint.layer(at, args.rank, args.ranks)?;
    let load_seconds = start.elapsed().as_secs_f64();
    let scales = layer.weights.host().map(scales).unwrap_or_default();
    progress.finish_and_clear();

    let model = checkpoint.model();
    let report = InspectReport {
        checkpoint: args.checkpoint.clone(),
        layer: at,
        layers: model.layers.len(),
        rank: args.rank,
        ranks: args.ranks,
        kind: layer.kind,
        rope_theta: model.layers[at].rope_theta,
        quantization: model.quantization.clone(),
        local_start: layer.local_start,
        has_next_norm: layer.weights.has_next_norm(),
        scales,
        bytes: bytes(&parts, false) + bytes(&parts, true),
        mapped_bytes: bytes(&parts, false),
        copied_bytes: bytes(&parts, true),
        device_bytes: device_bytes(&layer.config, &parts),
        load_seconds,
        taken,
        parts,
        config: layer.config.clone(),
    };
    report::show(args.json, &report, tables)?;
    Ok(true)
}

fn tables(r: &InspectReport) -> String {
    let c = &r.config;
    let mb = |bytes: u64| format!("{:.3} MB", bytes as f64 / 1e6);
    let rope = match r.kind {
        LayerKind::Full => "no RoPE".to_string(),
        LayerKind::Sliding => format!("window {}, RoPE base {}", c.window, r.rope_theta),
    };
    let experts = format!("{} of {}, from {}, {}", c.local_experts, c.n_experts, r.local_start, c.experts);
    let mut facts = vec![
        ("checkpoint", r.checkpoint.display().to_string()),
        ("layer", format!("{} of {}, {} attention, {rope}", r.layer, r.layers, r.kind)),
        ("rank", format!("{} of {}", r.rank, r.ranks)),
        ("heads", format!("{} for queries, {} for keys and values, {} wide", c.q_heads, c.kv_heads, c.head_dim)),
        ("experts", experts),
        ("quantisation", r.quantization.clone().unwrap_or_else(|| "not named".into())),
        ("next layer's norm", if r.has_next_norm { "there" } else { "none: the last layer" }.into()),
        ("this rank's part", mb(r.bytes)),
        ("host", format!("{} in the map, {} copied", mb(r.mapped_bytes), mb(r.copied_bytes))),
        ("device, packed", mb(r.device_bytes)),
        ("read in", format!("{:.3} s", r.load_seconds)),
    ];
    facts.extend(r.taken.iter().flat_map(Taken::facts));
    let mut text = report::facts(&facts).to_string();
    let mut table = report::table(&["tensor", "from", "file", "type", "shape", "of this rank", "MB", "how"]);
    for p in &r.parts {
        // Layers share their prefix; what follows it says enough.
        let source = p.source.split_once("layers.").map_or(p.source.as_str(), |(_, rest)| rest);
        table.add_row([
            p.tensor.to_string(),
            source.to_string(),
            p.file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            p.dtype.to_string(),
            format!("{:?}", p.shape),
            format!("{:?}", p.taken),
            format!("{:.3}", p.bytes as f64 / 1e6),
            if p.copied { "copied" } else { "mapped" }.to_string(),
        ]);
    }
    text += &format!("\n{table}");
    if r.scales.is_empty() {
        return text;
    }
    let mut table = report::table(&["scales", "count", "min", "max", "zero", "subnormal"]);
    for s in &r.scales {
        let number = |x: f32| if s.tensor.contains("_gs") { format!("{x:.4e}") } else { x.to_string() };
        table.add_row([
            s.tensor.clone(),
            s.count.to_string(),
            number(s.min),
            number(s.max),
            s.zero.to_string(),
            s.subnormal.to_string(),
        ]);
    }
    text + &format!("\n{table}")
}
