//! `env`: what this build and this machine offer.

use crate::args::EnvArgs;
use crate::{machine, report, run::report_error};
use muse_spark_layer::Result;

#[derive(serde::Serialize)]
struct EnvReport {
    version: &'static str,
    features: Vec<&'static str>,
    cuda_driver: Option<String>,
    cuda_runtime: Option<String>,
    gpus: Vec<machine::Gpu>,
    problem: Option<String>,
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

pub fn env(args: &EnvArgs) -> Result<bool> {
    let (cuda_driver, cuda_runtime) = versions();
    let (gpus, mut problem) = match machine::gpus() {
        Ok(gpus) => (gpus, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    if let Some(gpu) = gpus.iter().find(|g| g.capability != "9.0") {
        problem = Some(format!("{} has compute capability {}; the kernels need 9.0", gpu.name, gpu.capability));
    }
    let mut features = vec!["cli"];
    if cfg!(feature = "cuda") {
        features.push("cuda (sm_90a)");
    }
    let report = EnvReport { version: env!("CARGO_PKG_VERSION"), features, cuda_driver, cuda_runtime, gpus, problem };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(report_error)?);
        return Ok(true);
    }
    let none = || "none".to_string();
    let mut rows = vec![
        ("version", report.version.to_string()),
        ("features", report.features.join(", ")),
        ("CUDA driver", report.cuda_driver.clone().unwrap_or_else(none)),
        ("CUDA runtime, linked in", report.cuda_runtime.clone().unwrap_or_else(none)),
    ];
    for gpu in &report.gpus {
        rows.push(("GPU", format!("{}: {}, {}, {} SMs", gpu.device, gpu.name, gpu.capability, gpu.sms)));
    }
    if let Some(problem) = &report.problem {
        rows.push(("note", problem.clone()));
    }
    println!("{}", report::facts(&rows));
    Ok(true)
}
