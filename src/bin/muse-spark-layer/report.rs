//! Tables, progress and the numbers in them.

use comfy_table::{presets, Table};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

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

/// `||got - want|| / ||want||` in FP64; 0 for two empty or zero arrays.
pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    let (mut difference, mut norm) = (0f64, 0f64);
    for (g, w) in got.iter().zip(want) {
        difference += (f64::from(*g) - f64::from(*w)).powi(2);
        norm += f64::from(*w).powi(2);
    }
    if difference == 0.0 {
        0.0
    } else {
        (difference / norm.max(1e-60)).sqrt()
    }
}

/// Root mean square in FP64.
pub fn rms(values: &[f32]) -> f64 {
    let squares: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
    (squares / values.len().max(1) as f64).sqrt()
}
