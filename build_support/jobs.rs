//! How many compilers may run at once.

use std::fs;

/// What one nvcc over CuTe headers needs at its peak, with room.
pub const BYTES_PER_JOB: u64 = 3 << 30;

/// Parallel compilers on this machine: what cargo allows, less where memory is short.
pub fn parallel_jobs() -> usize {
    let cargo = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok());
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    limit(cargo.unwrap_or(cores).min(cores), available_memory())
}

/// `cores` jobs, or as many as memory carries, but at least one.
pub fn limit(cores: usize, memory: Option<u64>) -> usize {
    let by_memory = memory.map_or(usize::MAX, |bytes| (bytes / BYTES_PER_JOB) as usize);
    cores.min(by_memory).max(1)
}

/// Memory that can be used without swapping: the machine's, or the control group's where that is less.
fn available_memory() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_in_meminfo(&text));
    let group = group_limit(
        fs::read_to_string("/sys/fs/cgroup/memory.max").ok().as_deref(),
        fs::read_to_string("/sys/fs/cgroup/memory.current").ok().as_deref(),
    );
    match (machine, group) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// `MemAvailable` of /proc/meminfo in bytes.
pub fn available_in_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// What a control group leaves; `max` means no limit.
pub fn group_limit(max: Option<&str>, current: Option<&str>) -> Option<u64> {
    let max: u64 = max?.trim().parse().ok()?;
    let current: u64 = current.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    Some(max.saturating_sub(current))
}
