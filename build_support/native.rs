//! The cxx bridge, the CMake call and the link lines.
//!
//! CMake runs in a second process of this same build script (`compile_step`), because the `cmake` crate
//! hands its own output on: the first process reads it line by line, shows progress where it was asked to
//! and turns spill warnings into cargo's.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::jobs;
use super::locate::{self, Pieces};
use super::progress::{classify, Line};

/// Set in the second process only.
const STEP_VARIABLE: &str = "MUSE_SPARK_COMPILE_STEP";
/// Set where a line for each finished step may be written to file descriptor 9. Cargo shows nothing of a
/// running build script; `make` opens that descriptor on its own output.
const PROGRESS_VARIABLE: &str = "MUSE_SPARK_PROGRESS";
const BRIDGE: &str = "src/backend/cuda/bridge.rs";

/// Whether this process is the one that runs CMake.
pub fn is_compile_step() -> bool {
    std::env::var_os(STEP_VARIABLE).is_some()
}

/// Builds the bridge and the kernels and tells cargo what to link.
pub fn build(manifest: &Path, pieces: &Pieces) {
    // The bridge first: it generates the headers that csrc/bridge includes.
    cxx_build::bridge(BRIDGE)
        .std("c++17")
        .flag_if_supported("-fvisibility=hidden")
        .include(manifest.join("csrc"))
        .compile("muse_spark_cxxbridge");
    forget_other_pieces(pieces);
    run_compile_step(pieces);

    // What `env` shows.
    println!("cargo:rustc-env=MUSE_SPARK_CUDA_TOOLKIT={}", locate::version_text(pieces.toolkit.version));
    println!("cargo:rustc-link-search=native={}", pieces.toolkit.libraries.display());
    println!("cargo:rustc-link-lib=static=cudart_static");
    // The shared library exports the C ABI and nothing of cxx, of which a process may hold another copy.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    for library in ["stdc++", "dl", "rt", "pthread"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}

/// CMake cannot change the compiler of a configured folder: with other pieces it starts over.
fn forget_other_pieces(pieces: &Pieces) {
    let out = out_folder();
    let (stamp, text) = (out.join("pieces.txt"), format!("{pieces:#?}\n"));
    if std::fs::read_to_string(&stamp).ok().as_ref() != Some(&text) {
        let _ = std::fs::remove_dir_all(out.join("build"));
        std::fs::write(stamp, text).expect("OUT_DIR can be written to");
    }
}

fn out_folder() -> PathBuf {
    PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// Runs this program again as the compile step and reads what it prints.
fn run_compile_step(pieces: &Pieces) {
    let began = Instant::now();
    let mut progress = Progress::open();
    let cache = pieces.cache.as_ref().map_or("no compiler cache".to_string(), |cache| cache.display().to_string());
    progress.show(&format!(
        "CUDA {} in {}, {} jobs, {cache}",
        locate::version_text(pieces.toolkit.version),
        pieces.toolkit.root.display(),
        jobs::parallel_jobs()
    ));
    let program = std::env::current_exe().expect("the build script's own path");
    let mut child = Command::new(program)
        .env(STEP_VARIABLE, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("the build script can start itself");
    let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let mut tail = Vec::new();
    for line in output.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).into_owned();
        match classify(&line) {
            Line::Step(step) => progress.show(&format!("{step}  ({} s)", began.elapsed().as_secs())),
            Line::Warning(warning) => println!("cargo:warning={warning}"),
            Line::Cargo(instruction) => println!("{instruction}"),
            Line::Other => println!("{line}"),
        }
        tail.push(line);
    }
    drop(progress);
    let status = child.wait().expect("the compile step can be waited for");
    if !status.success() {
        let from = tail.len().saturating_sub(120);
        eprintln!("\nthe native build failed; the end of its output:\n\n{}\n", tail[from..].join("\n"));
        std::process::exit(1);
    }
}

/// The second process: CMake through the `cmake` crate.
pub fn compile_step(manifest: &Path) {
    let environment = locate::Environment::of_process(manifest);
    let pieces = match locate::pieces(&environment, cfg!(feature = "fa3")) {
        Ok(pieces) => pieces,
        Err(missing) => panic!("{missing}"),
    };
    // Read by the `cmake` crate. Nothing else runs in this process yet.
    std::env::set_var("CMAKE", &pieces.cmake);
    std::env::set_var("NUM_JOBS", jobs::parallel_jobs().to_string());

    let generated = out_folder().join("cxxbridge/include");
    let mut config = cmake::Config::new(manifest.join("csrc"));
    config
        .generator("Ninja")
        // The same native objects for every cargo profile.
        .profile("Release")
        .no_default_flags(true)
        .pic(true)
        .define("CMAKE_MAKE_PROGRAM", &pieces.ninja)
        .define("CMAKE_CUDA_COMPILER", &pieces.toolkit.nvcc)
        .define("CUDAToolkit_ROOT", &pieces.toolkit.root)
        .define("CMAKE_CUDA_ARCHITECTURES", "90a-real")
        .define("MUSE_SPARK_CUTLASS_INCLUDE", &pieces.cutlass)
        .define("MUSE_SPARK_CXXBRIDGE_INCLUDE", generated)
        .build_target("muse_spark_kernels");
    if let Some(sources) = &pieces.fa3 {
        config.define("MUSE_SPARK_FA3_SOURCES", sources);
    }
    if let Some(cache) = &pieces.cache {
        config.define("CMAKE_CUDA_COMPILER_LAUNCHER", cache).define("CMAKE_CXX_COMPILER_LAUNCHER", cache);
        // Objects are found again from another clone or target folder: paths below the repository
        // count relative to it, and the compiler by its content (wheels carry no time stamps).
        for (name, value) in [
            ("CCACHE_BASEDIR", manifest.as_os_str()),
            ("CCACHE_NOHASHDIR", "1".as_ref()),
            ("CCACHE_COMPILERCHECK", "content".as_ref()),
        ] {
            if std::env::var_os(name).is_none() {
                config.env(name, value);
            }
        }
    }
    let folder = config.build();
    println!("cargo:rustc-link-search=native={}", folder.join("build").display());
    println!("cargo:rustc-link-lib=static=muse_spark_kernels");
}

/// Where progress lines go, if anywhere: a `cat` that has inherited the descriptor. (Opening it anew by
/// its path would start a second file position, and writers would overwrite each other.)
struct Progress(Option<Child>);

impl Progress {
    fn open() -> Self {
        let cat = || Command::new("sh").args(["-c", "exec cat >&9"]).stdin(Stdio::piped()).spawn().ok();
        Progress(std::env::var_os(PROGRESS_VARIABLE).and_then(|_| cat()))
    }

    fn show(&mut self, line: &str) {
        if let Some(input) = self.0.as_mut().and_then(|cat| cat.stdin.as_mut()) {
            // Progress that cannot be shown must not stop a build.
            let _ = writeln!(input, "  kernels: {line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(mut cat) = self.0.take() {
            drop(cat.stdin.take());
            let _ = cat.wait();
        }
    }
}
