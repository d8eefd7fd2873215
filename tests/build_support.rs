//! The build script's own logic: discovery of the pieces, its messages, job limits, reading of output.

#[path = "../build_support/jobs.rs"]
#[allow(dead_code)]
mod jobs;
#[path = "../build_support/locate.rs"]
#[allow(dead_code)]
mod locate;
#[path = "../build_support/missing.rs"]
mod missing;
#[path = "../build_support/progress.rs"]
mod progress;

use std::fs;
use std::path::{Path, PathBuf};

use locate::Environment;
use progress::Line;
use rstest::rstest;

/// A folder of this test's own, emptied first.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("build_support").join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn write(path: PathBuf, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn toolkit(root: &Path, version: u32, libraries: &str) {
    write(root.join("bin/nvcc"), "");
    write(root.join("include/cuda_runtime_api.h"), &format!("/* */\n#define CUDART_VERSION  {version}\n"));
    write(root.join(libraries).join("libcudart_static.a"), "");
}

fn cutlass(include: &Path, minor: u32) {
    write(
        include.join("cutlass/version.h"),
        &format!("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR {minor}\n#define CUTLASS_PATCH 0\n"),
    );
}

/// An environment below `root` in which nothing exists yet.
fn empty(root: &Path) -> Environment {
    Environment {
        variables: vec![],
        repository: root.join("repository"),
        path: vec![root.join("path")],
        system_toolkit: root.join("system"),
    }
}

fn with(mut environment: Environment, name: &str, value: &Path) -> Environment {
    environment.variables.push((name.to_string(), value.to_path_buf()));
    environment
}

#[rstest]
#[case::installer("lib64")]
#[case::wheels("lib")]
#[case::packages("targets/x86_64-linux/lib")]
fn toolkits_are_found_in_every_layout(#[case] libraries: &str) {
    let root = folder(&format!("layout_{}", libraries.replace('/', "_")));
    let environment = empty(&root);
    toolkit(&environment.system_toolkit, 13_000, libraries);
    let found = locate::toolkit(&environment).unwrap();
    assert_eq!(found.root, environment.system_toolkit);
    assert_eq!(found.libraries, environment.system_toolkit.join(libraries));
    assert_eq!(found.version, 13_000);
}

#[test]
fn toolkits_are_taken_in_the_documented_order() {
    let root = folder("order");
    let environment = empty(&root);
    let wheels = environment.repository.join("third_party/.local/cuda/nvidia/cu13");
    toolkit(&wheels, 13_000, "lib");
    assert_eq!(locate::toolkit(&environment).unwrap().root, wheels);

    toolkit(&root.join("elsewhere"), 13_010, "lib64");
    fs::create_dir_all(&environment.path[0]).unwrap();
    std::os::unix::fs::symlink(root.join("elsewhere/bin/nvcc"), environment.path[0].join("nvcc")).unwrap();
    assert_eq!(locate::toolkit(&environment).unwrap().root, root.join("elsewhere").canonicalize().unwrap());

    toolkit(&environment.system_toolkit, 13_000, "lib64");
    assert_eq!(locate::toolkit(&environment).unwrap().root, environment.system_toolkit);

    toolkit(&root.join("home"), 13_000, "lib64");
    let environment = with(environment, "CUDA_HOME", &root.join("home"));
    assert_eq!(locate::toolkit(&environment).unwrap().root, root.join("home"));

    toolkit(&root.join("own"), 13_000, "lib64");
    let environment = with(environment, "MUSE_SPARK_CUDA_ROOT", &root.join("own"));
    assert_eq!(locate::toolkit(&environment).unwrap().root, root.join("own"));
}

#[test]
fn an_old_toolkit_is_passed_over_and_named() {
    let root = folder("old");
    let environment = empty(&root);
    toolkit(&environment.system_toolkit, 12_040, "lib64");
    let text = locate::toolkit(&environment).unwrap_err().to_string();
    assert!(text.contains("a CUDA toolkit, 13.0 or newer"), "{text}");
    assert!(
        text.contains(&format!("{} (the system's): is CUDA 12.4, too old", root.join("system").display())),
        "{text}"
    );
    assert!(text.contains("third_party/.local/cuda/nvidia/cu13 (brought from wheels): no such folder"), "{text}");
    assert!(text.contains("python3 third_party/bring.py"), "{text}");

    let wheels = environment.repository.join("third_party/.local/cuda/nvidia/cu13");
    toolkit(&wheels, 13_000, "lib");
    assert_eq!(locate::toolkit(&environment).unwrap().root, wheels);
}

