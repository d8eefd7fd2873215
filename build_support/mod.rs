//! The native part of the build: find the pieces, generate the cxx bridge, run CMake, say what to link.
//!
//! Rules: nothing is downloaded here and no GPU is looked for. A missing piece stops the build with its
//! name, the places looked at and the command that brings it. All inputs are declared to cargo, so that
//! a second `cargo build` runs nothing.

pub mod jobs;
pub mod locate;
pub mod missing;
pub mod native;
pub mod progress;

use std::path::PathBuf;

/// The whole native build, called from `build.rs`.
pub fn run() {
    let manifest = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    if native::is_compile_step() {
        return native::compile_step(&manifest);
    }
    println!("cargo:rerun-if-changed=csrc");
    for name in locate::VARIABLES {
        println!("cargo:rerun-if-env-changed={name}");
    }
    // Lints and documentation need no compiled kernel. What is built this way checks but does not link.
    let mut skip = false;
    for name in ["DOCS_RS", "MUSE_SPARK_SKIP_KERNELS"] {
        println!("cargo:rerun-if-env-changed={name}");
        skip |= std::env::var_os(name).is_some();
    }
    if skip {
        return;
    }
    let environment = locate::Environment::of_process(&manifest);
    match locate::pieces(&environment, cfg!(feature = "fa3")) {
        Ok(pieces) => native::build(&manifest, &pieces),
        Err(missing) => {
            eprintln!("\n{missing}\n");
            std::process::exit(1);
        }
    }
}
