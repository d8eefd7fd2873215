//! One Muse Spark Open decoder layer.

pub mod backend;
pub mod config;
pub mod error;
pub mod numerics;
pub mod routing;
pub mod tensor;
pub mod weights;

pub use config::{LayerConfig, LayerKind, QueryPrecision, Taps, WeightKind};
pub use error::{Error, Result};
