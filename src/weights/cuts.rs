//! How matrices are cut into the parts that go to a device one at a time: geometry only.

use std::ops::Range;

/// Rows of every expert that a cut may end at: two 64-row tiles of the packed form take 64 rows of the gate
/// and 64 of up, one takes 64 rows of any other matrix.
const UNIT: usize = 64;

/// A matrix `[experts, rows, k]` as it is packed: tiles of an expert follow each other, experts too. (A dense
/// matrix is one expert.)
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub experts: usize,
    pub rows: usize,
    /// Halves of an expert's rows that are packed side by side: 2 where gate and up are, else 1.
    pub halves: usize,
}

/// Rows of some experts, packed at once from a compact copy of theirs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cut {
    pub experts: Range<usize>,
    /// Within each half.
    pub rows: Range<usize>,
}

impl Matrix {
    fn half(&self) -> usize {
        self.rows / self.halves
    }

    /// All of it.
    pub fn whole(&self) -> Cut {
        Cut { experts: 0..self.experts, rows: 0..self.half() }
    }

    /// Cuts of up to `limit` bytes (but at least one unit), where a row takes `row_bytes`.
    pub fn cuts(&self, row_bytes: usize, limit: usize) -> Vec<Cut> {
        let units = (limit / (row_bytes * UNIT * self.halves)).max(1);
        let step = UNIT * units;
        (0..self.experts)
            .flat_map(|e| (0..self.half()).step_by(step).map(move |r| (e, r)))
            .map(|(e, r)| Cut { experts: e..e + 1, rows: r..(r + step).min(self.half()) })
            .collect()
    }

    /// Rows of an expert in the compact copy.
    pub fn rows_of(&self, cut: &Cut) -> usize {
        cut.rows.len() * self.halves
    }

    /// Where the rows of the compact copy, in order, stand among the rows of all experts.
    pub fn sources(&self, cut: &Cut) -> Vec<Range<usize>> {
        let at = |e: usize, h: usize| e * self.rows + h * self.half();
        let parts = cut.experts.clone().flat_map(|e| (0..self.halves).map(move |h| (e, h)));
        parts.map(|(e, h)| at(e, h) + cut.rows.start..at(e, h) + cut.rows.end).collect()
    }

    /// The first row that the cut's tiles hold, in packed order.
    pub fn packed_row(&self, cut: &Cut) -> usize {
        cut.experts.start * self.rows + cut.rows.start * self.halves
    }

    /// Where row `row` of the compact copy stands among the rows of all experts.
    pub fn source(&self, cut: &Cut, row: usize) -> usize {
        let n = cut.rows.len();
        self.sources(cut)[row / n].start + row % n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_hold_every_row_once_and_keep_to_the_limit() {
        for (experts, rows, halves, row_bytes) in
            [(1, 2304, 1, 16384), (32, 8192, 2, 2304), (32, 4096, 1, 2304), (32, 8192, 2, 8192), (1, 256, 1, 32768)]
        {
            let matrix = Matrix { experts, rows, halves };
            for limit in [1, 1 << 20, 9 << 19, 1 << 40] {
                let cuts = matrix.cuts(row_bytes, limit);
                let mut seen = vec![0; experts * rows];
                let mut packed = 0;
                for cut in &cuts {
                    assert_eq!(matrix.packed_row(cut), packed, "cuts follow each other in the packed form");
                    let n = matrix.rows_of(cut) * cut.experts.len();
                    assert!(n % (UNIT * halves) == 0 && (n * row_bytes <= limit || n == UNIT * halves));
                    packed += n;
                    let sources = matrix.sources(cut);
                    assert_eq!(sources.iter().map(|r| r.len()).sum::<usize>(), n);
                    for (local, row) in sources.into_iter().flatten().enumerate() {
                        assert_eq!(matrix.source(cut, local), row);
                        seen[row] += 1;
                    }
                }
                assert!(seen.iter().all(|n| *n == 1));
                if halves == 2 {
                    // Gate and up of the same columns.
                    let [gate, up] = &matrix.sources(&cuts[0])[..] else { panic!("two halves") };
                    assert_eq!((gate.start + rows / 2, gate.len()), (up.start, up.len()));
                }
            }
            assert_eq!(matrix.sources(&matrix.whole()).into_iter().flatten().count(), experts * rows);
        }
    }
}
