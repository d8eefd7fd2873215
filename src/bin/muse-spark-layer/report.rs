//! What every command prints: tables or one JSON object to stdout, progress to stderr.

use comfy_table::{presets, Table};
use indicatif::{ProgressBar, ProgressStyle};
use muse_spark_layer::{Error, Result};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

/// The report as one JSON object, or as `text` makes it.
pub fn show<R: serde::Serialize>(json: bool, report: &R, text: impl FnOnce(&R) -> String) -> Result<()> {
    match json {
        true => print(&to_json(report)?),
        false => print(&text(report)),
    }
}

/// A report that cannot be serialised is a fault of this program.
pub fn to_json(report: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string_pretty(report).map_err(|e| Error::Internal { what: e.to_string() })
}

/// Lines to stdout. A reader that has seen enough (`| head`) is no error.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Error::File { path: "stdout".into(), source: e }),
        _ => Ok(()),
    }
}

/// A name a line.
pub fn list<'a>(names: impl Iterator<Item = &'a str>) -> Result<bool> {
    print(&names.collect::<Vec<_>>().join("\n")).map(|()| true)
}

/// Checks that `path` can be a file to write, before a long run whose results go there.
pub fn writable(argument: &str, path: &Path) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !path.is_dir() && folder.is_dir() {
        return Ok(());
    }
    let wanted = "a file in a folder that exists".into();
    Err(Error::Value { what: argument.into(), wanted, got: path.display().to_string() })
}

/// A table in the project's one style.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    if !header.is_empty() {
        table.set_header(header.iter().copied());
    }
    table
}

/// Two columns, a name and a value.
pub fn facts(rows: &[(&str, String)]) -> Table {
    let mut table = table(&[]);
    for (name, value) in rows {
        table.add_row([*name, value.as_str()]);
    }
    table
}

/// A line on stderr that shows a long step is under way.
pub fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what.to_string());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// A bar over `n` cases, on stderr.
pub fn bar(n: usize) -> ProgressBar {
    let bar = ProgressBar::new(n as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// A bar over bytes, with their rate, on stderr.
pub fn bytes_bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar
}

/// Root mean square in FP64.
pub fn rms(values: &[f32]) -> f64 {
    // Not `sum()`, which is -0 for no values.
    let squares = values.iter().fold(0.0, |sum, v| sum + f64::from(*v).powi(2));
    (squares / values.len().max(1) as f64).sqrt()
}