#[test]
fn an_override_that_is_wrong_is_an_error_and_nothing_else_is_tried() {
    let root = folder("override");
    let environment = with(empty(&root), "MUSE_SPARK_CUDA_ROOT", &root.join("own"));
    toolkit(&environment.system_toolkit, 13_000, "lib64");
    write(root.join("own/bin/nvcc"), "");
    let missing = locate::toolkit(&environment).unwrap_err();
    assert_eq!(missing.places.len(), 1, "{missing}");
    assert!(missing.to_string().contains("(MUSE_SPARK_CUDA_ROOT): has no include/cuda_runtime_api.h"), "{missing}");
}

#[test]
fn cutlass_is_found_or_named() {
    let root = folder("cutlass");
    let environment = empty(&root);
    let text = locate::cutlass(&environment).unwrap_err().to_string();
    assert!(text.contains("the CUTLASS headers, 4.2 or newer") && text.contains("bring.py"), "{text}");

    let wheel = environment.repository.join("third_party/.local/cutlass/cutlass_library/source/include");
    cutlass(&wheel, 2);
    assert_eq!(locate::cutlass(&environment).unwrap(), wheel);

    // A checkout or its include folder; too old a one is refused although the wheel would do.
    let checkout = root.join("checkout");
    cutlass(&checkout.join("include"), 3);
    for own in [checkout.clone(), checkout.join("include")] {
        let environment = with(environment.clone(), "MUSE_SPARK_CUTLASS_DIR", &own);
        assert_eq!(locate::cutlass(&environment).unwrap(), checkout.join("include"));
    }
    cutlass(&checkout.join("include"), 1);
    let text = locate::cutlass(&with(environment, "MUSE_SPARK_CUTLASS_DIR", &checkout)).unwrap_err().to_string();
    assert!(text.contains("is CUTLASS 4.1, too old"), "{text}");
}

#[test]
fn tools_come_from_the_pins_first_and_the_cache_from_the_user_first() {
    let root = folder("tools");
    let environment = empty(&root);
    toolkit(&environment.system_toolkit, 13_000, "lib64");
    cutlass(&environment.repository.join("third_party/.local/cutlass/cutlass_library/source/include"), 2);
    let missing = locate::pieces(&environment, false).unwrap_err();
    assert_eq!(missing.what, "the build tool cmake");

    let path = environment.path[0].clone();
    for program in ["cmake", "ninja"] {
        write(path.join(program), "");
    }
    let found = locate::pieces(&environment, false).unwrap();
    assert_eq!((found.cmake, found.ninja, found.cache), (path.join("cmake"), path.join("ninja"), None));

    let pinned = environment.repository.join("third_party/.local/tools");
    for program in ["cmake/data/bin/cmake", "bin/cmake", "bin/ninja", "bin/ccache"] {
        write(pinned.join(program), "");
    }
    let found = locate::pieces(&environment, false).unwrap();
    assert_eq!(found.cmake, pinned.join("cmake/data/bin/cmake"));
    assert_eq!(found.ninja, pinned.join("bin/ninja"));
    assert_eq!(found.cache, Some(pinned.join("bin/ccache")));

    write(path.join("sccache"), "");
    assert_eq!(locate::pieces(&environment, false).unwrap().cache, Some(path.join("sccache")));
}

#[test]
fn fa3_is_looked_for_with_its_feature_only() {
    let root = folder("fa3");
    let environment = empty(&root);
    toolkit(&environment.system_toolkit, 13_000, "lib64");
    cutlass(&environment.repository.join("third_party/.local/cutlass/cutlass_library/source/include"), 2);
    for program in ["cmake", "ninja"] {
        write(environment.path[0].join(program), "");
    }
    assert_eq!(locate::pieces(&environment, false).unwrap().fa3, None);
    let text = locate::pieces(&environment, true).unwrap_err().to_string();
    assert!(text.contains("FlashAttention-3") && text.contains("python3 third_party/bring.py fa3"), "{text}");
    assert!(text.contains("fa3/hopper (brought as sources): has no flash_fwd_kernel_sm90.h"), "{text}");

    let sources = |hopper: &Path| {
        for file in ["flash_fwd_kernel_sm90.h", "flash_prepare_scheduler.cu"] {
            write(hopper.join(file), "");
        }
    };
    let brought = environment.repository.join("third_party/.local/fa3/hopper");
    sources(&brought);
    assert_eq!(locate::pieces(&environment, true).unwrap().fa3, Some(brought));

    // A checkout or its hopper folder; a wrong one is refused although the brought sources would do.
    let checkout = root.join("checkout");
    let own = with(environment, "MUSE_SPARK_FA3_DIR", &checkout);
    assert_eq!(locate::fa3(&own).unwrap_err().places.len(), 2);
    sources(&checkout.join("hopper"));
    assert_eq!(locate::fa3(&own).unwrap(), checkout.join("hopper"));
}

