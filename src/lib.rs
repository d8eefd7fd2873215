//! One Muse Spark Open decoder layer.
