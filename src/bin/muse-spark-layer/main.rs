//! The command line of the crate.

fn main() {
    println!("muse-spark-layer {}", env!("CARGO_PKG_VERSION"));
}
