//! `trace`: a step's intermediate results in a safetensors file, and where two such files part.

use crate::args::{DiffArgs, DumpArgs, TraceArgs, TraceCommand};
use crate::report;
use crate::run::simulate;
use muse_spark_layer::numerics::relative_l2;
use muse_spark_layer::weights::safetensors::SafetensorsFile;
use muse_spark_layer::{DType, Error, HostTensor, NamedTensors, Result, Taps};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Every tensor of a dump, in the order of the dataflow.
const ORDER: [&str; 12] = [
    "attn_core",
    "attn_out",
    "stream_after_attn",
    "ffn_input",
    "router_logits",
    "topk_ids",
    "topk_scores",
    "expert_input",
    "moe_mix",
    "ffn_out",
    "stream",
    "hidden",
];

/// What may differ between two dumps of the same step.
const WHERE_IT_RAN: [&str; 3] = ["version", "backend", "device"];

pub fn trace(args: &TraceArgs) -> Result<bool> {
    match &args.command {
        TraceCommand::Dump(args) => dump(args),
        TraceCommand::Diff(args) => diff(args),
    }
}

#[derive(serde::Serialize)]
struct DumpReport {
    out: PathBuf,
    /// The step's arguments and where it ran, as the file's metadata has them.
    metadata: BTreeMap<String, String>,
    taps: Vec<DumpedTap>,
}

#[derive(serde::Serialize)]
struct DumpedTap {
    tap: &'static str,
    dtype: &'static str,
    shape: Vec<usize>,
    rms: Option<f64>,
}

fn dump(args: &DumpArgs) -> Result<bool> {
    report::writable("--out", &args.out)?;
    let ran = simulate(&args.run, Taps::All)?;
    let tokens = ran.step.input.positions.len();
    let shape = |len: usize| vec![tokens, len.checked_div(tokens).unwrap_or(0)];
    let Some(taps) = &ran.output.taps else {
        return Err(Error::Internal { what: "a step with taps gave none".into() });
    };
    let mut tensors = NamedTensors::new();
    for (name, values) in taps.named() {
        tensors.insert(name, HostTensor::f32(&shape(values.len()), values));
    }
    let (ids, stream, hidden) = (&ran.output.topk_ids, &ran.output.stream, &ran.output.hidden);
    tensors.insert("topk_ids", HostTensor::i32(&shape(ids.len()), ids.as_slice()));
    tensors.insert("stream", HostTensor::f32(&shape(stream.len()), stream.as_slice()));
    tensors.insert("hidden", HostTensor::bf16(&shape(hidden.len()), hidden.as_slice()));

    let step = &args.run.step;
    let metadata: BTreeMap<String, String> = [
        ("version", env!("CARGO_PKG_VERSION").to_string()),
        ("backend", ran.backend_name().into()),
        ("device", ran.device()),
        ("dims", args.run.dims.to_string()),
        ("batch", step.batch.to_string()),
        ("ctx", step.ctx.to_string()),
        ("q_len", step.q_len.to_string()),
        ("kind", step.kind.to_string()),
        ("page", step.page.to_string()),
        ("query", step.query.to_string()),
        ("seed", args.run.seed.to_string()),
        ("local_start", ran.local_start.to_string()),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_string(), v))
    .collect();
    write(&args.out, &tensors, metadata.clone())?;

    let mut taps = Vec::new();
    for tap in ORDER {
        let tensor = tensors.get(tap)?;
        let rms = (tensor.dtype() != DType::I32).then(|| tensor.to_f32(tap)).transpose()?.map(|v| report::rms(&v));
        taps.push(DumpedTap { tap, dtype: tensor.dtype().name(), shape: tensor.shape.clone(), rms });
    }
    report::show(args.run.json, &DumpReport { out: args.out.clone(), metadata, taps }, dump_table)?;
    Ok(true)
}

fn dump_table(r: &DumpReport) -> String {
    let mut table = report::table(&["tap", "type", "shape", "rms"]);
    for t in &r.taps {
        let rms = t.rms.map_or(String::new(), |rms| format!("{rms:.4e}"));
        table.add_row([t.tap.to_string(), t.dtype.to_string(), format!("{:?}", t.shape), rms]);
    }
    format!("{table}\nwritten to {}", r.out.display())
}

