//! One Muse Spark Open decoder layer.

pub mod config;
pub mod error;
pub mod numerics;
pub mod tensor;

pub use config::{LayerConfig, LayerKind, QueryPrecision, Taps, WeightKind};
pub use error::{Error, Result};
