"""Golden files from MuseSparkTextDecoderLayer of transformers 5.24.0: small dimensions, float32, experts
dequantised, all of them local.

    python3 generate_transformers.py          # torch, transformers==5.24.0, numpy, safetensors; writes ./transformers/

The layer sees a sequence from its first token on. What had to be matched:
* q and k rows are permuted from interleaved to half-split RoPE order, per head: old[32j + i] = new[2i + j].
* Its cache hook rounds keys and values to E4M3 with a scale (`Fp8Cache.update`), as the FP8 cache does.
* The BF16 attention input replaces the output of `input_layernorm` (by a forward hook), after a check that it
  is the BF16 rounding of it.
* The next layer's `input_layernorm` is one more MuseSparkTextCenteredRMSNorm.
* The router is FP32 there and FP64 here: 1e-6 of the logits.
Nothing else differs: the full model's residual gates, centred and input-scaled norms are the layer's own."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.muse_spark import modeling_muse_spark as M
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig

import generator as G

DIMS = dict(hidden=64, head_dim=16, q_heads=4, kv_heads=2, window=24, rope_theta=500000.0, expert_dim=32,
            n_experts=16, local_experts=16, top_k=4, unpool_slice=64, sliced_max_tokens=8)
# name, kind, experts, tokens, first position, k_scale, v_scale
CASES = [
    ("full-nvfp4", "full", "nvfp4", 40, 0, 1.0, 1.0),
    ("sliding-nvfp4", "sliding", "nvfp4", 40, 0, 0.5, 1.5),
    ("sliding-bf16", "sliding", "bf16", 33, 70000, 1.0, 1.0),
]


class Fp8Cache:
    def __init__(self, k_scale, v_scale):
        self.scales = k_scale, v_scale

    def update(self, k, v, layer_idx, **_):
        return tuple((x / s).to(torch.float8_e4m3fn).float() * s for x, s in zip((k, v), self.scales))


def upstream_config(kind):
    full = kind == "full"
    config = MuseSparkTextConfig(
        vocab_size=32, hidden_size=DIMS["hidden"], num_hidden_layers=1, num_attention_heads=DIMS["q_heads"],
        num_key_value_heads=DIMS["kv_heads"], head_dim=DIMS["head_dim"], sliding_window=DIMS["window"],
        layer_types=["full_attention" if full else "sliding_attention"],
        layer_rope_theta=[0 if full else DIMS["rope_theta"]], moe_intermediate_size=DIMS["expert_dim"],
        moe_hidden_size=DIMS["expert_dim"], num_local_experts=DIMS["n_experts"],
        num_experts_per_tok=DIMS["top_k"], pad_token_id=0, eos_token_id=1, bos_token_id=2)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def f32(x):
    return torch.from_numpy(np.ascontiguousarray(G.widen(x) if x.dtype == np.uint16 else x))


def half_split(rows):
    """Interleaved to half-split within each head: [heads * d, k]."""
    d = DIMS["head_dim"]
    x = rows.view(-1, d // 2, 2, rows.shape[-1])
    return x.transpose(1, 2).reshape(rows.shape)


def dequantize(w, name):
    codes, sf, gs = w[name], w[name + "_sf"], w[name + "_gs"]
    mags = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    levels = np.concatenate([mags, -mags])
    x = levels[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:2], -1, 16)
    x = x * G.e4m3_values().astype(np.float32)[sf][..., None]
    x = x.reshape(*codes.shape[:2], -1)
    if gs.ndim == 1:
        return torch.from_numpy(x * gs[:, None, None])
    half = x.shape[1] // 2
    return torch.from_numpy(np.concatenate([x[:, :half] * gs[:, :1, None], x[:, half:] * gs[:, 1:, None]], 1))


def load(layer, w, experts):
    d = DIMS
    q, kv = d["q_heads"] * d["head_dim"], d["kv_heads"] * d["head_dim"]
    wq, wk, wv, wg = f32(w["qkv_gate"]).split([q, kv, kv, q])
    matrices = [f32(w[k]) if experts == "bf16" else dequantize(w, k) for k in ("w13", "w2")]
    state = {
        "self_attn.q_proj.weight": half_split(wq), "self_attn.k_proj.weight": half_split(wk),
        "self_attn.v_proj.weight": wv, "self_attn.gate_proj.weight": wg, "self_attn.o_proj.weight": f32(w["o"]),
        "input_layernorm.weight": torch.zeros(d["hidden"]),
        "post_attention_residual_gate.gate": f32(w["attn_residual_gate"]),
        "pre_feedforward_layernorm.weight": f32(w["pre_ffn_norm"]),
        "mlp.gate.weight": f32(w["router"]), "mlp.gate.e_score_correction_bias": f32(w["router_bias"]),
        "mlp.pre_expert_proj.weight": f32(w["pooler"]), "mlp.pre_expert_norm.weight": f32(w["pre_expert_norm"]),
        "mlp.experts.gate_up_proj": matrices[0], "mlp.experts.down_proj": matrices[1],
        "mlp.experts.post_expert_norm.weight": f32(w["post_expert_norm"]),
        "mlp.post_expert_proj.weight": f32(w["unpooler"]),
        "post_feedforward_layernorm.weight": f32(w["post_ffn_norm"]),
        "post_feedforward_residual_gate.gate": f32(w["ffn_residual_gate"]),
    }
    layer.load_state_dict(state, strict=True)


def run(name, kind, experts, tokens, first, k_scale, v_scale):
    dims = dict(DIMS, experts=experts)
    seed = 2000 + G.fnv1a(name) % 1000
    spec = dict(q_lens=[tokens], ctx=0, kind=kind, spread="fixed", dist="normal", page_size=16, k_scale=k_scale,
                v_scale=v_scale, local_start=0)
    w, x = G.weights(dims, seed), G.step(dims, spec, seed)
    config = upstream_config(kind)
    layer = M.MuseSparkTextDecoderLayer(config, 0).float().eval()
    load(layer, w, experts)
    taps, given = {}, f32(x["attn_input"])[None]

    def replace(module, args, out):
        assert (out - given).abs().max() <= 2**-8 * given.abs().max()
        return given

    def keep(key, pick=lambda args, out: out):
        return lambda module, args, out: taps.__setitem__(key, pick(args, out))

    layer.input_layernorm.register_forward_hook(replace)
    layer.self_attn.o_norm.register_forward_hook(keep("attn_core", lambda args, out: args[0]))
    layer.self_attn.register_forward_hook(keep("attn_out", lambda args, out: out[0]))
    layer.pre_feedforward_layernorm.register_forward_hook(keep("stream_after_attn", lambda args, out: args[0]))
    layer.pre_feedforward_layernorm.register_forward_hook(keep("ffn_input"))
    layer.mlp.gate.register_forward_hook(keep("route"))
    layer.mlp.pre_expert_norm.register_forward_hook(keep("expert_input"))
    layer.mlp.experts.register_forward_hook(keep("moe_mix"))
    layer.mlp.register_forward_hook(keep("ffn_out"))

    stream = f32(x["stream"])[None]
    position_ids = torch.arange(first, first + tokens)[None]
    mask = create_causal_mask if kind == "full" else create_sliding_window_causal_mask
    mask = mask(config=config, inputs_embeds=stream, attention_mask=None, cache=None, position_ids=torch.arange(tokens)[None])
    rope = M.MuseSparkTextRotaryEmbedding(config)(stream, position_ids) if kind == "sliding" else None
    out = layer(stream, position_embeddings=rope, attention_mask=mask, position_ids=position_ids,
                cache=Fp8Cache(k_scale, v_scale))
    norm = M.MuseSparkTextCenteredRMSNorm(dims["hidden"], eps=config.rms_norm_eps)
    norm.load_state_dict({"weight": f32(w["next_pre_attn_norm"])})
    logits, scores, ids = taps.pop("route")
    # Upstream leaves the chosen experts unsorted: by descending biased score here.
    biased = (torch.sigmoid(logits) + f32(w["router_bias"])).gather(1, ids)
    order = biased.argsort(dim=-1, descending=True)
    result = {"stream": out[0], "hidden": norm(out)[0], "topk_ids": ids.gather(1, order).to(torch.int32),
              "topk_scores": scores.gather(1, order), "router_logits": logits / config.output_multiplier}
    result.update({k: v.reshape(tokens, -1) for k, v in taps.items()})
    result = {k: v.detach().contiguous().clone() for k, v in result.items()}
    meta = dict(seed=seed, config=dims, spec=spec, first=first, weights_digest=f"{G.digest_all(w):016x}",
                inputs_digest=f"{G.digest_all(x):016x}")
    here = Path(__file__).parent / "transformers"
    here.mkdir(exist_ok=True)
    path = here / f"{name}.safetensors"
    save_file(result, path, metadata={"case": json.dumps(meta)})
    path.chmod(0o644)
    print(f"{name:16} |stream| {out.norm():.4f} mask {None if mask is None else tuple(mask.shape)}")


def main():
    assert transformers.__version__ == "5.24.0", transformers.__version__
    torch.set_num_threads(1)
    with torch.no_grad():
        for c in CASES:
            run(*c)


if __name__ == "__main__":
    main()
