"""One decode step on a GPU with torch tensors, and the same in three segments.

    MUSE_SPARK_LAYER_LIB=target/debug/libmuse_spark_layer.so PYTHONPATH=python python3 python/examples/one_step.py
"""

import torch

from muse_spark_layer import Layer

HIDDEN, EXPERT_DIM, LOCAL = 8192, 4096, 32
FP8 = torch.float8_e4m3fn


def make_weights(device="cuda", seed=1):
    """A layer of noise in the reference's names: NVFP4 experts, everything else BF16 or FP32."""
    rng = torch.Generator(device).manual_seed(seed)
    normal = lambda std, *shape: torch.randn(shape, generator=rng, device=device).mul_(std).bfloat16()  # noqa: E731
    single = lambda std, *shape: torch.randn(shape, generator=rng, device=device).mul_(std)  # noqa: E731
    codes = lambda *shape: torch.randint(0, 256, shape, generator=rng, device=device, dtype=torch.uint8)  # noqa: E731
    scales = lambda *shape: torch.randint(96, 112, shape, generator=rng, device=device,  # noqa: E731
                                          dtype=torch.uint8).view(FP8)
    return {
        "qkv_gate": normal(HIDDEN ** -0.5, 2304, HIDDEN), "o": normal(1024 ** -0.5, HIDDEN, 1024),
        "attn_residual_gate": normal(0.3, HIDDEN), "pre_ffn_norm": normal(0.1, HIDDEN),
        "router": single(0.045, 256, HIDDEN), "router_bias": single(0.055, 256),
        "pooler": normal(HIDDEN ** -0.5, EXPERT_DIM, HIDDEN), "pre_expert_norm": normal(0.1, EXPERT_DIM),
        "w13": codes(LOCAL, 2 * EXPERT_DIM, EXPERT_DIM // 2), "w13_sf": scales(LOCAL, 2 * EXPERT_DIM, EXPERT_DIM // 16),
        "w13_gs": torch.full((LOCAL, 2), 7e-5, device=device), "w2": codes(LOCAL, EXPERT_DIM, EXPERT_DIM // 2),
        "w2_sf": scales(LOCAL, EXPERT_DIM, EXPERT_DIM // 16), "w2_gs": torch.full((LOCAL,), 7e-5, device=device),
        "post_expert_norm": normal(0.1, EXPERT_DIM), "unpooler": normal(EXPERT_DIM ** -0.5, HIDDEN, EXPERT_DIM),
        "post_ffn_norm": normal(0.1, HIDDEN), "ffn_residual_gate": normal(0.3, HIDDEN),
        "next_pre_attn_norm": normal(0.1, HIDDEN)}


def make_step(requests=9, context=200, width=256, device="cuda", seed=2, padding=1):
    """A decode step: `requests` rows, the last `padding` of which are a graph's: length 1, slot 0, no page."""
    rng = torch.Generator(device).manual_seed(seed)
    stream = torch.randn((requests, HIDDEN), generator=rng, device=device)
    pages = 1 + requests * width  # slot 0 is nobody's
    table = (1 + torch.arange(requests * width, device=device, dtype=torch.int32)).view(requests, width).contiguous()
    cache = lambda: torch.randn((pages, 1, 2, 64), generator=rng, device=device).to(FP8)  # noqa: E731
    lengths = torch.full((requests,), context + 1, dtype=torch.int32, device=device)
    positions = torch.full((requests,), context, dtype=torch.int64, device=device)
    cache_loc = table[:, context].long()
    if padding:
        lengths[-padding:], positions[-padding:], cache_loc[-padding:], table[-padding:] = 1, 0, 0, -1
    integer = lambda n: torch.tensor([n], dtype=torch.int32, device=device)  # noqa: E731
    return dict(
        config=dict(q_len=1, page_size=1, window=0), stream=stream,
        attn_input=(stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-5)).bfloat16(),
        positions=positions, cache_loc=cache_loc, cache_seqlens=lengths, page_table=table,
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device=device), k_cache=cache(), v_cache=cache(),
        k_scale=torch.ones(1, device=device), v_scale=torch.ones(1, device=device), local_start=integer(0),
        num_tokens_non_padded=integer(requests - padding))


def main():
    layer = Layer(make_weights())
    data = make_step()
    hidden, stream, topk_ids = layer(data)
    torch.cuda.synchronize()
    print(layer.plan_text(data).splitlines()[0])
    print(f"token 0 goes to experts {topk_ids[0].tolist()}, its stream begins {stream[0, :3].tolist()}")

    # The segments, between which a deployment sums over its ranks.
    attn_out = layer.attention_block(data)
    moe_mix, stream_after_attn, _ = layer.moe_block(data, attn_out)
    again, stream_again = layer.final_block(data, moe_mix, stream_after_attn)
    same = torch.equal(stream, stream_again) and torch.equal(hidden, again)
    print(f"in three segments: {'the same bits' if same else 'OTHER BITS'}")
    try:
        layer({**data, "positions": data["positions"].int()})
    except TypeError as error:
        print(f"refused: {error}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
