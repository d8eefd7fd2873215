//! Which tensors of a checkpoint make which tensor of the layer, and the part of each that a rank takes.

use super::{fault, files, Checkpoint, Entry};
use crate::config::{LayerConfig, WeightKind};
use crate::error::{Error, Result};
use crate::tensor::{DType, HostTensor, NamedTensors};
use crate::weights::names::{BF16, CODES, F32, SCALES, VECTOR};
use crate::weights::pieces::Pieces;
use crate::weights::{nvfp4, safetensors};
use rayon::prelude::*;
use std::collections::btree_map::Entry as MapEntry;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

/// Tensors of a layer that the layer has no use for: scales of quantised activations (the experts'
/// activations stay BF16) and of a cache (the caller brings its own).
const UNUSED: [&str; 3] = ["input_scale", ".k_scale", ".v_scale"];

/// What a rank takes of a checkpoint's tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Take {
    /// Rows (or elements, or experts) of the outermost extent, as they are.
    Rows(Range<usize>),
    /// Rows, from half-split to interleaved order within heads of this many rows.
    Heads(Range<usize>, usize),
    /// Columns of a matrix.
    Columns(Range<usize>),
}

/// A tensor of the checkpoint that a layer needs, found and checked.
pub(super) struct Source<'a> {
    /// The crate's name for what it becomes, or becomes a part of.
    pub tensor: &'static str,
    name: String,
    entry: &'a Entry,
    dtype: DType,
    take: Take,
}

/// A part of a checkpoint's tensor that a rank takes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Part {
    /// The layer's tensor, by the crate's name.
    pub tensor: &'static str,
    /// The checkpoint's tensor.
    pub source: String,
    /// The file that holds it.
    pub file: PathBuf,
    /// Element type as the file has it.
    pub dtype: DType,
    /// In the file.
    pub shape: Vec<usize>,
    /// What the rank takes of it.
    pub taken: Vec<usize>,
    /// Bytes of what is taken.
    pub bytes: u64,
    /// Whether it is copied (permuted, fused, cut by columns) or read where it lies.
    pub copied: bool,
}

impl Source<'_> {
    fn taken(&self) -> Vec<usize> {
        let mut shape = self.entry.shape.clone();
        match &self.take {
            Take::Rows(r) | Take::Heads(r, _) => shape[0] = r.len(),
            Take::Columns(r) => shape[1] = r.len(),
        }
        shape
    }

    pub fn part(self, checkpoint: &Checkpoint) -> Part {
        let taken = self.taken();
        Part {
            tensor: self.tensor,
            bytes: (taken.iter().product::<usize>() * self.dtype.size()) as u64,
            copied: self.copied(),
            file: checkpoint.files.path(self.entry).into(),
            shape: self.entry.shape.clone(),
            dtype: self.dtype,
            source: self.name,
            taken,
        }
    }

    fn copied(&self) -> bool {
        matches!(self.tensor, "qkv_gate" | "o")
    }

    fn has_block_scales(&self) -> bool {
        matches!(self.tensor, "w13_sf" | "w2_sf")
    }

    /// Bytes of one row of the outermost extent.
    fn row_bytes(&self) -> usize {
        self.entry.shape[1..].iter().product::<usize>() * self.dtype.size()
    }

    /// The bytes of the data that hold what is taken.
    fn span(&self) -> Range<usize> {
        match &self.take {
            Take::Rows(r) | Take::Heads(r, _) => r.start * self.row_bytes()..r.end * self.row_bytes(),
            Take::Columns(_) => 0..self.entry.range.len(),
        }
    }
}

