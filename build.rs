//! Builds the CUDA backend when the feature `cuda` is on, and does nothing otherwise. The work is in
//! build_support/.

#[cfg(feature = "cuda")]
mod build_support;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build_support");
    #[cfg(feature = "cuda")]
    build_support::run();
}
