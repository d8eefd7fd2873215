//! The files of a checkpoint: shards by memory map, their headers, and the index that says which tensor
//! lies where. Headers are read and checked when the checkpoint is opened; data when a layer is taken.

use super::config::object;
use super::fault;
use crate::error::{Error, Result};
use crate::tensor::DType;
use crate::weights::SafetensorsFile;
use rayon::prelude::*;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Headers past this are no headers (the format's own limit).
const LONGEST_HEADER: u64 = 100_000_000;

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// As the file has it; [`dtype`] gives the crate's type.
    pub dtype: String,
    pub shape: Vec<usize>,
    /// Bytes in the file.
    pub range: Range<usize>,
    /// Index into [`Files::shards`].
    pub shard: usize,
}

/// Mapped shards and the tensors in them that an index (or the only file) names.
#[derive(Debug)]
pub(super) struct Files {
    pub shards: Vec<SafetensorsFile>,
    pub tensors: BTreeMap<String, Entry>,
    /// The index, or the only file: where a tensor that is missing should have been.
    pub listing: PathBuf,
}

/// The crate's type of a safetensors type name.
pub(super) fn dtype(name: &str) -> Option<DType> {
    Some(match name {
        "F32" => DType::F32,
        "BF16" => DType::Bf16,
        "F16" => DType::F16,
        "F8_E4M3" => DType::E4m3,
        "U8" => DType::U8,
        "I32" => DType::I32,
        "I64" => DType::I64,
        _ => return None,
    })
}

impl Files {
    /// Maps the shards of `dir` that hold a tensor `wanted` picks. Other shards (vision, audio) may be away.
    pub fn open(dir: &Path, wanted: impl Fn(&str) -> bool + Sync) -> Result<Files> {
        let index = dir.join(INDEX);
        if !index.exists() {
            let single = dir.join(SINGLE);
            if !single.exists() {
                return Err(fault(dir, "weights", format!("{INDEX} or {SINGLE}"), "neither"));
            }
            let (file, entries) = shard(single.clone(), 0)?;
            let tensors = entries.into_iter().filter(|(name, _)| wanted(name)).collect();
            return Ok(Files { shards: vec![file], tensors, listing: single });
        }
        let map = weight_map(&index, wanted)?;
        let names: Vec<&String> = map.values().collect::<BTreeSet<_>>().into_iter().collect();
        let opened: Vec<(SafetensorsFile, Vec<(String, Entry)>)> =
            names.par_iter().enumerate().map(|(i, name)| shard(dir.join(name.as_str()), i)).collect::<Result<_>>()?;
        let (mut shards, mut tensors) = (Vec::new(), BTreeMap::new());
        for (file, entries) in opened {
            let name = names[shards.len()];
            shards.push(file);
            // What the index puts elsewhere is not this file's to give.
            tensors.extend(entries.into_iter().filter(|(tensor, _)| map.get(tensor) == Some(name)));
        }
        if let Some((tensor, file)) = map.iter().find(|(tensor, _)| !tensors.contains_key(*tensor)) {
            let got = format!("no such tensor in {file}");
            return Err(fault(&index, tensor, format!("it to be in {file}"), got));
        }
        Ok(Files { shards, tensors, listing: index })
    }

    /// The path of the file that holds `entry`.
    pub fn path(&self, entry: &Entry) -> &Path {
        self.shards[entry.shard].path()
    }

    /// The bytes `range` of `entry`'s data.
    pub fn bytes(&self, entry: &Entry, range: Range<usize>) -> &[u8] {
        &self.shards[entry.shard].map()[entry.range.start + range.start..entry.range.start + range.end]
    }

    /// Tells the system that a part of `entry`'s data will be read soon.
    pub fn prefetch(&self, entry: &Entry, range: Range<usize>) {
        #[cfg(unix)]
        {
            let map = self.shards[entry.shard].map();
            // Advice only: where the system does not take it, the reads come later, one fault at a time.
            let _ = map.advise_range(memmap2::Advice::WillNeed, entry.range.start + range.start, range.len());
        }
        #[cfg(not(unix))]
        let _ = (entry, range);
    }
}

