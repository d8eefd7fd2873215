//! What this machine has to run on.

use muse_spark_layer::{Backend, Error};

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
pub fn automatic(device: i32) -> (Backend, Option<String>) {
    match gpus() {
        Ok(gpus) => match gpus.iter().find(|g| g.device == device) {
            Some(gpu) if gpu.capability == "9.0" => (Backend::Cuda { device }, None),
            Some(gpu) => (Backend::Cpu, Some(format!("device {device} is {} ({})", gpu.name, gpu.capability))),
            None => (Backend::Cpu, Some(format!("there is no CUDA device {device}"))),
        },
        Err(error) => (Backend::Cpu, Some(error.to_string())),
    }
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
