//! Latency of a layer against the batch: one panel a phase, with the floor and SGLang's measured line.

use super::{duration, fault, text, Area, Data, FLOOR, INK, OURS, PEER};
use muse_spark_layer::Result;
use plotters::prelude::*;

/// A panel: cases `{phase}-{b}{number}{rest}`.
struct Panel {
    title: &'static str,
    before: &'static str,
    after: &'static str,
    axis: &'static str,
}

const PANELS: [Panel; 3] = [
    Panel { title: "decode after 8k, full", before: "decode-b", after: "-8k-full", axis: "requests" },
    Panel { title: "verify 8 tokens after 8k, full", before: "verify-b", after: "-8k-full", axis: "requests" },
    Panel { title: "prefill after 8k, full", before: "prefill-", after: "-8k-full", axis: "tokens" },
];

struct Point {
    size: u32,
    us: f64,
    floor_us: f64,
    peer_us: Option<f64>,
}

fn points(data: &Data, panel: &Panel) -> Vec<Point> {
    let size = |case: &str| case.strip_prefix(panel.before)?.strip_suffix(panel.after)?.parse().ok();
    let mut points: Vec<Point> = data
        .timed
        .iter()
        .filter_map(|t| {
            let peer_us = data.peer.iter().find(|(case, _)| *case == t.case).map(|(_, us)| *us);
            Some(Point { size: size(&t.case)?, us: t.us, floor_us: t.floor_us, peer_us })
        })
        .collect();
    points.sort_by_key(|p| p.size);
    points
}

pub fn picture(data: &Data) -> Result<Option<String>> {
    let panels: Vec<(&Panel, Vec<Point>)> =
        PANELS.iter().map(|p| (p, points(data, p))).filter(|(_, points)| points.len() > 1).collect();
    if panels.is_empty() {
        return Ok(None);
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (380 * panels.len() as u32, 380)).into_drawing_area();
        root.fill(&WHITE).map_err(fault)?;
        let caption = format!("Time of one layer on one {}, page size 1", data.device);
        let root = root.titled(&caption, text(17)).map_err(fault)?;
        for (i, (area, (panel, points))) in root.split_evenly((1, panels.len())).iter().zip(&panels).enumerate() {
            draw(area, panel, points, i == 0)?;
        }
        root.present().map_err(fault)?;
    }
    Ok(Some(svg))
}

fn draw(area: &Area, panel: &Panel, points: &[Point], legend: bool) -> Result<()> {
    let low = points.iter().map(|p| p.floor_us).fold(f64::INFINITY, f64::min) * 0.8;
    let high = points.iter().map(|p| p.peer_us.unwrap_or(0.0).max(p.us)).fold(0.0, f64::max) * 1.3;
    let last = points.len() as f64 - 1.0;
    let mut chart = ChartBuilder::on(area)
        .caption(panel.title, text(14))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(-0.2..last + 0.35, (low..high).log_scale())
        .map_err(fault)?;
    chart
        .configure_mesh()
        .light_line_style(RGBColor(0xee, 0xee, 0xee))
        .disable_x_mesh()
        .max_light_lines(1)
        .x_desc(panel.axis)
        .x_labels(points.len() * 2)
        .x_label_formatter(&|x| {
            let near = (x - x.round()).abs() < 1e-6 && *x >= 0.0;
            points.get(x.round() as usize).filter(|_| near).map_or(String::new(), |p| p.size.to_string())
        })
        .y_label_formatter(&|us| duration(*us))
        .label_style(text(12))
        .draw()
        .map_err(fault)?;
    let line = |us: &dyn Fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        points.iter().enumerate().filter_map(|(i, p)| Some((i as f64, us(p)?))).collect()
    };
    let lines = [
        ("SGLang's kernels", PEER, line(&|p| p.peer_us)),
        ("this crate", OURS, line(&|p| Some(p.us))),
        ("floor (bytes, operations)", FLOOR, line(&|p| Some(p.floor_us))),
    ];
    for (name, color, line) in lines {
        if line.is_empty() {
            continue;
        }
        chart
            .draw_series(LineSeries::new(line.clone(), color.stroke_width(2)).point_size(3))
            .map_err(fault)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
        let labels = line.iter().filter(|_| color == OURS);
        let label = |&(x, us): &(f64, f64)| Text::new(duration(us), (x + 0.06, us * 0.97), text(10));
        chart.draw_series(labels.map(label)).map_err(fault)?;
    }
    if !legend {
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(INK.mix(0.2))
        .label_font(text(12))
        .draw()
        .map_err(fault)
}
