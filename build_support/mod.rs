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
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    // Documentation and type checks need no compiled kernel. Nothing built this way links.
    if std::env::var_os("DOCS_RS").is_some() {
        return;
    }
    let environment = locate::Environment::of_process(&manifest);
    match locate::pieces(&environment) {
        Ok(pieces) => native::build(&manifest, &pieces),
        Err(missing) => {
            eprintln!("\n{missing}\n");
            std::process::exit(1);
        }
    }
}
