//! A roofline of the operations: arithmetic intensity against the rate reached, each timed alone.

use super::{fault, text, Data, FLOOR, INK, OURS, PEER};
use crate::bench::floor::{BYTES_PER_US, FLOPS_PER_US};
use muse_spark_layer::Result;
use plotters::prelude::*;

const COLORS: [RGBColor; 4] = [OURS, PEER, RGBColor(0x2c, 0x8c, 0x3c), RGBColor(0x8a, 0x4f, 0xa8)];

pub fn picture(data: &Data) -> Result<Option<String>> {
    if data.kernels.is_empty() {
        return Ok(None);
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (900, 520)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let caption =
            format!("Operations of a step on one {}, each alone: roof at 4.8 TB/s and 989 TFLOP/s", data.device);
        let mut chart = ChartBuilder::on(&root)
            .caption(caption, text(17))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d((0.3f64..20_000.0).log_scale(), (0.3f64..1500.0).log_scale())
            .map_err(fault)?;
        chart
            .configure_mesh()
            .light_line_style(RGBColor(0xf2, 0xf2, 0xf2))
            .x_desc("operations per byte")
            .y_desc("TFLOP/s")
            .x_label_formatter(&|v| format!("{v}"))
            .y_label_formatter(&|v| format!("{v}"))
            .label_style(text(12))
            .draw()
            .map_err(fault)?;
        let roof = |intensity: f64| (intensity * BYTES_PER_US).min(FLOPS_PER_US) * 1e-6;
        let ridge = FLOPS_PER_US / BYTES_PER_US;
        let line = [0.3, ridge, 20_000.0].map(|x| (x, roof(x)));
        chart.draw_series(LineSeries::new(line, FLOOR.stroke_width(2))).map_err(fault)?;
        for (case, color) in data.kernels.iter().zip(COLORS.into_iter().cycle()) {
            let points: Vec<(&str, (f64, f64))> = case
                .kernels
                .iter()
                .filter(|k| k.flops > 0.0 && k.bytes > 0.0)
                .map(|k| {
                    let us = (k.us - data.event_us).max(0.1);
                    (k.operation.as_str(), (k.flops / k.bytes, k.flops / us * 1e-6))
                })
                .filter(|(_, (x, y))| *x > 0.3 && *y > 0.3)
                .collect();
            chart
                .draw_series(points.iter().map(|(_, at)| Circle::new(*at, 4, color.filled())))
                .map_err(fault)?
                .label(case.case.clone())
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, color.filled()));
            let names = points.iter().map(|(name, (x, y))| Text::new(name.to_string(), (x * 1.06, y * 0.97), text(10)));
            chart.draw_series(names).map_err(fault)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(INK.mix(0.2))
            .label_font(text(12))
            .draw()
            .map_err(fault)?;
        root.present().map_err(fault)?;
    }
    Ok(Some(svg))
}