impl Checkpoint {
    /// Finds and checks everything of a layer that rank `rank` of `ranks` needs, in the order of
    /// [`crate::weights::names`].
    pub(super) fn sources(&self, c: &LayerConfig, layer: usize, rank: usize, ranks: usize) -> Result<Vec<Source<'_>>> {
        if rank >= ranks {
            return Err(fault(&self.dir, "rank", format!("below {ranks}, the number of ranks"), rank));
        }
        let part = |n: usize| rank * n..(rank + 1) * n;
        let (h, d, e, n) = (c.hidden, c.expert_dim, c.local_experts, c.n_experts);
        let (q, kv) = (c.q_size(), c.kv_size());
        let find =
            |tensor: &'static str, at: usize, suffix: &str, dtypes: &[DType], shapes: &[&[usize]], take: Take| {
                let (name, entry) = self.entry(at, suffix)?;
                self.check(name, entry, dtypes, shapes).map(|(name, dtype)| Source { tensor, name, entry, dtype, take })
            };
        let whole = |tensor, suffix: &str, dtypes: &[DType], shape: &[usize]| {
            find(tensor, layer, suffix, dtypes, &[shape], Take::Rows(0..shape[0]))
        };
        let experts = |tensor, suffix: &str, dtypes: &[DType], shapes: &[&[usize]]| {
            find(tensor, layer, suffix, dtypes, shapes, Take::Rows(part(e)))
        };
        let heads =
            |suffix: &str, n: usize, take: Take| find("qkv_gate", layer, suffix, BF16, &[&[n * ranks, h]], take);
        let mut all = vec![
            heads("self_attn.q_proj.weight", q, Take::Heads(part(q), c.head_dim))?,
            heads("self_attn.k_proj.weight", kv, Take::Heads(part(kv), c.head_dim))?,
            heads("self_attn.v_proj.weight", kv, Take::Rows(part(kv)))?,
            heads("self_attn.gate_proj.weight", q, Take::Rows(part(q)))?,
            find("o", layer, "self_attn.o_proj.weight", BF16, &[&[h, q * ranks]], Take::Columns(part(q)))?,
            whole("attn_residual_gate", "post_attention_residual_gate.gate", VECTOR, &[h])?,
            whole("pre_ffn_norm", "pre_feedforward_layernorm.weight", VECTOR, &[h])?,
            whole("router", "mlp.gate.weight", F32, &[n, h])?,
            whole("router_bias", "mlp.gate.e_score_correction_bias", F32, &[n])?,
            whole("pooler", "mlp.pre_expert_proj.weight", BF16, &[d, h])?,
            whole("pre_expert_norm", "mlp.pre_expert_norm.weight", VECTOR, &[d])?,
        ];
        let (w13, w2) = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj");
        match c.experts {
            WeightKind::Bf16 => {
                all.push(experts("w13", w13, BF16, &[&[n, 2 * d, d]])?);
                all.push(experts("w2", w2, BF16, &[&[n, d, d]])?);
            }
            WeightKind::Nvfp4 => {
                let (sf, gs) = (|w: &str| format!("{w}_weight_scale"), |w: &str| format!("{w}_weight_scale_2"));
                all.push(experts("w13", w13, CODES, &[&[n, 2 * d, d / 2]])?);
                all.push(experts("w13_sf", &sf(w13), SCALES, &[&[n, 2 * d, d / nvfp4::BLOCK]])?);
                // Gate and up apart; one for both is broadcast by the layer.
                all.push(experts("w13_gs", &gs(w13), F32, &[&[n, 2], &[n]])?);
                all.push(experts("w2", w2, CODES, &[&[n, d, d / 2]])?);
                all.push(experts("w2_sf", &sf(w2), SCALES, &[&[n, d, d / nvfp4::BLOCK]])?);
                all.push(experts("w2_gs", &gs(w2), F32, &[&[n]])?);
            }
        }
        all.push(whole("post_expert_norm", "mlp.experts.post_expert_norm.weight", VECTOR, &[d])?);
        all.push(whole("unpooler", "mlp.post_expert_proj.weight", BF16, &[h, d])?);
        all.push(whole("post_ffn_norm", "post_feedforward_layernorm.weight", VECTOR, &[h])?);
        all.push(whole("ffn_residual_gate", "post_feedforward_residual_gate.gate", VECTOR, &[h])?);
        let last = layer + 1 == self.model.layers.len();
        self.refuse_others(layer, &all)?;
        if !last {
            let norm = "input_layernorm.weight";
            all.push(find("next_pre_attn_norm", layer + 1, norm, VECTOR, &[&[h]], Take::Rows(0..h))?);
        }
        Ok(all)
    }

    /// The tensor's type, once type and shape are ones that are taken.
    fn check(&self, name: String, entry: &Entry, dtypes: &[DType], shapes: &[&[usize]]) -> Result<(String, DType)> {
        let path = self.files.path(entry);
        let dtype = files::dtype(&entry.dtype).filter(|d| dtypes.contains(d));
        let dtype = dtype.ok_or_else(|| fault(path, &name, dtypes[0], &entry.dtype))?;
        if !shapes.contains(&entry.shape.as_slice()) {
            let got = format!("{:?}", entry.shape);
            return Err(fault(path, &name, format!("shape {:?}", shapes[0]), got));
        }
        Ok((name, dtype))
    }

    /// A layer with more tensors than these computes something else: shared experts, biases, norms of q and k.
    fn refuse_others(&self, layer: usize, known: &[Source]) -> Result<()> {
        let (first, own) = (self.name(layer, ""), self.name(layer, "input_layernorm.weight"));
        let others = self.files.tensors.range(first.clone()..).take_while(|(name, _)| name.starts_with(&first));
        for (name, entry) in others {
            let unused = UNUSED.iter().any(|end| name.ends_with(end));
            if !unused && *name != own && !known.iter().any(|s| s.name == *name) {
                let got = if name.contains("shared_expert") {
                    "shared experts".to_string()
                } else {
                    format!("a tensor it does not have ({} {:?})", entry.dtype, entry.shape)
                };
                return Err(fault(self.files.path(entry), name, "only the tensors of a Muse Spark layer", got));
            }
        }
        Ok(())
    }

    /// Has all that a rank takes of the files read ahead: at the disk's rate, not fault by fault.
    pub(super) fn prefetch(&self, sources: &[Source]) {
        const PART: usize = 1 << 24;
        sources.par_iter().for_each(|s| {
            let span = s.span();
            span.clone().into_par_iter().step_by(PART).for_each(|at| {
                self.files.prefetch(s.entry, at..(at + PART).min(span.end));
            });
        });
    }

    /// The layer's tensors where they lie. Of their values only global scales are looked at.
    pub(super) fn pieces<'a>(&'a self, sources: &[Source<'a>]) -> Result<BTreeMap<&'static str, Pieces<'a>>> {
        let mut all: BTreeMap<&'static str, Pieces<'a>> = BTreeMap::new();
        for source in sources {
            if matches!(source.tensor, "w13_gs" | "w2_gs") {
                self.check_global_scales(source)?;
            }
            // Bytes may be called by either name in a file; the layer's name for scales is E4M3.
            let dtype = if source.has_block_scales() { DType::E4m3 } else { source.dtype };
            let pieces = Pieces::new(dtype, &source.taken(), self.runs(source));
            match all.entry(source.tensor) {
                MapEntry::Vacant(place) => _ = place.insert(pieces),
                // Parts of qkv_gate.
                MapEntry::Occupied(mut first) => first.get_mut().append(pieces),
            }
        }
        Ok(all)
    }

    /// The bytes of what is taken: in one run where they lie in one, else row by row.
    fn runs<'a>(&'a self, source: &Source<'a>) -> Vec<&'a [u8]> {
        let data = self.files.bytes(source.entry, source.span());
        let rows = || data.chunks_exact(source.row_bytes());
        match &source.take {
            Take::Rows(_) if source.tensor == "qkv_gate" => rows().collect(),
            Take::Rows(_) => vec![data],
            Take::Heads(_, head) => {
                let rows: Vec<&[u8]> = rows().collect();
                (0..rows.len()).map(|r| rows[r / head * head + half_split(r % head, *head)]).collect()
            }
            Take::Columns(columns) => {
                let size = source.dtype.size();
                rows().map(|row| &row[columns.start * size..columns.end * size]).collect()
            }
        }
    }

    /// The layer's tensors as host tensors: views where they lie in one run, which are aligned.
    pub(super) fn assemble<'a>(&'a self, sources: &[Source<'a>]) -> Result<NamedTensors<'a>> {
        self.prefetch(sources);
        let pieces = self.pieces(sources)?;
        self.check_block_scales(sources)?;
        let tensors = pieces.par_iter().map(|(name, t)| Ok((name.to_string(), t.view(name)?)));
        Ok(NamedTensors(tensors.collect::<Result<_>>()?))
    }

    /// A norm's or gate's weights.
    pub(super) fn vector(&self, layer: usize, suffix: &str, n: usize) -> Result<HostTensor<'_>> {
        let (name, entry) = self.entry(layer, suffix)?;
        let (name, dtype) = self.check(name, entry, VECTOR, &[&[n]])?;
        let data = self.files.bytes(entry, 0..entry.range.len());
        safetensors::tensor(&name, dtype, &[n], data)
    }

    /// Refuses block scales that are NaN.
    pub(super) fn check_block_scales(&self, sources: &[Source]) -> Result<()> {
        const CHUNK: usize = 1 << 22;
        sources.par_iter().filter(|s| s.has_block_scales()).try_for_each(|source| {
            let data = self.files.bytes(source.entry, source.span());
            let bad =
                data.par_chunks(CHUNK).enumerate().find_map_first(|(i, part)| match nvfp4::check_scales("", part) {
                    Err(Error::NanScale { index, .. }) => Some(i * CHUNK + index),
                    _ => None,
                });
            bad.map_or(Ok(()), |index| Err(self.nan_scale(source, index)))
        })
    }

    /// The error that block scale `index` of what is taken of `source` is NaN.
    pub(super) fn nan_scale(&self, source: &Source, index: usize) -> Error {
        let at = source.span().start + index;
        let (width, rows) = (source.entry.shape[2], source.entry.shape[1]);
        let place = [at / width / rows, at / width % rows, at % width];
        self.bad_value(source, "block scales that are not NaN", format!("NaN at {place:?}"))
    }

    fn check_global_scales(&self, source: &Source) -> Result<()> {
        let data = self.files.bytes(source.entry, source.span());
        let values = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        match values.enumerate().find(|(_, v)| !(v.is_finite() && *v >= 0.0)) {
            None => Ok(()),
            Some((i, v)) => {
                let at = source.span().start / 4 + i;
                Err(self.bad_value(source, "global scales that are finite, not negative", format!("{v} at {at}")))
            }
        }
    }

    fn bad_value(&self, source: &Source, wanted: &str, got: String) -> Error {
        fault(self.files.path(source.entry), &source.name, wanted, got)
    }
}

/// Where row `r` of a head in interleaved order stands in half-split order: `new[2 i + j] = old[head / 2 * j + i]`.
fn half_split(r: usize, head: usize) -> usize {
    head / 2 * (r % 2) + r / 2
}

#[cfg(test)]
mod tests {
    use super::half_split;

    #[test]
    fn interleaved_rows_come_from_both_halves() {
        let order: Vec<usize> = (0..8).map(|r| half_split(r, 8)).collect();
        assert_eq!(order, [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!((half_split(2 * 31, 64), half_split(2 * 31 + 1, 64)), (31, 63));
    }
}
