//! What the linker put into this very program: code for sm_90a and nothing else. Built for sm_90 without
//! the "a" the kernels would lack wgmma, and PTX would let another GPU start them and fail late.
#![cfg(feature = "cuda")]

use muse_spark_layer::backend::cuda::bridge;

/// One image of a fat binary: PTX (1) or compiled code (2), the architecture, the bytes.
struct Image<'a> {
    kind: u16,
    architecture: u32,
    code: &'a [u8],
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + N].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// A fat binary is a header (magic, version u16, header size u16, size u64), then images: kind u16,
/// version u16, header size u32, size u64, ..., architecture u32 at byte 28, ..., code.
fn images(program: &[u8]) -> Vec<Image<'_>> {
    const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
    let mut found = Vec::new();
    for start in (0..program.len().saturating_sub(64)).step_by(8).filter(|at| program[*at..*at + 4] == MAGIC) {
        let mut at = start + number::<2>(program, start + 6) as usize;
        let end = at + number::<8>(program, start + 8) as usize;
        while at + 64 <= end.min(program.len()) {
            let code = at + number::<4>(program, at + 4) as usize;
            let next = code + number::<8>(program, at + 8) as usize;
            found.push(Image {
                kind: number::<2>(program, at) as u16,
                architecture: number::<4>(program, at + 28) as u32,
                code: &program[code..next],
            });
            at = next;
        }
    }
    found
}

#[test]
fn every_kernel_is_compiled_for_sm_90a_only() {
    // Reaching the bridge links all operations in.
    assert!(!bridge::layouts().is_empty());
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let images = images(&program);
    assert!(images.len() >= 5, "one image for each unit, found {}", images.len());
    for image in images {
        assert_eq!((image.kind, image.architecture), (2, 90), "compiled code for sm_90, no PTX");
        // ptxas writes its own command line into each image.
        assert!(image.code.windows(7).any(|text| text == b"sm_90a "), "an image was not compiled for sm_90a");
    }
}

/// A program that uses the library starts where there is no driver, and says so when it is asked for a device: the
/// driver is opened then, not linked.
#[cfg(target_os = "linux")]
#[test]
fn the_driver_is_not_linked() {
    assert!(!bridge::layouts().is_empty());
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(mapped.contains("libc.so"), "the maps name libraries");
    assert!(!mapped.contains("libcuda.so"), "the driver was mapped when the program started");
}
