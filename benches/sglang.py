#!/usr/bin/env python3
"""Times SGLang's layer and its attention on the judge's cases, beside `muse-spark-layer bench`.

    benches/sglang.py --judge FOLDER --peer FOLDER [--only REGEX] [--reps N] [--json FILE]

--judge: the folder of judge.py, layer.py and cases.py. --peer: the folder of sglang_module.py, SGLang's own sm_90
kernels behind the judge's interface. As in the judge and in `bench`, a time is that of a graph's replay behind an
emptied L2 cache, the mean over inputs of each one's median, in microseconds:

  layer      the whole step
  attention  from the projection of q, k, v and gate to the gated heads: norm and RoPE, the casts to E4M3, the cache's
             entries, FlashAttention-3, the heads' norm and gate
  fa3        FlashAttention-3 alone, as SGLang calls it: page table, lengths on the device, E4M3 queries with the
             cache's scales, `num_splits` 0; its schedule is prepared once a step for decode on full layers (and is
             in none of these times), and by each call elsewhere
"""

import argparse
import json
import re
import sys
from pathlib import Path

import torch


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--judge", required=True)
    p.add_argument("--peer", required=True)
    p.add_argument("--only", default="")
    p.add_argument("--reps", type=int, default=15, help="replays of each input")
    p.add_argument("--inputs", type=int, default=3)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--json")
    a = p.parse_args()
    sys.path[:0] = [a.judge, a.peer]
    import judge as J
    import sglang_module as M
    from cases import TIMED
    S, L = M.S, M.L
    torch.set_grad_enabled(False)
    weights = L.generate_weights(L.WEIGHTS_SEED)
    layer = M.Layer(weights)
    flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    clean = torch.ones(1 << 27, device="cuda")

    def graph_of(work):
        torch.set_float32_matmul_precision("high")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = work()
        torch.set_float32_matmul_precision("highest")
        return graph, kept

    def replayed(graph):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        J.reset_persisting_l2()
        torch.cuda.synchronize()
        flush.fill_(1)
        clean.sum()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)

    rows = []
    for name, case in TIMED:
        if not re.search(a.only, name):
            continue
        inputs = [J.make_input(case, a.seed + 10 + i, weights) for i in range(a.inputs)]
        d = J.make_input(case, a.seed + 9, weights)
        c = d["config"]
        projected = [S.linear(x["attn_input"], layer.W["qkv"], False) for x in inputs]
        qkv = projected[0].clone()
        window = (c["window"] - 1, 0) if c["window"] else (-1, -1)
        scales = [d[s].expand(c["batch"], L.HKV) for s in ("k_scale", "v_scale")]
        pools = [d[x].view(torch.uint8).view(-1, 128) for x in ("k_cache", "v_cache")]
        q8 = torch.zeros((c["tokens"], L.HQ, 64), dtype=torch.float32, device="cuda").to(L.FP8)

        def fa3(q):
            return S.flash_attn_with_kvcache(
                q=q, k_cache=d["k_cache"], v_cache=d["v_cache"], page_table=d["page_table"],
                cache_seqlens=d["cache_seqlens"], cu_seqlens_q=d["cu_seqlens_q"], max_seqlen_q=c["q_len"],
                softmax_scale=c["sm_scale"] * c["qk_scale_factor"], causal=True, window_size=window, num_splits=0,
                scheduler_metadata=d["scheduler_metadata"], k_descale=scales[0], v_descale=scales[1])

        def attention():  # the lines of sglang_layer.step
            q, k = S.QKN._forward_triton(qkv, *((d["positions"], S.cos_sin()) if c["rope_theta"] else ()))
            v = qkv[:, L.Q_SIZE + L.KV_SIZE:L.Q_SIZE + 2 * L.KV_SIZE].view(-1, L.HKV, 64)
            k8, v8 = (x.view(-1, L.HKV, 64).to(L.FP8).view(torch.uint8).view(-1, 128) for x in (k, v))
            S.store_cache(k8, v8, *pools, d["cache_loc"], row_bytes=128, v_row_bytes=128,
                          size_limit=pools[0].shape[0], reserved_skip_index=-1)
            heads = fa3(q.to(L.FP8).view(-1, L.HQ, 64)).view(c["tokens"], L.Q_SIZE)
            return S.rms_norm_gate(heads, qkv[:, L.Q_SIZE + 2 * L.KV_SIZE:], None, head_dim=64, eps=L.RMS_EPS)

        graphs = {"layer": graph_of(lambda: J.call(layer, d)), "attention": graph_of(attention),
                  "fa3": graph_of(lambda: fa3(q8))}
        samples = {what: [[] for _ in inputs] for what in graphs}
        for r in range(a.reps * len(inputs)):
            i = r % len(inputs)
            J.overwrite(d, inputs[i])
            qkv.copy_(projected[i])
            for what, (graph, _) in graphs.items():
                samples[what][i].append(replayed(graph))
        times = {what: sum(sorted(x)[len(x) // 2] for x in s) / len(s) for what, s in samples.items()}
        rows.append({"case": name, **{f"{what}_us": round(us, 2) for what, us in times.items()}})
        print(name, {k: v for k, v in rows[-1].items() if k != "case"}, flush=True)
        del graphs, inputs, d, projected, qkv, q8, scales, pools
        if a.json:
            Path(a.json).write_text(json.dumps({"what": "SGLang", "machine": J.machine(), "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
