//! Reads the native build's output line by line: what to show while it runs, what to keep as a warning.

/// What one line of CMake's or Ninja's output means to the reader of the build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// A step of the build is done: shown where progress is shown.
    Step(String),
    /// Worth a line in cargo's own output: ptxas says that registers were spilled, a compiler warned.
    Warning(String),
    /// An instruction to cargo, passed on.
    Cargo(String),
    /// Kept in the build script's log only.
    Other,
}

/// Sorts one line.
pub fn classify(line: &str) -> Line {
    let text = line.trim_end();
    if text.starts_with("cargo:") {
        return Line::Cargo(text.to_string());
    }
    if let Some(step) = step(text) {
        return Line::Step(step);
    }
    if text.contains("ptxas warning") || text.contains("warning:") || text.contains("warning #") {
        // ccache hands the compiler paths relative to the build folder.
        return Line::Warning(text.trim_start_matches("../").to_string());
    }
    Line::Other
}

/// `[3/14] Building CUDA object CMakeFiles/x.dir/gemm/dense.cu.o` as `[3/14] gemm/dense.cu`.
fn step(text: &str) -> Option<String> {
    let (count, action) = text.strip_prefix('[')?.split_once("] ")?;
    let (done, of) = count.split_once('/')?;
    if done.parse::<u32>().is_err() || of.parse::<u32>().is_err() {
        return None;
    }
    let name = match action.split_once(".dir/") {
        Some((_, object)) if action.starts_with("Building") => object.strip_suffix(".o").unwrap_or(object),
        _ => action,
    };
    Some(format!("[{count}] {name}"))
}
