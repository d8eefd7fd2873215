//! The case matrix of `check`: the judge's cases (timed, odd, stressed) that a CPU reference can follow.

use muse_spark_layer::synthetic::{Dist, Spread, StepSpec};
use muse_spark_layer::{LayerKind, QueryPrecision};

/// One step to compare.
pub struct Case {
    pub name: String,
    pub spec: StepSpec,
    pub query: QueryPrecision,
    /// [`muse_spark_layer::synthetic::stress`] weights.
    pub stressed: bool,
    /// The experts' range: `None` is the busiest one.
    pub local_start: Option<i32>,
    /// Its reference takes minutes.
    pub long: bool,
}

struct Row {
    name: &'static str,
    batch: usize,
    ctx: usize,
    q_len: usize,
    page: usize,
    spread: Spread,
    dist: Dist,
    scales: (f32, f32),
}

const fn row(name: &'static str, batch: usize, ctx: usize, q_len: usize) -> Row {
    Row { name, batch, ctx, q_len, page: 1, spread: Spread::Fixed, dist: Dist::Normal, scales: (1.0, 1.0) }
}

impl Row {
    const fn page(self, page: usize) -> Row {
        Row { page, ..self }
    }
    const fn mixed(self) -> Row {
        Row { spread: Spread::Mixed, ..self }
    }
    const fn dist(self, dist: Dist) -> Row {
        Row { dist, ..self }
    }
    const fn scales(self, k: f32, v: f32) -> Row {
        Row { scales: (k, v), ..self }
    }
}

const ROWS: [Row; 34] = [
    row("decode-b1-8k", 1, 8192, 1),
    row("decode-b2-8k", 2, 8192, 1),
    row("decode-b4-8k", 4, 8192, 1),
    row("decode-b8-8k", 8, 8192, 1),
    row("decode-b16-2k", 16, 2048, 1),
    row("decode-b64-1k", 64, 1024, 1),
    row("decode-b128-512", 128, 512, 1),
    row("decode-b256-256", 256, 256, 1),
    row("decode-b3-odd", 3, 777, 1).mixed(),
    row("decode-b9-mixed", 9, 1500, 1).mixed(),
    row("decode-b33-mixed", 33, 700, 1).mixed(),
    row("decode-b1-empty", 1, 0, 1),
    row("decode-window-edge", 4, 2047, 1),
    row("decode-window-edge1", 4, 2048, 1),
    row("decode-page16", 5, 2000, 1).mixed().page(16),
    row("decode-page64", 5, 2000, 1).mixed().page(64),
    row("decode-page256", 5, 2000, 1).mixed().page(256),
    row("decode-scales", 4, 2000, 1).mixed().scales(0.37, 2.9),
    row("decode-outliers", 8, 2048, 1).dist(Dist::Outliers),
    row("decode-soft", 8, 4096, 1).dist(Dist::Soft),
    row("verify-b1-8k", 1, 8192, 8),
    row("verify-b4-2k", 4, 2048, 8),
    row("verify-b16-512", 16, 512, 8),
    row("verify-b1-short", 1, 5, 8),
    row("verify-page64", 2, 2000, 8).mixed().page(64),
    row("verify-scales", 2, 2500, 8).scales(0.37, 2.9),
    row("block-q3", 7, 1000, 3).mixed(),
    row("prefill-200-0", 1, 0, 200),
    row("prefill-200-8k", 1, 8192, 200),
    row("prefill-333x3", 3, 500, 333).mixed(),
    row("prefill-512-2k", 1, 2048, 512).page(16),
    row("prefill-scales", 1, 700, 300).scales(0.37, 2.9),
    row("prefill-2048-4k", 1, 4096, 2048),
    row("prefill-4097-0", 1, 0, 4097),
];

/// Whether `name` contains one of the parts of `only`, which are separated by `|`.
pub fn named(name: &str, only: &str) -> bool {
    only.split('|').any(|part| name.contains(part))
}

/// All cases, both kinds of layers.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |name: String, row: &Row, kind: LayerKind, query, stressed, local_start| {
        let spec = StepSpec {
            page_size: row.page,
            spread: row.spread,
            dist: row.dist,
            k_scale: row.scales.0,
            v_scale: row.scales.1,
            ..StepSpec::new(row.batch, row.q_len, row.ctx, kind)
        };
        let long = row.batch * row.q_len > 600;
        cases.push(Case { name: format!("{name}-{kind}"), spec, query, stressed, local_start, long });
    };
    for kind in [LayerKind::Full, LayerKind::Sliding] {
        for row in &ROWS {
            push(row.name.into(), row, kind, QueryPrecision::Fp16, false, None);
        }
        for r in [row("e4m3-decode", 3, 3000, 1), row("e4m3-verify", 2, 3000, 8), row("e4m3-prefill", 1, 500, 300)] {
            push(r.name.into(), &r, kind, QueryPrecision::E4m3, false, None);
        }
        let small_values = 2f32.powi(-8);
        for r in
            [row("stress-decode", 6, 2000, 1), row("stress-verify", 3, 1500, 8), row("stress-prefill", 1, 500, 300)]
        {
            push(r.name.into(), &r.scales(1.0, small_values), kind, QueryPrecision::Fp16, true, None);
        }
        for start in [32, 224, 240] {
            let r = row("range", 20, 300, 1);
            push(format!("range-{start}"), &r, kind, QueryPrecision::Fp16, false, Some(start));
        }
    }
    cases
}
