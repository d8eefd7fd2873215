//! `bench`: times the judge's cases as the judge does, and each operation of a step by itself.

pub mod cases;
pub mod floor;
pub mod kernels;
#[cfg(feature = "cuda")]
mod measure;
pub mod results;

pub use results::SCHEMA;

use crate::args::BenchArgs;
use crate::{plot, report};
use muse_spark_layer::{Error, Result};

/// Without the CUDA backend there is nothing to time.
#[cfg(not(feature = "cuda"))]
mod measure {
    pub fn measure(_: &super::BenchArgs, _: &[super::cases::Case]) -> super::Result<super::results::Report> {
        Err(super::Error::NoCuda)
    }
}

/// Times the selected cases. `false`: a case is slower than its record, or gave no finite numbers.
pub fn bench(args: &BenchArgs) -> Result<bool> {
    let selected = cases::select(&args.cases.only)?;
    if args.cases.list {
        return report::list(selected.iter().map(|c| c.name.as_str()));
    }
    if let (Some(folder), Some(recorded)) = (&args.plot, &args.recorded) {
        return pictures(args, folder, &plot::Data::recorded(recorded)?);
    }
    if args.layers == 0 {
        return Err(Error::Value { what: "--layers".into(), wanted: "at least 1".into(), got: "0".into() });
    }
    // First, since a run takes long enough for a wrong path to be a pity.
    args.record.as_deref().map_or(Ok(()), |path| report::writable("--record", path))?;
    plot::possible(args.png)?;
    let baseline = args.baseline.as_deref().map(results::load).transpose()?;
    let report = measure::measure(args, &selected)?;
    if let Some(path) = &args.record {
        results::record(path, &report)?;
    }
    let changes = match &baseline {
        Some(before) => results::compare(before, &report, args.tolerance)?,
        None => Vec::new(),
    };
    report::show(args.cases.json, &report, |report| results::table(report, &changes))?;
    if args.cases.json {
        for c in changes.iter().filter(|c| c.slower) {
            eprintln!("{}: {:+.1}% against {:.1} us", c.case, c.percent, c.before);
        }
    }
    if let Some(folder) = &args.plot {
        pictures(args, folder, &plot::Data::measured(&report))?;
    }
    Ok(report.cases.iter().all(|c| c.finite) && !changes.iter().any(|c| c.slower))
}

fn pictures(args: &BenchArgs, folder: &std::path::Path, data: &plot::Data) -> Result<bool> {
    for path in plot::draw(folder, data, args.png)? {
        eprintln!("written: {}", path.display());
    }
    Ok(true)
}