/// The index's tensors that are wanted, each with its file.
fn weight_map(path: &Path, wanted: impl Fn(&str) -> bool) -> Result<BTreeMap<String, String>> {
    let root = object(path, path)?;
    let Some(Value::Object(map)) = root.get("weight_map") else {
        let got = root.get("weight_map").map_or("none".into(), Value::to_string);
        return Err(fault(path, "weight_map", "an object of file names", got));
    };
    let mut out = BTreeMap::new();
    for (tensor, file) in map.iter().filter(|(tensor, _)| wanted(tensor)) {
        // A name, not a path: an index must not reach outside its folder.
        let name = file.as_str().filter(|f| {
            let mut parts = Path::new(f).components();
            matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        });
        let name = name.ok_or_else(|| fault(path, tensor, "the name of a file in the same folder", file))?;
        out.insert(tensor.clone(), name.to_string());
    }
    Ok(out)
}

/// A shard's tensors as its header lists them.
struct Header(Vec<(String, Listed)>);

#[derive(serde::Deserialize)]
struct Listed {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl<'de> serde::Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut all = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        all.push((name, map.next_value()?));
                    }
                }
                Ok(Header(all))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// Maps a shard and checks its header: every tensor inside the file, as many bytes as shape and type ask
/// for, no two overlapping, no name twice.
fn shard(path: PathBuf, number: usize) -> Result<(SafetensorsFile, Vec<(String, Entry)>)> {
    let file = SafetensorsFile::open(&path)?;
    let map: &[u8] = file.map();
    let format = |problem: String| Error::Format { path: path.clone(), problem };
    let Some(length) = map.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(format(format!("truncated: wanted a header, got {} bytes", map.len())));
    };
    if length > LONGEST_HEADER || length > (map.len() - 8) as u64 {
        let problem = format!("not a safetensors file, or truncated: a header of {length} bytes in {}", map.len());
        return Err(format(problem));
    }
    let data = 8 + length as usize;
    let Header(listed) =
        serde_json::from_slice(&map[8..data]).map_err(|e| format(format!("header is not JSON of tensors: {e}")))?;

    let mut entries = Vec::with_capacity(listed.len());
    for (name, Listed { dtype: kind, shape, data_offsets: [begin, end] }) in listed {
        if begin > end {
            return Err(fault(&path, &name, "data_offsets in order", format!("{begin} to {end}")));
        }
        if end > map.len() - data {
            let got = format!("a file with {} (truncated?)", map.len() - data);
            return Err(fault(&path, &name, format!("bytes {begin} to {end} of the data"), got));
        }
        if let Some(size) = dtype(&kind).map(DType::size) {
            let bytes = shape.iter().try_fold(size, |n, &extent| n.checked_mul(extent));
            if bytes != Some(end - begin) {
                let wanted =
                    format!("{} bytes for {kind} {shape:?}", bytes.map_or("too many".into(), |b| b.to_string()));
                return Err(fault(&path, &name, wanted, end - begin));
            }
        }
        entries.push((name, Entry { dtype: kind, shape, range: data + begin..data + end, shard: number }));
    }
    let mut names = BTreeSet::new();
    if let Some((name, _)) = entries.iter().find(|(name, _)| !names.insert(name.as_str())) {
        return Err(fault(&path, name, "one tensor of this name", "two"));
    }
    let mut order: Vec<&(String, Entry)> = entries.iter().filter(|(_, e)| !e.range.is_empty()).collect();
    order.sort_by_key(|(_, e)| e.range.start);
    if let Some(pair) = order.windows(2).find(|p| p[1].1.range.start < p[0].1.range.end) {
        let wanted = format!("bytes past {}'s, which end at {}", pair[0].0, pair[0].1.range.end - data);
        let got = format!("an overlap from {}", pair[1].1.range.start - data);
        return Err(fault(&path, &pair[1].0, wanted, got));
    }
    Ok((file, entries))
}
