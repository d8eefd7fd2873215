"""The C ABI of csrc/include/muse_spark_layer.h by ctypes: structs, prototypes, statuses as exceptions."""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

ABI_VERSION = 1
F32, BF16, F16, E4M3, U8, I32, I64 = range(7)
CPU = -1
RELEASED, SMALL = range(2)


class MuseSparkError(RuntimeError):
    """A failed call: its status (MSL_* of the header) and what it had to say."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Tensor(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p), ("dtype", c_int32), ("rank", c_int32), ("shape", c_int64 * 4)]


class _Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class LayerOptions(_Sized):
    _fields_ = [("struct_size", c_uint32), ("device", c_int32), ("experts", c_int32), ("dimensions", c_int32)]


class PlanOptions(_Sized):
    _fields_ = [("struct_size", c_uint32)] + [(n, c_uint32) for n in (
        "tokens", "requests", "max_q_len", "table_width", "page_size")] + [
        ("kind", c_int32), ("engine", c_int32), ("query", c_int32), ("rank", c_uint32), ("taps", c_int32),
        ("plain_launch", c_int32), ("route_bound", c_uint32), ("skip_slot_zero", c_int32), ("synchronize", c_int32),
        ("short_requests", c_uint32), ("short_tokens", c_uint32), ("short_max_q_len", c_uint32)]


class Tap(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p)]


class Step(_Sized):
    _fields_ = [("struct_size", c_uint32), ("tap_count", c_uint32)] + [(n, c_void_p) for n in (
        "attn_input", "positions", "cache_loc", "cu_seqlens_q", "cache_seqlens", "page_table")] + [
        ("table_stride", c_int64)] + [(n, c_void_p) for n in ("k_scale", "v_scale", "k_cache", "v_cache")] + [
        ("pages", c_int64)] + [(n, c_void_p) for n in (
            "stream", "local_start", "num_tokens_non_padded", "topk_ids", "hidden", "stream_out", "attn_out",
            "stream_after_attn", "moe_mix")] + [("taps", POINTER(Tap)), ("scheduler_metadata", c_void_p)]


def library_path():
    """The shared library: MUSE_SPARK_LAYER_LIB, else beside this package, else the newest under target/."""
    given = os.environ.get("MUSE_SPARK_LAYER_LIB")
    if given:
        return Path(given)
    name = "libmuse_spark_layer.so"
    here = Path(__file__).resolve().parent
    beside = here / name
    if beside.exists():
        return beside
    built = [p for p in here.parent.parent.glob(f"target/*/{name}") if p.exists()]
    if built:
        return max(built, key=lambda p: p.stat().st_mtime)
    raise FileNotFoundError(f"no {name}: set MUSE_SPARK_LAYER_LIB, or build it with `cargo build --release --features cuda`"
                            f" (looked beside {here} and in {here.parent.parent / 'target'})")


_library = None


def library():
    """The loaded library, its prototypes declared."""
    global _library
    if _library is not None:
        return _library
    path = library_path()
    lib = ctypes.CDLL(str(path))
    lib.msl_abi_version.restype = c_uint32
    found = lib.msl_abi_version()
    if found != ABI_VERSION:
        raise MuseSparkError(3, f"{path} has ABI version {found}; this package needs {ABI_VERSION}")
    handle, out = c_void_p, POINTER(c_void_p)
    for name, result, arguments in (
            ("msl_version", c_char_p, []),
            ("msl_last_error", c_char_p, []),
            ("msl_layer_create", c_int32, [POINTER(LayerOptions), POINTER(Tensor), c_size_t, out]),
            ("msl_layer_destroy", None, [handle]),
            ("msl_layer_weight_bytes", c_uint64, [handle]),
            ("msl_plan_create", c_int32, [handle, POINTER(PlanOptions), out]),
            ("msl_plan_destroy", None, [handle]),
            ("msl_plan_workspace_bytes", c_uint64, [handle]),
            ("msl_plan_text", c_char_p, [handle]),
            ("msl_plan_metadata_words", c_uint64, [handle]),
            ("msl_scheduler_metadata_prepare", c_int32, [handle, c_void_p, c_void_p, c_void_p, c_void_p, out]),
            ("msl_scheduler_metadata_destroy", None, [handle]),
            ("msl_workspace_create", c_int32, [handle, c_uint64, out]),
            ("msl_workspace_wrap", c_int32, [handle, c_void_p, c_uint64, out]),
            ("msl_workspace_destroy", None, [handle]),
            ("msl_workspace_bytes", c_uint64, [handle]),
            *[(f"msl_{call}", c_int32, [handle, handle, handle, POINTER(Step), c_void_p])
              for call in ("forward", "attention_block", "moe_block", "final_block")],
            ("msl_unpool_block", c_int32, [handle, handle, handle, POINTER(Step), c_void_p, c_void_p]),
            ("msl_ffn_block", c_int32, [handle, handle, handle, POINTER(Step), c_void_p, c_uint32, c_void_p])):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    _library = lib
    return lib


def abi_version():
    return library().msl_abi_version()


def version():
    return library().msl_version().decode()


def check(status):
    """Raises what a failed call had to say."""
    if status:
        raise MuseSparkError(status, library().msl_last_error().decode())


class Handle:
    """An object of the library, destroyed with this."""

    def __init__(self, kind, create, *arguments):
        self._destroy = getattr(library(), f"msl_{kind}_destroy")
        self.value = c_void_p()
        check(create(*arguments, byref(self.value)))

    def __del__(self):
        value, self.value = getattr(self, "value", None), None
        if value:
            self._destroy(value)
