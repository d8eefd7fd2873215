"""A decode step as a CUDA graph: captured once, replayed on other requests.

Everything that varies between steps is read on the device, so a replay sees what stands in the tensors by then:
lengths, positions, pages, slots, activations, the number of rows that are not padding.
"""

import torch

from muse_spark_layer import Layer
from one_step import make_step, make_weights

VARYING = ("stream", "attn_input", "positions", "cache_loc", "cache_seqlens", "page_table", "num_tokens_non_padded")


def main():
    layer = Layer(make_weights())
    data = make_step(context=1)
    layer.prepare(data)  # plans and workspaces are made before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden, stream, topk_ids = layer(data)
    same = True
    for seed, context, padding in ((3, 50, 1), (4, 200, 4), (5, 120, 0)):
        step = make_step(context=context, seed=seed, padding=padding)
        for name in VARYING:
            data[name].copy_(step[name])
        data["k_cache"].copy_(step["k_cache"])
        data["v_cache"].copy_(step["v_cache"])
        graph.replay()
        torch.cuda.synchronize()
        replayed = hidden.clone(), stream.clone(), topk_ids.clone()
        eager = layer(step)
        torch.cuda.synchronize()
        rows = stream.shape[0] - padding
        equal = all(torch.equal(a[:rows], b[:rows]) for a, b in zip(replayed, eager))
        print(f"context {context}, {padding} rows of padding: {'the bits of a call' if equal else 'OTHER BITS'}")
        same &= equal
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
