//! A pairwise set of steps: every two values of every two of kind, batch, query length, context, page
//! size, spread, scales and distribution meet in some row (a test checks that).

use muse_spark_layer::synthetic::{Dist, Spread, StepSpec};
use muse_spark_layer::LayerKind;

/// Query lengths of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Queries {
    Each(usize),
    /// Different from request to request, some of them zero.
    Ragged,
}

use Dist::*;
use LayerKind::*;
use Queries::*;
use Spread::*;

/// Kind, batch, queries, context, page size, spread, (k_scale, v_scale), distribution. The small
/// configuration's window is 24.
pub type Row = (LayerKind, usize, Queries, usize, usize, Spread, (f32, f32), Dist);

pub const ROWS: [Row; 23] = [
    (Sliding, 9, Each(8), 0, 64, Fixed, (2.0, 0.5), Normal),
    (Full, 1, Each(20), 0, 1, Mixed, (0.37, 2.9), Soft),
    (Sliding, 3, Each(1), 23, 16, Agentic, (0.37, 2.9), Outliers),
    (Full, 9, Each(3), 24, 4, Agentic, (1.0, 1.0), Outliers),
    (Sliding, 1, Ragged, 60, 4, Fixed, (1.0, 1.0), Soft),
    (Full, 3, Each(3), 60, 16, Mixed, (2.0, 0.5), Normal),
    (Sliding, 3, Each(20), 24, 64, Mixed, (1.0, 1.0), Normal),
    (Full, 9, Ragged, 23, 1, Mixed, (2.0, 0.5), Outliers),
    (Full, 1, Each(1), 24, 64, Agentic, (2.0, 0.5), Soft),
    (Full, 1, Each(8), 24, 16, Fixed, (0.37, 2.9), Outliers),
    (Sliding, 3, Each(8), 23, 1, Fixed, (1.0, 1.0), Soft),
    (Sliding, 9, Ragged, 60, 64, Agentic, (0.37, 2.9), Normal),
    (Sliding, 3, Each(1), 0, 4, Mixed, (1.0, 1.0), Normal),
    (Sliding, 1, Each(3), 23, 64, Fixed, (0.37, 2.9), Normal),
    (Sliding, 9, Each(20), 23, 4, Agentic, (2.0, 0.5), Outliers),
    (Sliding, 9, Each(3), 0, 16, Agentic, (1.0, 1.0), Soft),
    (Sliding, 9, Each(1), 60, 1, Fixed, (1.0, 1.0), Outliers),
    (Sliding, 3, Ragged, 0, 4, Agentic, (0.37, 2.9), Outliers),
    (Full, 1, Each(3), 24, 1, Agentic, (2.0, 0.5), Normal),
    (Sliding, 3, Each(8), 60, 4, Agentic, (2.0, 0.5), Soft),
    (Full, 3, Each(20), 60, 16, Fixed, (1.0, 1.0), Outliers),
    (Full, 3, Ragged, 24, 16, Agentic, (0.37, 2.9), Soft),
    (Full, 1, Each(8), 23, 64, Mixed, (0.37, 2.9), Outliers),
];

/// The step of a row.
pub fn spec(row: &Row) -> StepSpec {
    let (kind, batch, queries, ctx, page_size, spread, (k_scale, v_scale), dist) = *row;
    let q_lens = match queries {
        Each(n) => vec![n; batch],
        Ragged => [0, 5, 0, 1, 8, 13, 1, 0, 2].into_iter().cycle().skip(1).take(batch).collect(),
    };
    StepSpec { q_lens, spread, dist, page_size, k_scale, v_scale, ..StepSpec::new(batch, 1, ctx, kind) }
}

/// One rstest of `$check(&Row)` over all rows.
macro_rules! pairwise {
    ($(#[$attribute:meta])* $name:ident, $check:expr) => {
        $(#[$attribute])*
        #[rstest::rstest]
        #[case(0)]
        #[case(1)]
        #[case(2)]
        #[case(3)]
        #[case(4)]
        #[case(5)]
        #[case(6)]
        #[case(7)]
        #[case(8)]
        #[case(9)]
        #[case(10)]
        #[case(11)]
        #[case(12)]
        #[case(13)]
        #[case(14)]
        #[case(15)]
        #[case(16)]
        #[case(17)]
        #[case(18)]
        #[case(19)]
        #[case(20)]
        #[case(21)]
        #[case(22)]
        fn $name(#[case] row: usize) {
            let check: fn(&cpu_common::pairwise::Row) = $check;
            check(&cpu_common::pairwise::ROWS[row]);
        }
    };
}
pub(crate) use pairwise;
