//! Views of the paged FP8 key/value cache.
#![allow(unsafe_code)]

use crate::config::check_page_size;
use crate::error::{Error, Result};
use crate::tensor::{DType, DeviceTensor};

/// The most rows (pages x page size) a pool may have: 2^40 bytes each of K and V.
pub const MAX_CACHE_ROWS: u64 = 1 << 33;

/// A pool of pages in device memory: K and V apart, E4M3 `[pages, page_size, kv_heads, head_dim]`.
/// A view: it keeps nothing alive. A step writes its own tokens' rows and no others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedKvCache {
    k: DeviceTensor,
    v: DeviceTensor,
}

impl PagedKvCache {
    /// Checks two tensors `[pages, page_size, kv_heads, head_dim]` of E4M3 (or bytes) and pairs them.
    pub fn new(k: DeviceTensor, v: DeviceTensor) -> Result<PagedKvCache> {
        let shape = k.shape().to_vec();
        if shape.len() != 4 {
            return Err(Error::Value {
                what: "k_cache".into(),
                wanted: "shape [pages, page_size, kv_heads, head_dim]".into(),
                got: format!("{shape:?}"),
            });
        }
        check_page_size(shape[1])?;
        for (name, t) in [("k_cache", &k), ("v_cache", &v)] {
            if !matches!(t.dtype(), DType::E4m3 | DType::U8) {
                return Err(Error::DType { tensor: name.into(), wanted: DType::E4m3, got: t.dtype() });
            }
            t.expect_contiguous(name, t.dtype(), &shape, 16)?;
        }
        let rows = (shape[0] as u64).saturating_mul(shape[1] as u64);
        if rows > MAX_CACHE_ROWS {
            return Err(Error::Limit {
                what: "cache rows (pages * page_size)".into(),
                limit: MAX_CACHE_ROWS,
                got: rows,
            });
        }
        if !k.is_empty() && k.overlaps(&v) {
            return Err(Error::Alias { tensor: "k_cache".into(), other: "v_cache".into() });
        }
        Ok(PagedKvCache { k, v })
    }

    /// A pool of the released heads (2 x 64) from raw addresses.
    ///
    /// Errors as [`PagedKvCache::new`].
    ///
    /// # Safety
    /// As [`DeviceTensor::contiguous`], for `pages * page_size * 128` bytes each.
    pub unsafe fn from_raw(k: u64, v: u64, pages: usize, page_size: usize) -> Result<PagedKvCache> {
        let shape = [pages, page_size, 2, 64];
        // SAFETY: the caller's promise.
        let view = |ptr| unsafe { DeviceTensor::contiguous(ptr, DType::E4m3, &shape) };
        PagedKvCache::new(view(k), view(v))
    }

    /// Keys.
    pub fn k(&self) -> &DeviceTensor {
        &self.k
    }

    /// Values.
    pub fn v(&self) -> &DeviceTensor {
        &self.v
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.k.shape()[0]
    }

    /// Tokens a page holds.
    pub fn page_size(&self) -> usize {
        self.k.shape()[1]
    }
}
