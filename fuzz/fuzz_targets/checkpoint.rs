#![no_main]

#[path = "../targets.rs"]
mod targets;

#[global_allocator]
static LIMITED: targets::Limited = targets::Limited;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::checkpoint(data));
