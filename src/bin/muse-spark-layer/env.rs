//! `env`: what this build and this machine offer.

use crate::args::EnvArgs;
use crate::{machine, report};
use muse_spark_layer::Result;

#[derive(serde::Serialize)]
struct EnvReport {
    version: &'static str,
    features: Vec<&'static str>,
    /// The toolkit that compiled the kernels, and how.
    cuda_toolkit: Option<&'static str>,
    build: &'static str,
    /// Packages that third_party/bring.py pins: name and version.
    pinned: Vec<(&'static str, &'static str)>,
    cuda_driver: Option<String>,
    cuda_runtime: Option<String>,
    /// NCCL's version, or why it cannot be used; absent in builds without the feature `nccl`.
    nccl: Option<String>,
    gpus: Vec<machine::Gpu>,
    /// Why the CUDA backend cannot run here.
    problem: Option<String>,
}

const KERNEL_FLAGS: &str = "sm_90a, -O3, exact maths (no --use_fast_math)";
const REQUIREMENTS: [&str; 3] = [
    include_str!("../../../third_party/requirements-cuda.txt"),
    include_str!("../../../third_party/requirements-cutlass.txt"),
    include_str!("../../../third_party/requirements-tools.txt"),
];

/// `name==version` lines.
fn pinned() -> Vec<(&'static str, &'static str)> {
    let lines = REQUIREMENTS.iter().flat_map(|file| file.lines()).filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_whitespace().next()?.split_once("==")).collect()
}

#[cfg(feature = "cuda")]
fn versions() -> (Option<String>, Option<String>) {
    use muse_spark_layer::backend::cuda::bridge;
    let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    (bridge::driver_version().ok().filter(|v| *v > 0).map(text), bridge::runtime_version().ok().map(text))
}

#[cfg(not(feature = "cuda"))]
fn versions() -> (Option<String>, Option<String>) {
    (None, None)
}

#[cfg(feature = "nccl")]
fn nccl() -> Option<String> {
    Some(muse_spark_layer::backend::cuda::nccl::version().unwrap_or_else(|error| error.to_string()))
}

#[cfg(not(feature = "nccl"))]
fn nccl() -> Option<String> {
    None
}

pub fn env(args: &EnvArgs) -> Result<bool> {
    let (cuda_driver, cuda_runtime) = versions();
    let (gpus, mut problem) = match machine::gpus() {
        Ok(gpus) => (gpus, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    if let Some(gpu) = gpus.iter().find(|g| g.capability != "9.0") {
        problem = Some(format!("{} has compute capability {}; the kernels need 9.0", gpu.name, gpu.capability));
    }
    let features = [
        ("cli", true),
        ("png", cfg!(feature = "png")),
        ("dlpack", cfg!(feature = "dlpack")),
        ("cuda", cfg!(feature = "cuda")),
        ("nccl", cfg!(feature = "nccl")),
        ("fa3", cfg!(feature = "fa3")),
    ];
    let report = EnvReport {
        version: env!("CARGO_PKG_VERSION"),
        features: features.into_iter().filter_map(|(name, on)| on.then_some(name)).collect(),
        cuda_toolkit: option_env!("MUSE_SPARK_CUDA_TOOLKIT"),
        build: if cfg!(debug_assertions) { "debug assertions on" } else { "release" },
        pinned: pinned(),
        cuda_driver,
        cuda_runtime,
        nccl: nccl(),
        gpus,
        problem,
    };
    report::show(args.json, &report, table)?;
    Ok(true)
}

fn table(report: &EnvReport) -> String {
    let none = || "none".to_string();
    let mut rows = vec![
        ("version", report.version.to_string()),
        ("features", report.features.join(", ")),
        ("build", report.build.to_string()),
        ("kernels", report.cuda_toolkit.map_or_else(none, |v| format!("CUDA {v}, {KERNEL_FLAGS}"))),
        ("CUDA driver", report.cuda_driver.clone().unwrap_or_else(none)),
        ("CUDA runtime, linked in", report.cuda_runtime.clone().unwrap_or_else(none)),
    ];
    rows.extend(report.nccl.clone().map(|nccl| ("NCCL", nccl)));
    for gpu in &report.gpus {
        rows.push(("GPU", format!("{}: {}, {}, {} SMs", gpu.device, gpu.name, gpu.capability, gpu.sms)));
    }
    let pinned: Vec<String> = report.pinned.iter().map(|(name, version)| format!("{name} {version}")).collect();
    rows.push(("pinned", pinned.join("\n")));
    if let Some(problem) = &report.problem {
        rows.push(("problem", problem.clone()));
    }
    report::facts(&rows).to_string()
}