#[rstest]
#[case::plenty(2, Some(64 << 30), 2)]
#[case::memory_is_the_limit(16, Some(7 << 30), 2)]
#[case::never_none(8, Some(1 << 30), 1)]
#[case::memory_unknown(8, None, 8)]
fn jobs_fit_cores_and_memory(#[case] cores: usize, #[case] memory: Option<u64>, #[case] jobs: usize) {
    assert_eq!(jobs::limit(cores, memory), jobs);
    assert!(jobs::parallel_jobs() >= 1);
}

#[test]
fn memory_limits_are_read() {
    assert_eq!(jobs::available_in_meminfo("MemTotal: 9 kB\nMemAvailable:  2048 kB\n"), Some(2 << 20));
    assert_eq!(jobs::available_in_meminfo(""), None);
    assert_eq!(jobs::group_limit(Some("4096\n"), Some("1024\n")), Some(3072));
    assert_eq!(jobs::group_limit(Some("max\n"), Some("1024\n")), None);
    assert_eq!(jobs::group_limit(None, None), None);
}

#[rstest]
#[case(
    "[3/14] Building CUDA object CMakeFiles/muse_spark_kernels.dir/gemm/dense.cu.o",
    Line::Step("[3/14] gemm/dense.cu".to_string())
)]
#[case("[14/14] Linking CXX static library x.a", Line::Step("[14/14] Linking CXX static library x.a".to_string()))]
#[case("[warn] not a step", Line::Other)]
#[case(
    "ptxas warning : Registers are spilled to local memory in function 'f', 8 bytes spill stores",
    Line::Warning("ptxas warning : Registers are spilled to local memory in function 'f', 8 bytes spill stores".to_string())
)]
#[case("../../x.cu(3): warning #177-D: variable declared", Line::Warning("x.cu(3): warning #177-D: variable declared".to_string()))]
#[case("cargo:root=/x", Line::Cargo("cargo:root=/x".to_string()))]
#[case("-- Configuring done", Line::Other)]
fn output_is_sorted(#[case] line: &str, #[case] expected: Line) {
    assert_eq!(progress::classify(line), expected);
}

/// The table that people read and the files that pip reads say the same, and so do the two bounds.
#[test]
fn pins_agree_with_each_other() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("third_party");
    let readme = fs::read_to_string(folder.join("README.md")).unwrap();
    let mut pins = 0;
    for (group, file) in [
        ("tools", "requirements-tools.txt"),
        ("cutlass", "requirements-cutlass.txt"),
        ("cuda", "requirements-cuda.txt"),
        ("fa3", "requirements-fa3.txt"),
        ("fa3", "sources-fa3.txt"),
    ] {
        let text = fs::read_to_string(folder.join(file)).unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let (pin, hash) = line.split_once(" --hash=sha256:").expect("each pin has its hash");
            let (package, version) = pin.split_once("==").expect("each pin is exact");
            assert_eq!(hash.len(), 64, "{line}");
            assert!(readme.contains(&format!("| {group} | {package} | {version} |")), "{pin} is not in the table");
            pins += 1;
        }
    }
    assert_eq!(
        readme.matches("\n| tools |").count() + readme.matches("\n| cu").count() + readme.matches("\n| fa3 |").count(),
        pins
    );
    let script = fs::read_to_string(folder.join("bring.py")).unwrap();
    assert!(script.contains(&format!("REQUIRED_CUDART = {} ", locate::REQUIRED_CUDART)));
}

/// CMakeLists.txt names every unit; one that is forgotten would be a missing symbol at best.
#[test]
fn every_unit_is_listed() {
    let csrc = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc");
    let list = fs::read_to_string(csrc.join("CMakeLists.txt")).unwrap();
    let (mut units, mut folders) = (0, vec![csrc.clone()]);
    while let Some(folder) = folders.pop() {
        for unit in fs::read_dir(&folder).unwrap().map(|unit| unit.unwrap().path()) {
            if unit.is_dir() {
                folders.push(unit);
            } else if matches!(unit.extension().and_then(|e| e.to_str()), Some("cu" | "cpp")) {
                let name = unit.strip_prefix(&csrc).unwrap().to_str().unwrap();
                assert!(list.contains(&format!("\n  {name}\n")), "csrc/{name} is not in csrc/CMakeLists.txt");
                units += 1;
            }
        }
    }
    let listed =
        list.lines().filter(|line| line.starts_with("  ") && (line.ends_with(".cu") || line.ends_with(".cpp")));
    assert_eq!(listed.count(), units, "csrc/CMakeLists.txt lists a unit that does not exist");
}
