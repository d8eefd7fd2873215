//! Finds the pieces of the native build: the CUDA toolkit, the CUTLASS headers, CMake, Ninja and, where
//! there is one, a compiler cache. Reads the file system and the environment it is given, nothing else.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::missing::{Missing, Place};

/// The environment variables that can change what is found; a change of one reruns the build script.
pub const VARIABLES: [&str; 5] =
    ["MUSE_SPARK_CUDA_ROOT", "MUSE_SPARK_CUTLASS_DIR", "MUSE_SPARK_FA3_DIR", "CUDA_HOME", "CUDA_PATH"];

/// The oldest toolkit accepted, as `CUDART_VERSION` has it: 13.0. (third_party/bring.py has it too.)
pub const REQUIRED_CUDART: u32 = 13_000;
/// The oldest CUTLASS accepted, as (major, minor).
pub const REQUIRED_CUTLASS: (u32, u32) = (4, 2);

/// What the search reads: variables, the repository, the search path.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    pub variables: Vec<(String, PathBuf)>,
    pub repository: PathBuf,
    pub path: Vec<PathBuf>,
    pub system_toolkit: PathBuf,
}

impl Environment {
    /// The environment of this process.
    pub fn of_process(repository: &Path) -> Self {
        let variables =
            VARIABLES.iter().filter_map(|name| Some((name.to_string(), non_empty(std::env::var_os(name)?)?))).collect();
        let path = std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
        Environment {
            variables,
            repository: repository.to_path_buf(),
            path,
            system_toolkit: PathBuf::from("/usr/local/cuda"),
        }
    }

    fn variable(&self, name: &str) -> Option<&Path> {
        self.variables.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_path())
    }

    fn local(&self, below: &str) -> PathBuf {
        self.repository.join("third_party/.local").join(below)
    }

    fn on_path(&self, program: &str) -> Option<PathBuf> {
        self.path.iter().map(|folder| folder.join(program)).find(|file| file.is_file())
    }
}

fn non_empty(value: OsString) -> Option<PathBuf> {
    (!value.is_empty()).then(|| PathBuf::from(value))
}

/// A CUDA toolkit that can compile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toolkit {
    pub root: PathBuf,
    pub nvcc: PathBuf,
    /// The folder of `libcudart_static.a`.
    pub libraries: PathBuf,
    /// `CUDART_VERSION`, 13000 for 13.0.
    pub version: u32,
}

/// Everything the native build uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    pub toolkit: Toolkit,
    pub cutlass: PathBuf,
    /// FlashAttention-3's sources, with the feature `fa3`.
    pub fa3: Option<PathBuf>,
    pub cmake: PathBuf,
    pub ninja: PathBuf,
    /// ccache or sccache; the build works without.
    pub cache: Option<PathBuf>,
}

/// Finds all pieces, or names the first that is missing.
pub fn pieces(environment: &Environment, with_fa3: bool) -> Result<Pieces, Missing> {
    Ok(Pieces {
        toolkit: toolkit(environment)?,
        cutlass: cutlass(environment)?,
        fa3: if with_fa3 { Some(fa3(environment)?) } else { None },
        // The wheel's `bin/cmake` is a Python script that needs its own module path: take the program.
        cmake: tool(environment, "cmake", "cmake/data/bin/cmake")?,
        ninja: tool(environment, "ninja", "bin/ninja")?,
        cache: cache(environment),
    })
}

/// The toolkit: `MUSE_SPARK_CUDA_ROOT` alone when it is set; else the first that is good enough of
/// `CUDA_HOME`, `CUDA_PATH`, /usr/local/cuda, the one whose nvcc is on `PATH`, third_party/.local.
pub fn toolkit(environment: &Environment) -> Result<Toolkit, Missing> {
    let mut candidates = Vec::new();
    if let Some(root) = environment.variable("MUSE_SPARK_CUDA_ROOT") {
        candidates.push(("MUSE_SPARK_CUDA_ROOT", root.to_path_buf()));
    } else {
        for name in ["CUDA_HOME", "CUDA_PATH"] {
            candidates.extend(environment.variable(name).map(|root| (name, root.to_path_buf())));
        }
        candidates.push(("the system's", environment.system_toolkit.clone()));
        if let Some(nvcc) = environment.on_path("nvcc").and_then(|nvcc| nvcc.canonicalize().ok()) {
            candidates.extend(nvcc.ancestors().nth(2).map(|root| ("nvcc on PATH", root.to_path_buf())));
        }
        candidates.push(("brought from wheels", environment.local("cuda/nvidia/cu13")));
    }
    let mut places = Vec::new();
    for (origin, root) in candidates {
        match inspect_toolkit(&root) {
            Ok(toolkit) => return Ok(toolkit),
            Err(reason) => places.push(Place { origin: origin.to_string(), path: root, reason }),
        }
    }
    Err(Missing {
        what: format!("a CUDA toolkit, {} or newer, for the feature `cuda`", version_text(REQUIRED_CUDART)),
        places,
        command: "python3 third_party/bring.py   (or set MUSE_SPARK_CUDA_ROOT to a toolkit; or build without the feature `cuda`)"
            .to_string(),
    })
}

