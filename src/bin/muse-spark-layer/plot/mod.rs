//! `bench --plot`: pictures of measured results, as SVG: latency against batch, a roofline of the operations, a
//! timeline of one step, and the distance from the reference over cases and taps. They are drawn from the JSON
//! documents that `judge.py --json`, `bench --record` and `check --json` write, or from the run just made.

mod data;
mod errors;
mod latency;
mod roofline;
mod timeline;

pub use data::Data;

use muse_spark_layer::{Error, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::{Path, PathBuf};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const OURS: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const PEER: RGBColor = RGBColor(0xd6, 0x5f, 0x1e);
const FLOOR: RGBColor = RGBColor(0x70, 0x70, 0x70);
const INK: RGBColor = RGBColor(0x20, 0x20, 0x20);

/// A picture could not be drawn: a fault of this program, since its data is checked before.
fn fault<E: std::fmt::Display>(e: E) -> Error {
    Error::Internal { what: format!("plot: {e}") }
}

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

/// Microseconds as a reader would write them.
fn duration(us: f64) -> String {
    match us {
        us if us >= 9950.0 => format!("{:.0} ms", us / 1000.0),
        us if us >= 999.5 => format!("{:.1} ms", us / 1000.0),
        us if us >= 9.95 => format!("{us:.0} us"),
        us => format!("{us:.1} us"),
    }
}

/// Writes every picture that `data` has the figures for into `folder`, and says which. `png`: beside each SVG.
pub fn draw(folder: &Path, data: &Data, png: bool) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder).map_err(|source| Error::File { path: folder.into(), source })?;
    let pictures = [
        ("latency", latency::picture(data)?),
        ("roofline", roofline::picture(data)?),
        ("timeline", timeline::picture(data)?),
        ("errors", errors::picture(data)?),
    ];
    let mut written = Vec::new();
    for (name, picture) in pictures {
        let Some(svg) = picture else { continue };
        let path = folder.join(format!("{name}.svg"));
        // A line break an element: a changed figure is a changed line.
        let svg = svg.replace("><", ">\n<") + "\n";
        std::fs::write(&path, &svg).map_err(|source| Error::File { path: path.clone(), source })?;
        if png {
            let path = path.with_extension("png");
            raster(&svg, &path)?;
            written.push(path);
        }
        written.push(path);
    }
    if written.is_empty() {
        let wanted =
            "results that a picture can be drawn from: timed cases, operations (--kernels) or distances".into();
        return Err(Error::Value { what: "--plot".into(), wanted, got: "none".into() });
    }
    Ok(written)
}

/// Whether this build can draw what is asked for.
pub fn possible(png: bool) -> Result<()> {
    if !png || cfg!(feature = "png") {
        return Ok(());
    }
    let wanted = "a build with `--features png`".into();
    Err(Error::Value { what: "--png".into(), wanted, got: "one without".into() })
}

#[cfg(feature = "png")]
fn raster(svg: &str, path: &Path) -> Result<()> {
    use resvg::{tiny_skia, usvg};
    let mut options = usvg::Options::default();
    options.fontdb_mut().load_system_fonts();
    if options.fontdb.is_empty() {
        let wanted = "a font on this machine (for example the package fonts-dejavu-core)".into();
        return Err(Error::Value { what: "--png".into(), wanted, got: "none".into() });
    }
    // The first of the machine's fonts that calls itself sans serif, else the first.
    let families: Vec<String> = options.fontdb.faces().filter_map(|f| Some(f.families.first()?.0.clone())).collect();
    let sans = families.iter().find(|f| f.contains("Sans") && !f.contains("Mono")).or(families.first());
    if let Some(family) = sans {
        options.fontdb_mut().set_sans_serif_family(family);
    }
    const SCALE: f32 = 2.0;
    let tree = usvg::Tree::from_str(svg, &options).map_err(fault)?;
    let size = tree.size().to_int_size().scale_by(SCALE).ok_or_else(|| fault("an empty picture"))?;
    let mut pixels = tiny_skia::Pixmap::new(size.width(), size.height()).ok_or_else(|| fault("an empty picture"))?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    let bytes = pixels.encode_png().map_err(fault)?;
    std::fs::write(path, bytes).map_err(|source| Error::File { path: path.into(), source })
}

#[cfg(not(feature = "png"))]
fn raster(_: &str, _: &Path) -> Result<()> {
    possible(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        let shown = [1.23, 93.65, 999.0, 1078.7, 7651.0, 16833.0].map(duration);
        assert_eq!(shown, ["1.2 us", "94 us", "999 us", "1.1 ms", "7.7 ms", "17 ms"]);
    }

    /// The recorded results give every picture, and each shows what it is drawn from.
    #[test]
    fn recorded_results_give_every_picture() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results");
        let folder = std::env::temp_dir().join(format!("muse-spark-plot-{}", std::process::id()));
        let data = Data::recorded(&results).unwrap();
        let written = draw(&folder, &data, false).unwrap();
        let names: Vec<_> = written.iter().map(|p| p.file_stem().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["latency", "roofline", "timeline", "errors"]);
        let read = |name: &str| std::fs::read_to_string(folder.join(format!("{name}.svg"))).unwrap();
        for (name, shown) in [("latency", "SGLang"), ("roofline", "pooler"), ("timeline", "w13"), ("errors", "moe_mix")]
        {
            let svg = read(name);
            assert!(svg.starts_with("<svg") && svg.contains(shown), "{name}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let error = draw(&std::env::temp_dir(), &Data::default(), false).unwrap_err().to_string();
        assert!(error.contains("--plot") && error.contains("--kernels"), "{error}");
    }
}