fn write(path: &Path, tensors: &NamedTensors, metadata: BTreeMap<String, String>) -> Result<()> {
    let problem = |e: safetensors::SafeTensorError| match e {
        safetensors::SafeTensorError::IoError(source) => Error::File { path: path.into(), source },
        other => Error::Format { path: path.into(), problem: other.to_string() },
    };
    let mut views = Vec::new();
    for (name, tensor) in &tensors.0 {
        let dtype = match tensor.dtype() {
            DType::I32 => Dtype::I32,
            DType::Bf16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        views.push((name, TensorView::new(dtype, tensor.shape.clone(), tensor.bytes()).map_err(problem)?));
    }
    let metadata: HashMap<String, String> = metadata.into_iter().collect();
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(problem)
}

/// A tap in both dumps.
#[derive(serde::Serialize)]
struct Compared {
    tap: &'static str,
    /// Relative L2 distance; of `topk_ids` the share of tokens with other experts. `null`: not a number.
    distance: f64,
    /// The row (token) that is furthest off. Its own distance decides: one wrong token of many must not hide.
    worst_row: usize,
    worst_row_distance: f64,
    departs: bool,
}

#[derive(serde::Serialize)]
struct DiffReport {
    a: PathBuf,
    b: PathBuf,
    tolerance: f64,
    same: bool,
    /// The first tap of the dataflow that departs.
    first: Option<&'static str>,
    taps: Vec<Compared>,
    /// Taps that only one of the two holds.
    left_out: Vec<&'static str>,
    /// Arguments of the two steps that differ: name, in A, in B.
    arguments: Vec<(String, String, String)>,
}

fn diff(args: &DiffArgs) -> Result<bool> {
    if !args.tolerance.is_finite() || args.tolerance < 0.0 {
        let (wanted, got) = ("a number that is not negative".into(), args.tolerance.to_string());
        return Err(Error::Value { what: "--tolerance".into(), wanted, got });
    }
    let (file_a, file_b) = (SafetensorsFile::open(&args.a)?, SafetensorsFile::open(&args.b)?);
    let (a, b) = (file_a.tensors()?, file_b.tensors()?);
    let (mut taps, mut left_out) = (Vec::new(), Vec::new());
    for tap in ORDER {
        match (a.0.get(tap), b.0.get(tap)) {
            (Some(x), Some(y)) if x.shape != y.shape || x.shape.len() < 2 => {
                return Err(Error::Shape { tensor: tap.into(), wanted: x.shape.clone(), got: y.shape.clone() });
            }
            (Some(_), Some(_)) => taps.push(compare(tap, &a, &b, args.tolerance)?),
            (None, None) => {}
            _ => left_out.push(tap),
        }
    }
    if taps.is_empty() {
        let problem = format!("no tap in common with {}", args.a.display());
        return Err(Error::Format { path: args.b.clone(), problem });
    }
    let (of_a, of_b) = (metadata(&args.a)?, metadata(&args.b)?);
    let arguments = of_a
        .iter()
        .filter(|(name, _)| !WHERE_IT_RAN.contains(&name.as_str()))
        .filter_map(|(name, x)| of_b.get(name).filter(|y| *y != x).map(|y| (name.clone(), x.clone(), y.clone())))
        .collect();
    let first = taps.iter().find(|t| t.departs).map(|t| t.tap);
    let report = DiffReport {
        a: args.a.clone(),
        b: args.b.clone(),
        tolerance: args.tolerance,
        same: first.is_none(),
        first,
        taps,
        left_out,
        arguments,
    };
    report::show(args.json, &report, diff_table)?;
    Ok(report.same)
}

fn diff_table(r: &DiffReport) -> String {
    let mut table = report::table(&["tap", "relative L2", "worst row", "its distance", ""]);
    for t in &r.taps {
        table.add_row([
            t.tap.to_string(),
            format!("{:.3e}", t.distance),
            t.worst_row.to_string(),
            format!("{:.3e}", t.worst_row_distance),
            if t.departs { "departs" } else { "" }.to_string(),
        ]);
    }
    let mut lines = vec![table.to_string()];
    lines.extend(r.arguments.iter().map(|(name, a, b)| format!("other steps: {name} is {a} in A, {b} in B")));
    lines.extend(r.left_out.iter().map(|tap| format!("{tap}: in one of the two only")));
    lines.push(match r.first {
        Some(tap) => format!("{tap} is the first with a row further off than {}", r.tolerance),
        None => format!("no row of any tap is further off than {}", r.tolerance),
    });
    lines.join("\n")
}

/// Routing is discrete: a token with other experts departs whatever the tolerance. The order of equal experts
/// does not count, so scores are compared by expert.
fn compare(tap: &'static str, a: &NamedTensors, b: &NamedTensors, tolerance: f64) -> Result<Compared> {
    let (x, y) = (a.get(tap)?, b.get(tap)?);
    let rows = x.shape[0];
    let (distance, each): (f64, Vec<f64>) = if tap == "topk_ids" {
        let (x, y) = (x.as_i32(tap)?, y.as_i32(tap)?);
        let width = x.len() / rows.max(1);
        let sorted = |ids: &[i32], t: usize| {
            let mut ids = ids[t * width..][..width].to_vec();
            ids.sort_unstable();
            ids
        };
        let each: Vec<f64> = (0..rows).map(|t| f64::from(sorted(x, t) != sorted(y, t))).collect();
        (each.iter().sum::<f64>() / rows.max(1) as f64, each)
    } else {
        let both = (a.0.get("topk_ids"), b.0.get("topk_ids"));
        let (x, y) = match both {
            (Some(ids_a), Some(ids_b)) if tap == "topk_scores" && ids_a.shape == x.shape && ids_b.shape == y.shape => {
                let experts = experts(ids_a)?.max(experts(ids_b)?);
                (by_expert(&x.to_f32(tap)?, ids_a, experts)?, by_expert(&y.to_f32(tap)?, ids_b, experts)?)
            }
            _ => (x.to_f32(tap)?, y.to_f32(tap)?),
        };
        let width = x.len() / rows.max(1);
        let each = (0..rows).map(|t| distance(&y[t * width..][..width], &x[t * width..][..width])).collect();
        (distance(&y, &x), each)
    };
    let worst_row = (0..rows).max_by(|i, j| order(each[*i]).total_cmp(&order(each[*j])).then(j.cmp(i))).unwrap_or(0);
    let worst_row_distance = each.get(worst_row).copied().unwrap_or(0.0);
    // No tap is further off than its worst row.
    let departs = worst_row_distance.is_nan() || worst_row_distance > if tap == "topk_ids" { 0.0 } else { tolerance };
    Ok(Compared { tap, distance, worst_row, worst_row_distance, departs })
}

/// Rows that are no number come last in order.
fn order(distance: f64) -> f64 {
    if distance.is_nan() {
        f64::INFINITY
    } else {
        distance
    }
}

/// Of `got` from `want`; equal bits are no distance, NaN or not.
fn distance(got: &[f32], want: &[f32]) -> f64 {
    if got.iter().zip(want).all(|(g, w)| g.to_bits() == w.to_bits()) {
        return 0.0;
    }
    relative_l2(got, want)
}

/// One more than the largest expert id.
fn experts(ids: &HostTensor) -> Result<usize> {
    let ids = ids.as_i32("topk_ids")?;
    match ids.iter().find(|id| !(0..1 << 16).contains(*id)) {
        Some(id) => Err(Error::Value { what: "topk_ids".into(), wanted: "expert ids".into(), got: id.to_string() }),
        None => Ok(ids.iter().max().map_or(0, |id| *id as usize + 1)),
    }
}

/// `[T, top_k]` scores to `[T, experts]`.
fn by_expert(scores: &[f32], ids: &HostTensor, experts: usize) -> Result<Vec<f32>> {
    let width = ids.shape.last().copied().unwrap_or(1).max(1);
    let ids = ids.as_i32("topk_ids")?;
    let mut out = vec![0f32; ids.len() / width * experts];
    for (i, (id, score)) in ids.iter().zip(scores).enumerate() {
        out[i / width * experts + *id as usize] = *score;
    }
    Ok(out)
}

/// The metadata in a safetensors header: 8 bytes of length, then JSON.
fn metadata(path: &Path) -> Result<BTreeMap<String, String>> {
    let fail = |source| Error::File { path: path.into(), source };
    let mut file = std::fs::File::open(path).map_err(fail)?;
    let mut length = [0u8; 8];
    file.read_exact(&mut length).map_err(fail)?;
    let mut header = Vec::new();
    file.take(u64::from_le_bytes(length)).read_to_end(&mut header).map_err(fail)?;
    #[derive(serde::Deserialize)]
    struct Header {
        #[serde(default)]
        __metadata__: BTreeMap<String, String>,
    }
    let header: Header = serde_json::from_slice(&header)
        .map_err(|e| Error::Format { path: path.into(), problem: format!("header: {e}") })?;
    Ok(header.__metadata__)
}
