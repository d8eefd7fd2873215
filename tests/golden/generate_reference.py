"""Golden files from the specification (reference/layer.py), its dimension constants shrunk, on the CPU.

    python3 generate_reference.py FOLDER_WITH_LAYER_PY     # torch, numpy, safetensors; writes ./reference/

Weights and inputs come from generator.py; the files hold the outputs, the taps that layer.py's own
functions pass along, the case (as JSON) and digests of what went in."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import generator as G

CONFIG = dict(hidden=64, head_dim=16, q_heads=4, kv_heads=2, window=24, rope_theta=500000.0, expert_dim=32,
              n_experts=32, local_experts=8, top_k=4, unpool_slice=8, sliced_max_tokens=8, experts="nvfp4")
QUERY = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


def case(name, batch, q_len, ctx, kind, query="fp32", spread="fixed", dist="normal", page_size=1, k_scale=1.0,
         v_scale=1.0, local_start=None, stress=False, merged=False, taps=True):
    """local_start: None for the range with the most routes. merged: one w13 global scale for gate and up
    (the gate's)."""
    spec = dict(q_lens=[q_len] * batch, ctx=ctx, kind=kind, spread=spread, dist=dist, page_size=page_size,
                k_scale=k_scale, v_scale=v_scale, local_start=local_start)
    return dict(name=name, spec=spec, query=query, stress=stress, merged=merged, taps=taps)


CASES = [
    case("decode-full", 3, 1, 40, "full", spread="mixed"),
    case("decode-sliding", 3, 1, 40, "sliding", spread="mixed", page_size=4),
    case("decode-bf16", 2, 1, 30, "sliding", "bf16", page_size=16, spread="agentic"),
    case("decode-fp16", 2, 1, 30, "full", "fp16", dist="soft"),
    case("decode-e4m3", 2, 1, 30, "sliding", "e4m3", dist="soft"),
    case("decode-empty", 1, 1, 0, "sliding"),
    case("decode-window-edge-1", 1, 1, 23, "sliding"),
    case("decode-window-edge", 1, 1, 24, "sliding", local_start=28),  # 28..31, then 0..3
    case("decode-far", 1, 2, 100000, "sliding", page_size=256, taps=False),
    case("decode-9", 9, 1, 20, "full", "bf16", spread="mixed", merged=True),
    case("verify-8", 1, 8, 50, "full", dist="outliers", page_size=16),
    case("verify-scales", 2, 8, 21, "sliding", page_size=4, k_scale=0.37, v_scale=2.9),
    case("verify-stress", 2, 4, 30, "full", stress=True, v_scale=2.0**-8, k_scale=1.0),
    case("prefill-40", 1, 40, 33, "sliding", "bf16", page_size=64, local_start=28, taps=False),
    case("prefill-260", 1, 260, 10, "full", page_size=16, taps=False),
]


def shrink(L):
    L.HIDDEN, L.HEAD_DIM, L.HQ, L.HKV = CONFIG["hidden"], CONFIG["head_dim"], CONFIG["q_heads"], CONFIG["kv_heads"]
    L.Q_SIZE, L.KV_SIZE = L.HQ * L.HEAD_DIM, L.HKV * L.HEAD_DIM
    L.QKV_SIZE = 2 * L.Q_SIZE + 2 * L.KV_SIZE
    L.SLIDING_WINDOW, L.SM_SCALE = CONFIG["window"], L.HEAD_DIM**-0.5
    L.D_EXPERT, L.N_EXPERTS, L.TOP_K = CONFIG["expert_dim"], CONFIG["n_experts"], CONFIG["top_k"]
    L.LOCAL_EXPERTS, L.UNPOOL_SLICE = CONFIG["local_experts"], CONFIG["unpool_slice"]


def stressed(w):
    """src/synthetic.rs `stress`."""
    w = dict(w)
    q, kv = CONFIG["q_heads"] * CONFIG["head_dim"], CONFIG["kv_heads"] * CONFIG["head_dim"]
    for k in ("attn_residual_gate", "ffn_residual_gate"):
        w[k] = G.bf16(G.widen(w[k]) * np.float32(8))
    for k in ("pre_ffn_norm", "pre_expert_norm", "post_expert_norm", "post_ffn_norm", "next_pre_attn_norm"):
        w[k] = G.bf16(G.widen(w[k]) * np.float32(5))
    w["qkv_gate"] = w["qkv_gate"].copy()
    w["qkv_gate"][:q + 2 * kv] = G.bf16(G.widen(w["qkv_gate"][:q + 2 * kv]) * np.float32(2.0**-8))
    for k in ("o", "unpooler", "pooler"):
        w[k] = G.bf16(G.widen(w[k]) * np.float32(2.0**-9))
    values = np.concatenate([G.e4m3_values(), [np.nan]]).astype(np.float32)
    for k in ("w13", "w2"):
        w[k + "_sf"], w[k + "_gs"] = w[k + "_sf"].copy(), w[k + "_gs"].copy()
        w[k + "_sf"][::2] = G.e4m3(values[w[k + "_sf"][::2]] * np.float32(2.0**-14))
        w[k + "_gs"][::2] *= np.float32(2.0**14)
    w["w2_gs"] *= np.float32(2.0**-9)
    return w


def tensor(name, x):
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    t = torch.from_numpy(np.ascontiguousarray(x))
    return t.view(torch.float8_e4m3fn) if name.endswith("_sf") or name.endswith("_cache") else t


def reference_weights(w, merged):
    out = {k: tensor(k, v) for k, v in w.items()}
    gs = out["w13_gs"]
    if merged:
        out["w13_gs"] = gs[:, 0]
    else:  # one factor per row, broadcast against [rows, blocks, 16] by layer.py's dequantize
        rows = torch.repeat_interleave(gs, CONFIG["expert_dim"], dim=1)
        out["w13_gs"] = rows[:, :, None, None]
    return out


def reference_data(L, x, spec):
    data = {k: tensor(k, v) for k, v in x.items()}
    batch, q_len = len(spec["q_lens"]), spec["q_lens"][0]
    sliding = spec["kind"] == "sliding"
    data.update(
        seq_lens=data["cache_seqlens"] - q_len,
        k_scale=torch.tensor(spec["k_scale"], dtype=torch.float32),
        v_scale=torch.tensor(spec["v_scale"], dtype=torch.float32),
        local_start=torch.tensor([spec["local_start"] or 0], dtype=torch.int32),
        config=dict(batch=batch, q_len=q_len, tokens=batch * q_len, page_size=spec["page_size"],
                    window=L.SLIDING_WINDOW if sliding else 0, rope_theta=L.ROPE_THETA if sliding else 0.0,
                    qk_scale_factor=L.QK_SCALE_FACTOR, sm_scale=L.SM_SCALE))
    return data


def run(L, c):
    spec, seed = c["spec"], 1000 + G.fnv1a(c["name"]) % 1000
    w = G.weights(CONFIG, seed)
    if c["stress"]:
        w = stressed(w)
    x = G.step(CONFIG, spec, seed)
    data, weights = reference_data(L, x, spec), reference_weights(w, c["merged"])

    norms, experts = [], []
    rms, mixture = L._rms, L._experts

    def seen_rms(v, *a):
        norms.append(v)
        return rms(v, *a)

    def seen_experts(p, ids, scores, ws):
        mix = mixture(p, ids, scores, ws)
        experts.append((p, scores, mix))
        return mix

    L._rms, L._experts = seen_rms, seen_experts
    try:
        front = L.ref_front(data, weights, QUERY[c["query"]])
        ids = front["biased"].topk(L.TOP_K, dim=-1).indices.to(torch.int32)
        if spec["local_start"] is None:
            pairs = torch.bincount((ids // L.LOCAL_EXPERTS).flatten(), minlength=L.N_EXPERTS // L.LOCAL_EXPERTS)
            spec["local_start"] = front["local_start"] = L.LOCAL_EXPERTS * int(pairs.argmax())
        hidden, stream = L.ref_back(front, weights, ids)
    finally:
        L._rms, L._experts = rms, mixture
    core, attn_out = norms[2], norms[3]  # after q's and k's
    (expert_input, scores, mix), tokens = experts[0], len(ids)
    out = {"hidden": hidden, "stream": stream, "topk_ids": ids, "topk_scores": scores,
           "k_new": front["k_new"].view(torch.uint8).reshape(tokens, -1),
           "v_new": front["v_new"].view(torch.uint8).reshape(tokens, -1)}
    if c["taps"]:
        out.update(attn_core=core.reshape(tokens, -1), attn_out=attn_out, stream_after_attn=front["stream1"],
                   ffn_input=front["h"], expert_input=expert_input, moe_mix=mix,
                   router_logits=(front["h"].double() @ weights["router"].double().T).float())
    out = {k: v.detach().contiguous().clone() for k, v in out.items()}
    meta = dict(seed=seed, config=CONFIG, **{k: c[k] for k in ("spec", "query", "stress", "merged")},
                weights_digest=f"{G.digest_all(w):016x}", inputs_digest=f"{G.digest_all(x):016x}")
    here = Path(__file__).parent / "reference"
    here.mkdir(exist_ok=True)
    path = here / f"{c['name']}.safetensors"
    save_file(out, path, metadata={"case": json.dumps(meta)})
    path.chmod(0o644)
    local = int((((ids.long() - spec["local_start"]) % L.N_EXPERTS) < L.LOCAL_EXPERTS).sum())
    print(f"{c['name']:24} tokens {tokens:4} local routes {local:4} |stream| {stream.norm():.4f}")


def main():
    sys.path.insert(0, sys.argv[1])
    import layer as L

    torch.set_num_threads(1)
    shrink(L)
    with torch.no_grad():
        for c in CASES:
            run(L, c)


if __name__ == "__main__":
    main()
