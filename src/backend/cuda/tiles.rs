//! Tiles and K splits of the dense projections above 128 tokens: the cheapest by a model of the kernels' clocks.
//!
//! Two kernels: the wide one (`csrc/gemm/wide.cuh`, weights on M) has token tiles of many widths, so that no token count
//! pays for a whole wave of tiles of which it uses a part; the tiled one (`csrc/gemm/tiled.cuh`, tokens on M) has tiles
//! of 128 or 256 tokens and is the quicker of the two where these fit.

/// The wide kernel's instances: weight rows, tokens.
pub const WIDE: [(u32, u32); 12] = [
    (128, 96),
    (128, 104),
    (128, 128),
    (128, 152),
    (128, 176),
    (128, 192),
    (128, 208),
    (128, 232),
    (256, 136),
    (256, 144),
    (256, 160),
    (256, 184),
];
/// The tiled kernel's, which the launcher chooses among (`csrc/gemm/heuristics.h`), by the same arithmetic.
const TILED: [(u32, u32); 6] = [(64, 128), (128, 128), (144, 128), (144, 256), (192, 128), (256, 128)];

/// A choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Weight rows of a tile of the wide kernel; 0: the tiled kernel.
    pub rows: u32,
    /// Tokens of a tile of the wide kernel; 0: the tiled kernel.
    pub tokens: u32,
    /// K splits.
    pub splits: u32,
}

/// A projection.
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    /// Weight rows.
    pub rows: u32,
    /// k tiles of 64 in a row.
    pub steps: u32,
    /// FP32 output, which a consumer reads again; else BF16.
    pub out_f32: bool,
}

/// Clocks of one k tile: at the tensor cores' rate (2048 products a clock), or shared memory's (128 bytes a clock:
/// operands read, stages written), or L2's (48 bytes a clock and SM). `m` stands on M, 64 an instruction, `n` on N.
fn step_clocks(m: f64, n: f64) -> f64 {
    let stage = (m + n) * 128.0;
    let tensor = m * n / 32.0;
    let shared = (m / 64.0 * 4.0 * (2048.0 + 32.0 * n) + stage) / 123.0;
    tensor.max(shared).max(stage / 48.0)
}

/// Clocks of a launch: waves of the SMs' mainloops and outputs (L2 takes 16 to 20 bytes a clock and SM; part of an output
/// overlaps the next tile's loads), and the consumer's reading. Within 7% of launches of one kind measured on an H200.
fn clocks(p: &Projection, tokens: u32, tile: (u32, u32), wide: bool, splits: u32, sm_count: u32) -> f64 {
    let items = p.rows / tile.0 * tokens.div_ceil(tile.1) * splits;
    let waves = items.div_ceil(sm_count) as f64;
    let (rows, width) = (tile.0 as f64, tile.1 as f64);
    // Two of these share their weights (a cluster) where token tiles are two or four.
    let pairs = tile == (128, 128) && matches!(tokens.div_ceil(128), 2 | 4);
    let step = match tile {
        // Over many waves the wide kernel loses more (the pooler at 8192 tokens: 794 us, tiled 753).
        _ if wide => (if tokens > 4096 { 1.1 } else { 1.04 }) * step_clocks(rows, width),
        _ if pairs => 0.965 * step_clocks(width, rows),
        (144, 128) => 1.2 * step_clocks(width, rows),
        (192, 128) => 1.1 * step_clocks(width, rows),
        _ => step_clocks(width, rows),
    };
    let output = rows * width * if p.out_f32 { 4.0 / 16.0 } else { 2.0 / 20.0 };
    let read = if p.out_f32 { (splits * tokens * p.rows) as f64 * 4.0 / (20.0 * sm_count as f64) } else { 0.0 };
    waves * p.steps.div_ceil(splits) as f64 * step + output * (0.4 + 0.6 * waves) + read
}

/// The most K splits of an FP32 output: its partials are written and read again.
const MAX_SPLITS: u32 = 8;

/// The cheapest instance and splits.
pub fn choose(p: &Projection, tokens: u32, sm_count: u32) -> Tile {
    let instances = WIDE.iter().map(|tile| (tile, true)).chain(TILED.iter().map(|tile| (tile, false)));
    let mut best = (f64::INFINITY, Tile { rows: 0, tokens: 0, splits: 1 });
    for (&tile, wide) in instances {
        // Rows that are no multiple of 64 have FP32 output only.
        if !p.rows.is_multiple_of(tile.0) || (!tile.0.is_multiple_of(64) && !p.out_f32) {
            continue;
        }
        for splits in 1..=if p.out_f32 { MAX_SPLITS } else { 1 } {
            // Of about the same cost, the fewer splits: they start fewer cold mainloops.
            let more = 0.03 * (splits - 1) as f64;
            let cost = clocks(p, tokens, tile, wide, splits, sm_count) * (1.0 + more);
            if cost < best.0 {
                let (rows, tokens) = if wide { tile } else { (0, 0) };
                best = (cost, Tile { rows, tokens, splits });
            }
        }
    }
    best.1
}
