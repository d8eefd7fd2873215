"""Golden file of a whole small checkpoint in the public format: MuseSparkTextDecoderLayer of transformers 5.24.0 on
what the official safetensors reader finds in the files, float32, all ranks at once.

    muse-spark-layer synth --out FOLDER
    python3 generate_checkpoint.py FOLDER     # torch, transformers==5.24.0, numpy, safetensors; writes ./checkpoint/

The configuration is MuseSparkTextConfig of the checkpoint's own `text_config`, and tensors go into the layers under
their own names: nothing is permuted, fused or sliced here. NVFP4 experts are dequantised, gate and up rows each with
their global scale. As in generate_transformers.py, keys and values are rounded to E4M3, and each layer's attention
input is the BF16 rounding of its `input_layernorm`. Layers run one after another on one stream."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.muse_spark import modeling_muse_spark as M
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig

import generator as G
from generate_transformers import Fp8Cache

TOKENS, SEED, K_SCALE, V_SCALE = 28, 77, 0.5, 1.5
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def read(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    out = {}
    for name, file in index.items():
        with safe_open(folder / file, "pt") as shard:
            out[name] = shard.get_tensor(name)
    return out


def dequantize(codes, scales, global_scales):
    """codes [E, n, k / 2], scales [E, n, k / 16], global_scales [E] or [E, 2] (gate rows, up rows)."""
    experts, rows = codes.shape[:2]
    values = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).reshape(experts, rows, -1, 16)
    values = (values * scales.float()[..., None]).reshape(experts, rows, -1)
    per_row = global_scales.reshape(experts, -1).repeat_interleave(rows // global_scales.reshape(experts, -1).shape[1], 1)
    return values * per_row[..., None]


def state(tensors, layer):
    prefix = f"model.language_model.layers.{layer}."
    own = {k[len(prefix):]: v for k, v in tensors.items() if k.startswith(prefix)}
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        sf, gs = own.pop(name + "_weight_scale", None), own.pop(name + "_weight_scale_2", None)
        own.pop(name + "_input_scale", None)
        if sf is not None:
            own[name] = dequantize(own[name], sf, gs)
    return {k: v.float() for k, v in own.items()}


def main():
    assert transformers.__version__ == "5.24.0", transformers.__version__
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = MuseSparkTextConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=2, **text)
    config._attn_implementation = config._experts_implementation = "eager"
    tensors = read(folder)
    spec = dict(q_lens=[TOKENS], ctx=0, kind="full", spread="fixed", dist="normal", page_size=16, k_scale=K_SCALE,
                v_scale=V_SCALE, local_start=0)
    stream = torch.from_numpy(G.residual_stream(config.hidden_size, spec, SEED)[0])[None]
    positions = torch.arange(TOKENS)[None]
    masks = dict(config=config, inputs_embeds=stream, attention_mask=None, cache=None, position_ids=positions)
    masks = {"full_attention": create_causal_mask(**masks),
             "sliding_attention": create_sliding_window_causal_mask(**masks)}
    rope = M.MuseSparkTextRotaryEmbedding(config)(stream, positions)
    out = {}
    for i in range(config.num_hidden_layers):
        layer = M.MuseSparkTextDecoderLayer(config, i).float().eval()
        layer.load_state_dict(state(tensors, i), strict=True)

        def keep(key, pick=lambda args, result: result):
            def hook(module, args, result):
                out[f"{i}.{key}"] = pick(args, result).reshape(TOKENS, -1)
            return hook

        def rounded(module, args, result):
            out[f"{i}.attn_input"] = result[0].bfloat16()
            return result.bfloat16().float()

        layer.input_layernorm.register_forward_hook(rounded)
        layer.self_attn.o_norm.register_forward_hook(keep("attn_core", lambda args, result: args[0]))
        layer.self_attn.register_forward_hook(keep("attn_out", lambda args, result: result[0]))
        layer.mlp.experts.register_forward_hook(keep("moe_mix"))
        layer.mlp.gate.register_forward_hook(keep("topk_ids", lambda args, result: result[2].sort(-1).values.int()))
        stream = layer(stream, position_embeddings=rope if config.layer_rope_theta[i] else None,
                       attention_mask=masks[config.layer_types[i]], position_ids=positions,
                       cache=Fp8Cache(K_SCALE, V_SCALE))
        out[f"{i}.stream"] = stream[0]
        kind, kept = config.layer_types[i], tensors[f"model.language_model.layers.{i}.mlp.experts.down_proj"].dtype
        print(f"layer {i} {kind:18} {kept} |stream| {stream.norm():.4f} |moe_mix| {out[f'{i}.moe_mix'].norm():.4f}")
    digests = {k: v.contiguous().view(torch.uint8).numpy() for k, v in tensors.items()}
    case = dict(tokens=TOKENS, seed=SEED, k_scale=K_SCALE, v_scale=V_SCALE, digest=f"{G.digest_all(digests):016x}")
    path = Path(__file__).parent / "checkpoint" / "small.safetensors"
    path.parent.mkdir(exist_ok=True)
    out = {k: v.detach().contiguous().clone() for k, v in out.items()}
    save_file(out, path, metadata={"case": json.dumps(case)})
    path.chmod(0o644)


if __name__ == "__main__":
    with torch.no_grad():
        main()
