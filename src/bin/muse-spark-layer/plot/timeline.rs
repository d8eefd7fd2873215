//! A timeline of a step by operation: each one's time alone, end to end, over the time of the whole step, in which
//! dependent launch lets neighbours overlap.

use super::{duration, fault, text, Data, FLOOR, INK};
use muse_spark_layer::Result;
use plotters::prelude::*;

/// Colours by part of the layer.
fn color(operation: &str) -> RGBColor {
    match operation {
        "qkv_gate" | "o" => RGBColor(0x4c, 0x8b, 0xc8),
        "attention" | "append_attention" | "fa3_schedule" | "fa3_attention" => RGBColor(0x2c, 0x8c, 0x5c),
        "qk_norm_rope_append" | "out_norm_gate" => RGBColor(0x8c, 0xc8, 0xa0),
        "pooler" | "unpooler" => RGBColor(0x7a, 0x6f, 0xc0),
        "w13" | "w2" => RGBColor(0xd6, 0x6a, 0x2e),
        "pre_expert_norm" | "combine" => RGBColor(0xf0, 0xb4, 0x8c),
        "attn_boundary" | "ffn_boundary" => RGBColor(0xb0, 0xb0, 0xb0),
        _ => RGBColor(0xd8, 0xc0, 0x50),
    }
}

const WIDTH: u32 = 1100;
const LEFT: i32 = 12;
const ROW: i32 = 96;

pub fn picture(data: &Data) -> Result<Option<String>> {
    if data.kernels.is_empty() {
        return Ok(None);
    }
    let height = 40 + ROW as u32 * data.kernels.len() as u32;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let caption = format!(
            "A step by operation on one {}: each alone (above), the whole step in a graph (below)",
            data.device
        );
        root.draw(&Text::new(caption, (LEFT, 10), text(16))).map_err(fault)?;
        for (row, case) in data.kernels.iter().enumerate() {
            let top = 40 + ROW * row as i32;
            let alone: Vec<(&str, f64)> =
                case.kernels.iter().map(|k| (k.operation.as_str(), (k.us - data.event_us).max(0.0))).collect();
            let sum: f64 = alone.iter().map(|(_, us)| us).sum();
            let scale = f64::from(WIDTH as i32 - 2 * LEFT) / sum.max(case.us);
            let name = format!(
                "{}: {} alone, {} in a graph, floor {}",
                case.case,
                duration(sum),
                duration(case.us),
                duration(case.floor_us)
            );
            root.draw(&Text::new(name, (LEFT, top), text(13))).map_err(fault)?;
            let mut at = 0.0;
            for (operation, us) in alone {
                let (from, to) = (LEFT + (at * scale) as i32, LEFT + ((at + us) * scale) as i32);
                let bar = Rectangle::new([(from, top + 18), (to.max(from + 1), top + 48)], color(operation).filled());
                root.draw(&bar).map_err(fault)?;
                // A name where it fits, its time below.
                if to - from > 6 * operation.len() as i32 - 4 {
                    root.draw(&Text::new(operation.to_string(), (from + 3, top + 21), text(11))).map_err(fault)?;
                    root.draw(&Text::new(duration(us), (from + 3, top + 34), text(10))).map_err(fault)?;
                }
                at += us;
            }
            for (us, bottom, shade) in [(case.us, top + 58, INK), (case.floor_us, top + 66, FLOOR)] {
                let bar = [(LEFT, bottom), (LEFT + (us * scale) as i32, bottom + 5)];
                root.draw(&Rectangle::new(bar, shade.filled())).map_err(fault)?;
            }
        }
        root.present().map_err(fault)?;
    }
    Ok(Some(svg))
}
