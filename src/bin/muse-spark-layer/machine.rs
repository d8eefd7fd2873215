//! What this machine has to run on.

use crate::args::BackendChoice;
use muse_spark_layer::{Backend, Error};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A GPU as `env` lists it.
#[derive(serde::Serialize)]
pub struct Gpu {
    pub device: i32,
    pub name: String,
    pub capability: String,
    pub sms: i32,
}

/// The GPUs, or why there are none.
#[cfg(feature = "cuda")]
pub fn gpus() -> Result<Vec<Gpu>, Error> {
    use muse_spark_layer::backend::cuda::bridge;
    (0..bridge::device_count()?)
        .map(|device| {
            let info = bridge::device_info(device)?;
            Ok(Gpu {
                device,
                name: info.name.clone(),
                capability: format!("{}.{}", info.major, info.minor),
                sms: info.sm_count,
            })
        })
        .collect()
}

#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Result<Vec<Gpu>, Error> {
    Err(Error::NoCuda)
}

/// CUDA where there is a Hopper GPU, else the CPU, with the reason.
fn automatic(device: i32) -> (Backend, Option<String>) {
    match gpus() {
        Ok(gpus) => match gpus.iter().find(|g| g.device == device) {
            Some(gpu) if gpu.capability == "9.0" => (Backend::Cuda { device }, None),
            Some(gpu) => (Backend::Cpu, Some(format!("device {device} is {} ({})", gpu.name, gpu.capability))),
            None => (Backend::Cpu, Some(format!("there is no CUDA device {device}"))),
        },
        Err(error) => (Backend::Cpu, Some(error.to_string())),
    }
}

/// The backend that is asked for; why it is the CPU, where that was not, goes to stderr.
pub fn chosen(choice: BackendChoice, device: i32) -> Backend {
    let (backend, reason) = match choice {
        BackendChoice::Cpu => (Backend::Cpu, None),
        BackendChoice::Cuda => (Backend::Cuda { device }, None),
        BackendChoice::Auto => automatic(device),
    };
    if let Some(reason) = reason {
        eprintln!("running on the CPU: {reason}");
    }
    backend
}

/// Makes a backend ready, so that what is timed next does not pay for it: a device's context, and its kernels.
#[cfg(feature = "cuda")]
pub fn open(backend: Backend) -> Result<(), Error> {
    match backend {
        Backend::Cpu => Ok(()),
        Backend::Cuda { device } => muse_spark_layer::backend::cuda::Device::new(device).map(|_| ()),
    }
}

#[cfg(not(feature = "cuda"))]
pub fn open(_: Backend) -> Result<(), Error> {
    Ok(())
}

/// Bytes of this process's memory that are no file's, where the system tells.
fn own_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// What `work` gives, and by how much the process's own memory grew meanwhile, at most.
pub fn with_growth<T: Send>(work: impl FnOnce() -> T + Send) -> (T, Option<u64>) {
    let (before, done) = (own_bytes(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = before;
            while !done.load(Ordering::Relaxed) {
                most = most.max(own_bytes());
                std::thread::sleep(Duration::from_millis(2));
            }
            most
        });
        let made = work();
        done.store(true, Ordering::Relaxed);
        let most = watch.join().ok().flatten();
        (made, most.zip(before).map(|(most, before)| most.saturating_sub(before)))
    })
}

/// The name of the device a backend runs on.
pub fn name(backend: Backend) -> String {
    match backend {
        Backend::Cpu => {
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
            format!("CPU, {threads} threads")
        }
        Backend::Cuda { device } => match gpus().ok().and_then(|g| g.into_iter().find(|g| g.device == device)) {
            Some(gpu) => format!("{}, device {device}", gpu.name),
            None => format!("CUDA device {device}"),
        },
    }
}