/// Checks one toolkit root. Libraries lie in `lib64` (installers), `lib` (wheels) or `targets/` (packages).
fn inspect_toolkit(root: &Path) -> Result<Toolkit, String> {
    if !root.is_dir() {
        return Err("no such folder".to_string());
    }
    let nvcc = root.join("bin/nvcc");
    if !nvcc.is_file() {
        return Err("has no bin/nvcc".to_string());
    }
    let include = ["include", "targets/x86_64-linux/include"]
        .iter()
        .map(|below| root.join(below).join("cuda_runtime_api.h"))
        .find(|header| header.is_file())
        .ok_or("has no include/cuda_runtime_api.h")?;
    let version =
        defined_number(&include, "CUDART_VERSION").ok_or("its cuda_runtime_api.h defines no CUDART_VERSION")?;
    if version < REQUIRED_CUDART {
        return Err(format!("is CUDA {}, too old", version_text(version)));
    }
    let libraries = ["lib64", "lib", "targets/x86_64-linux/lib"]
        .iter()
        .map(|below| root.join(below))
        .find(|folder| folder.join("libcudart_static.a").is_file())
        .ok_or("has no libcudart_static.a in lib64, lib or targets/x86_64-linux/lib")?;
    Ok(Toolkit { root: root.to_path_buf(), nvcc, libraries, version })
}

/// The CUTLASS include folder: `MUSE_SPARK_CUTLASS_DIR` (a checkout, or its include folder) alone when it
/// is set, else the wheel's in third_party/.local.
pub fn cutlass(environment: &Environment) -> Result<PathBuf, Missing> {
    let candidates = match environment.variable("MUSE_SPARK_CUTLASS_DIR") {
        Some(root) => {
            vec![("MUSE_SPARK_CUTLASS_DIR", root.join("include")), ("MUSE_SPARK_CUTLASS_DIR", root.to_path_buf())]
        }
        None => vec![("brought from a wheel", environment.local("cutlass/cutlass_library/source/include"))],
    };
    let mut places = Vec::new();
    for (origin, path) in candidates {
        let reason = match cutlass_version(&path) {
            Some(version) if version >= REQUIRED_CUTLASS => return Ok(path),
            Some((major, minor)) => format!("is CUTLASS {major}.{minor}, too old"),
            None => "has no cutlass/version.h".to_string(),
        };
        places.push(Place { origin: origin.to_string(), path, reason });
    }
    Err(Missing {
        what: format!("the CUTLASS headers, {}.{} or newer", REQUIRED_CUTLASS.0, REQUIRED_CUTLASS.1),
        places,
        command: "python3 third_party/bring.py   (or set MUSE_SPARK_CUTLASS_DIR to a checkout)".to_string(),
    })
}

/// FlashAttention-3's C++ sources: `MUSE_SPARK_FA3_DIR` (a flash-attention checkout, or its `hopper` folder)
/// alone when it is set, else those in third_party/.local.
pub fn fa3(environment: &Environment) -> Result<PathBuf, Missing> {
    let candidates = match environment.variable("MUSE_SPARK_FA3_DIR") {
        Some(root) => vec![("MUSE_SPARK_FA3_DIR", root.join("hopper")), ("MUSE_SPARK_FA3_DIR", root.to_path_buf())],
        None => vec![("brought as sources", environment.local("fa3/hopper"))],
    };
    const NEEDED: [&str; 2] = ["flash_fwd_kernel_sm90.h", "flash_prepare_scheduler.cu"];
    let mut places = Vec::new();
    for (origin, path) in candidates {
        match NEEDED.iter().find(|file| !path.join(file).is_file()) {
            None => return Ok(path),
            Some(file) => places.push(Place { origin: origin.to_string(), path, reason: format!("has no {file}") }),
        }
    }
    Err(Missing {
        what: "the FlashAttention-3 sources, for the feature `fa3`".to_string(),
        places,
        command: "python3 third_party/bring.py fa3   (or set MUSE_SPARK_FA3_DIR to a checkout; or build without the feature `fa3`)"
            .to_string(),
    })
}

fn cutlass_version(include: &Path) -> Option<(u32, u32)> {
    let header = include.join("cutlass/version.h");
    Some((defined_number(&header, "CUTLASS_MAJOR")?, defined_number(&header, "CUTLASS_MINOR")?))
}

/// A build tool: the pinned one of third_party/.local, else the one on `PATH`.
fn tool(environment: &Environment, program: &str, below: &str) -> Result<PathBuf, Missing> {
    let local = environment.local("tools").join(below);
    if local.is_file() {
        return Ok(local);
    }
    if let Some(found) = environment.on_path(program) {
        return Ok(found);
    }
    let mut places =
        vec![Place { origin: "brought from a wheel".to_string(), path: local, reason: "no such file".to_string() }];
    places.extend(environment.path.iter().map(|folder| Place {
        origin: "PATH".to_string(),
        path: folder.join(program),
        reason: "no such file".to_string(),
    }));
    Err(Missing {
        what: format!("the build tool {program}"),
        places,
        command: "python3 third_party/bring.py".to_string(),
    })
}

/// ccache or sccache: the user's own before the pinned one, so that the user's settings are met.
fn cache(environment: &Environment) -> Option<PathBuf> {
    let pinned = environment.local("tools/bin/ccache");
    environment
        .on_path("ccache")
        .or_else(|| environment.on_path("sccache"))
        .or_else(|| pinned.is_file().then_some(pinned))
}

/// The value of `#define NAME number` in a header.
fn defined_number(header: &Path, name: &str) -> Option<u32> {
    let text = String::from_utf8_lossy(&fs::read(header).ok()?).into_owned();
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("#define") && words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

/// 13000 as "13.0".
pub fn version_text(cudart_version: u32) -> String {
    format!("{}.{}", cudart_version / 1000, cudart_version % 1000 / 10)
}
