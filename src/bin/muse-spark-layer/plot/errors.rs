//! A heat map of the distance from the reference, over cases and taps: full layers left, sliding ones right.

use super::data::Distances;
use super::{fault, text, Data};
use muse_spark_layer::Result;
use plotters::prelude::*;

const CELL: (i32, i32) = (50, 15);
const NAME: i32 = 150;
const TOP: i32 = 132;
const GAP: i32 = 24;
/// The scale's ends: white at 1e-5 and below, dark at the bound of the outputs.
const LOW: f64 = 1e-5;
const HIGH: f64 = 1e-2;

fn shade(distance: f64) -> RGBColor {
    let part = ((distance.max(LOW) / LOW).ln() / (HIGH / LOW).ln()).clamp(0.0, 1.0);
    let mix = |from: f64, to: f64| (from + (to - from) * part) as u8;
    if distance > HIGH {
        RGBColor(0xb0, 0x10, 0x10)
    } else {
        RGBColor(mix(255.0, 60.0), mix(255.0, 110.0), mix(255.0, 175.0))
    }
}

fn columns(d: &Distances) -> Vec<(&str, f64)> {
    let taps = d.taps.iter().map(|(name, distance)| (name.as_str(), *distance));
    taps.chain([("update", d.update), ("hidden", d.hidden)]).collect()
}

pub fn picture(data: &Data) -> Result<Option<String>> {
    let Some(first) = data.distances.first() else { return Ok(None) };
    let names: Vec<&str> = columns(first).iter().map(|(name, _)| *name).collect();
    let halves: Vec<Vec<&Distances>> =
        ["-full", "-sliding"].iter().map(|k| data.distances.iter().filter(|d| d.case.ends_with(k)).collect()).collect();
    let rows = halves.iter().map(Vec::len).max().unwrap_or(0) as i32;
    let width = NAME + GAP + 2 * (names.len() as i32 * CELL.0) + NAME;
    let mut svg = String::new();
    {
        let size = (width as u32 + 20, (TOP + rows * CELL.1 + 12) as u32);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let caption =
            format!("Relative L2 distance from the FP32 reference, {}: white 1e-5, dark 1e-2, red above", data.device);
        root.draw(&Text::new(caption, (8, 8), text(15))).map_err(fault)?;
        for (half, cases) in halves.iter().enumerate() {
            let left = 8 + half as i32 * (NAME + GAP + names.len() as i32 * CELL.0 - GAP / 2);
            let grid = left + NAME;
            let kind = ["full layers", "sliding layers"][half];
            root.draw(&Text::new(kind, (left, TOP - 18), text(12))).map_err(fault)?;
            for (i, name) in names.iter().enumerate() {
                let upright = text(11).transform(FontTransform::Rotate270);
                let at = (grid + i as i32 * CELL.0 + CELL.0 / 2 - 6, TOP - 6);
                root.draw(&Text::new(name.to_string(), at, upright)).map_err(fault)?;
            }
            for (r, d) in cases.iter().enumerate() {
                let y = TOP + r as i32 * CELL.1;
                let name = d.case.trim_end_matches("-full").trim_end_matches("-sliding");
                root.draw(&Text::new(name.to_string(), (left, y + 2), text(11))).map_err(fault)?;
                for (i, (_, distance)) in columns(d).into_iter().enumerate() {
                    let x = grid + i as i32 * CELL.0;
                    let cell = [(x, y), (x + CELL.0 - 1, y + CELL.1 - 1)];
                    root.draw(&Rectangle::new(cell, shade(distance).filled())).map_err(fault)?;
                    let figure = if distance == 0.0 { "0".into() } else { format!("{distance:.0e}") };
                    root.draw(&Text::new(figure, (x + 10, y + 2), text(9))).map_err(fault)?;
                }
            }
        }
        root.present().map_err(fault)?;
    }
    Ok(Some(svg))
}
