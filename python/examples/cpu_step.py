"""One step on the CPU, at small dimensions: the C ABI with nothing but Python's standard library.

    cargo build && PYTHONPATH=python python3 python/examples/cpu_step.py
"""

import ctypes
import random
import struct
from array import array

from muse_spark_layer import MuseSparkError, _native as native, version

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, EXPERT_DIM, EXPERTS, LOCAL, TOP_K = 64, 4, 2, 16, 32, 32, 8, 4


def bf16(values):
    """The upper halves of FP32 words (cut, not rounded: these values are made up anyway)."""
    return array("H", (struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values))


def pointer(memory):
    return memory.buffer_info()[0]


def make_weights(rng):
    """name -> (memory, type, shape)."""
    normal = lambda std, *shape: (bf16(rng.gauss(0, std) for _ in range(product(shape))), native.BF16, shape)  # noqa: E731
    single = lambda std, *shape: (array("f", (rng.gauss(0, std) for _ in range(product(shape)))), native.F32, shape)  # noqa: E731
    codes = lambda *shape: (array("B", rng.randbytes(product(shape))), native.U8, shape)  # noqa: E731
    scales = lambda *shape: (array("B", (0x30 + rng.randrange(16) for _ in range(product(shape)))), native.E4M3, shape)  # noqa: E731
    rows = 2 * Q_HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM
    weights = {"qkv_gate": normal(0.1, rows, HIDDEN), "o": normal(0.1, HIDDEN, Q_HEADS * HEAD_DIM),
               "router": single(0.3, EXPERTS, HIDDEN), "router_bias": single(0.05, EXPERTS),
               "pooler": normal(0.1, EXPERT_DIM, HIDDEN), "unpooler": normal(0.1, HIDDEN, EXPERT_DIM),
               "pre_expert_norm": normal(0.1, EXPERT_DIM), "post_expert_norm": normal(0.1, EXPERT_DIM),
               "w13": codes(LOCAL, 2 * EXPERT_DIM, EXPERT_DIM // 2),
               "w13_sf": scales(LOCAL, 2 * EXPERT_DIM, EXPERT_DIM // 16), "w13_gs": single(0.02, LOCAL, 2),
               "w2": codes(LOCAL, EXPERT_DIM, EXPERT_DIM // 2), "w2_sf": scales(LOCAL, EXPERT_DIM, EXPERT_DIM // 16),
               "w2_gs": single(0.02, LOCAL)}
    for name in ("attn_residual_gate", "pre_ffn_norm", "post_ffn_norm", "ffn_residual_gate", "next_pre_attn_norm"):
        weights[name] = normal(0.1, HIDDEN)
    return weights


def product(shape):
    n = 1
    for extent in shape:
        n *= extent
    return n


def main():
    rng = random.Random(1)
    weights = make_weights(rng)
    lib = native.library()
    given = (native.Tensor * len(weights))()
    for slot, (name, (memory, dtype, shape)) in zip(given, weights.items()):
        slot.name, slot.data, slot.dtype, slot.rank = name.encode(), pointer(memory), dtype, len(shape)
        slot.shape[:len(shape)] = shape
    options = native.LayerOptions(device=native.CPU, dimensions=native.SMALL)
    layer = native.Handle("layer", lib.msl_layer_create, ctypes.byref(options), given, len(given))

    # Two requests that decode, one new token each after 4 and 0 tokens; a row of padding behind them.
    tokens, requests, width, slots = 3, 3, 8, 16
    plan_options = native.PlanOptions(tokens=tokens, requests=requests, max_q_len=1, table_width=width, page_size=1,
                                      skip_slot_zero=1)
    plan = native.Handle("plan", lib.msl_plan_create, layer.value, ctypes.byref(plan_options))
    workspace = native.Handle("workspace", lib.msl_workspace_create, layer.value, 0)
    stream = array("f", (rng.gauss(0, 1) for _ in range(tokens * HIDDEN)))
    memory = dict(
        stream=stream, attn_input=bf16(stream), positions=array("q", [4, 0, 0]), cache_loc=array("q", [5, 9, 0]),
        cu_seqlens_q=array("i", [0, 1, 2, 3]), cache_seqlens=array("i", [5, 1, 1]),
        page_table=array("i", [1, 2, 3, 4, 5, -1, -1, -1] + [9] + 7 * [-1] + 8 * [0]),
        k_scale=array("f", [1.0]), v_scale=array("f", [1.0]), local_start=array("i", [8]),
        num_tokens_non_padded=array("i", [2]), k_cache=array("B", rng.randbytes(slots * KV_HEADS * HEAD_DIM)),
        v_cache=array("B", bytes(slots * KV_HEADS * HEAD_DIM)), hidden=array("H", bytes(2 * tokens * HIDDEN)),
        stream_out=array("f", bytes(4 * tokens * HIDDEN)), topk_ids=array("i", bytes(4 * tokens * TOP_K)))
    memory["k_cache"] = array("B", (b & 0x77 for b in memory["k_cache"]))  # no NaN
    fields = {name: pointer(m) for name, m in memory.items()}
    step = native.Step(table_stride=width, pages=slots, **fields)
    call = lambda step: native.check(lib.msl_forward(layer.value, plan.value, workspace.value, ctypes.byref(step), None))  # noqa: E731
    call(step)

    print(f"muse-spark-layer {version()}: {lib.msl_plan_text(plan.value).decode().splitlines()[0]}")
    for token in range(2):
        ids = memory["topk_ids"][token * TOP_K:(token + 1) * TOP_K].tolist()
        row = memory["stream_out"][token * HIDDEN:(token + 1) * HIDDEN]
        print(f"token {token} goes to experts {ids}, its stream begins {row[0]:.4f} {row[1]:.4f} {row[2]:.4f}")
    stored = [slot for slot in range(slots) if any(memory["v_cache"][slot * 32:(slot + 1) * 32])]
    print(f"values were stored in slots {stored}")
    assert stored == [5, 9]

    # Errors are exceptions with the library's own words.
    try:
        call(native.Step(table_stride=width, pages=slots, **{**fields, "stream": None}))
    except MuseSparkError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
