"""One Muse Spark Open decoder layer on a Hopper GPU, through the C ABI of the crate muse-spark-layer.

    layer = muse_spark_layer.Layer(weights)            # torch tensors, named as the reference's
    hidden, stream, topk_ids = layer(data)             # one step on torch's current stream

torch is used for pointers, the current stream and to allocate outputs: nothing else. A call may be
captured in a CUDA graph. The shared library is looked for at MUSE_SPARK_LAYER_LIB, beside this package,
and under target/ of a checkout.
"""

from ._native import MuseSparkError, abi_version, library_path, version

__all__ = ["Layer", "MuseSparkError", "TAPS", "abi_version", "library_path", "version"]


def __getattr__(name):
    """Layer and TAPS, which need torch: not imported before they are asked for."""
    if name in ("Layer", "TAPS"):
        from . import layer
        return getattr(layer, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
