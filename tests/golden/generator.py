"""The integer generator of src/synthetic.rs in Python: the same bits for weights and inputs, and the
same digests. Only what the golden files need (NVFP4 and BF16 experts, all spreads and distributions)."""

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
NORMAL = np.float32(1.0 / 37837.22723720648)
f32 = np.float32
RANK, STREAM_SEED = 4, 5354


def mix(z):
    if isinstance(z, int):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fnv1a(name):
    h = 0xCBF29CE484222325
    for b in name.encode():
        h = (h ^ b) * 0x100000001B3 & MASK
    return h


class Random:
    def __init__(self, seed, name):
        self.base = mix(seed ^ mix(fnv1a(name)))

    def bits(self, n, start=0):
        i = np.arange(start + 1, start + n + 1, dtype=np.uint64)
        return mix(np.uint64(self.base) + i * np.uint64(GOLDEN))

    def one(self, i):
        return mix((self.base + (i + 1) * GOLDEN) & MASK)

    def integers(self, n):
        b = self.bits(n)
        return sum(((b >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.int64) for s in (0, 16, 32, 48)) - 131070

    def normals(self, n):
        return self.integers(n).astype(f32) * NORMAL

    def below(self, i, n):
        return ((self.one(i) >> 32) * n) >> 32

    def bytes(self, n):
        return self.bits((n + 7) // 8).view(np.uint8)[:n].copy()


def bf16(x):
    """FP32 to BF16 bits, to nearest even (no NaN here)."""
    b = np.ascontiguousarray(x, dtype=f32).view(np.uint32)
    return ((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def widen(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(f32)


def e4m3_values():
    e, m = np.arange(0x7F) >> 3, np.arange(0x7F) & 7
    return np.where(e == 0, m * 2.0**-9, (8 + m) * 2.0 ** (e - 10.0))


def e4m3(x):
    """FP32 to E4M3 bytes, to nearest even, saturating."""
    v = e4m3_values()
    a = np.abs(x).astype(np.float64)
    mid = (v[1:] + v[:-1]) / 2
    lower = np.searchsorted(mid, a, side="left")  # the first midpoint at or past a
    tie = (lower < len(mid)) & (a == mid[np.minimum(lower, len(mid) - 1)]) & (lower % 2 == 1)
    return (lower + tie).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


def basis(hidden):
    return Random(STREAM_SEED, "mean").normals(hidden), Random(STREAM_SEED, "shared").normals(RANK * hidden)


def fan_in(k):
    return f32(1.0 / np.sqrt(np.float64(k)))


def factor(bits):
    bits = int(bits)
    return f32((16 + ((bits >> 2) & 15)) * 2.0 ** ((bits & 3) - 6))


def weights(c, seed):
    """c: a dict of LayerConfig's fields. BF16 tensors are uint16 bits."""
    hidden, dim, local = c["hidden"], c["expert_dim"], c["local_experts"]
    q, kv = c["q_heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    out = {}

    def put(name, shape, std):
        out[name] = bf16(Random(seed, name).normals(int(np.prod(shape))) * f32(std)).reshape(shape)

    put("qkv_gate", (2 * q + 2 * kv, hidden), fan_in(hidden))
    put("o", (hidden, q), fan_in(q))
    put("attn_residual_gate", (hidden,), 0.3)
    put("pre_ffn_norm", (hidden,), 0.1)
    put("pooler", (dim, hidden), fan_in(hidden))
    put("pre_expert_norm", (dim,), 0.1)
    put("post_expert_norm", (dim,), 0.1)
    put("unpooler", (hidden, dim), fan_in(dim))
    put("post_ffn_norm", (hidden,), 0.1)
    put("ffn_residual_gate", (hidden,), 0.3)
    put("next_pre_attn_norm", (hidden,), 0.1)
    wider = np.sqrt(np.float64(8192.0 / hidden))
    std, align = f32(0.045 * wider), f32(0.07 * wider)
    mean = basis(hidden)[0] * fan_in(hidden)
    noise = Random(seed, "router").normals(c["n_experts"] * hidden).reshape(-1, hidden)
    along = Random(seed, "router/align").normals(c["n_experts"])
    out["router"] = noise * std + (along * align)[:, None] * mean[None, :]
    out["router_bias"] = Random(seed, "router_bias").normals(c["n_experts"]) * f32(0.055)
    for name, rows in (("w13", 2 * dim), ("w2", dim)):
        factors = Random(seed, name + "_gs")
        if c["experts"] == "nvfp4":
            out[name] = Random(seed, name).bytes(local * rows * dim // 2).reshape(local, rows, dim // 2)
            n = local * rows * dim // 16
            b, rare = Random(seed, name + "_sf").bytes(n), Random(seed, name + "_sf/rare").bytes(n)
            sf = np.where(b <= 3, np.minimum(rare & 0x7F, 0x7E), 0x60 + (b & 15)).astype(np.uint8)
            out[name + "_sf"] = sf.reshape(local, rows, dim // 16)
            unit = f32(1.0 / (220.0 * np.sqrt(np.float64(dim))))
            per = 2 if name == "w13" else 1
            gs = np.array([unit * factor(x) for x in factors.bits(local * per)], dtype=f32)
            out[name + "_gs"] = gs.reshape(local, 2) if per == 2 else gs
        else:
            x = Random(seed, name).normals(local * rows * dim).reshape(local, -1)
            scale = np.array([fan_in(dim) * factor(b) for b in factors.bits(local)], dtype=f32)
            out[name] = bf16(x * scale[:, None]).reshape(local, rows, dim)
    return out


def lengths(s, seed):
    stream, ctx = Random(seed, "lengths"), s["ctx"]
    out = []
    for b in range(len(s["q_lens"])):
        if s["spread"] == "fixed":
            out.append(ctx)
        elif s["spread"] == "agentic":
            around = ctx * 75 // 1000
            out.append(ctx - around + stream.below(b, 2 * around + 1))
        else:
            exponent, mantissa = stream.below(2 * b, 7), 8 + stream.below(2 * b + 1, 8)
            out.append(min(max(((ctx * mantissa) << exponent) >> 7, 16), 4 * ctx))
    return out


def step(c, s, seed):
    """s: q_lens, ctx, kind, spread, dist, page_size, k_scale, v_scale, local_start."""
    hidden, page, batch, kv = c["hidden"], s["page_size"], len(s["q_lens"]), c["kv_heads"] * c["head_dim"]
    lens = lengths(s, seed)
    ctx = s["ctx"]
    longest = {"fixed": ctx, "agentic": ctx + ctx * 75 // 1000, "mixed": 4 * ctx}[s["spread"]]
    width = max(-(-(longest + max(s["q_lens"], default=0)) // page), 1)
    pages = batch * width
    order, shuffle = list(range(pages)), Random(seed, "pages")
    for i in range(pages - 1, 0, -1):
        j = shuffle.below(i, i + 1)
        order[i], order[j] = order[j], order[i]
    table = np.full((batch, width), -1, dtype=np.int32)
    positions, loc, cu, at = [], [], [0], 0
    for b, (seq, q) in enumerate(zip(lens, s["q_lens"])):
        n = -(-(seq + q) // page)
        table[b, :n] = order[at:at + n]
        at += n
        for p in range(seq, seq + q):
            positions.append(p)
            loc.append(int(table[b, p // page]) * page + p % page)
        cu.append(len(positions))
    n = pages * page * kv
    keys = Random(seed, "k_cache").normals(n)
    if s["dist"] == "soft":
        d, h = c["head_dim"], c["kv_heads"]
        u = Random(seed, "soft").integers(h * d).reshape(h, d)
        low, high = (0.3, 0.75) if s["kind"] == "sliding" else (0.5, 0.62)
        share = Random(seed, "soft/share")
        c2 = [low + (high - low) * (share.below(i, 1 << 24) / float(1 << 24)) for i in range(h)]
        along = np.stack([(u[i].astype(np.float64) * (np.sqrt(c2[i]) / np.sqrt(int((u[i] * u[i]).sum()) / float(d))))
                          .astype(f32) for i in range(h)])
        noise = np.array([np.sqrt(1.0 - x) for x in c2]).astype(f32)
        keys = (along[None] + noise[None, :, None] * keys.reshape(-1, h, d)).reshape(-1)
    stream, attn_input = residual_stream(hidden, s, seed)
    shape = (pages, page, c["kv_heads"], c["head_dim"])
    return {
        "stream": stream,
        "attn_input": attn_input,
        "positions": np.array(positions, dtype=np.int64),
        "cache_loc": np.array(loc, dtype=np.int64),
        "cu_seqlens_q": np.array(cu, dtype=np.int32),
        "cache_seqlens": np.array([a + b for a, b in zip(lens, s["q_lens"])], dtype=np.int32),
        "page_table": table,
        "k_cache": e4m3(keys / f32(s["k_scale"])).reshape(shape),
        "v_cache": e4m3(Random(seed, "v_cache").normals(n) / f32(s["v_scale"])).reshape(shape),
    }


def residual_stream(hidden, s, seed):
    mean, shared = basis(hidden)
    shared = shared.reshape(RANK, hidden)
    draft = np.array([i > 0 and q <= 8 for q in s["q_lens"] for i in range(q)], dtype=bool)
    t = len(draft)
    coef = Random(seed, "coefficients").normals(t * RANK).reshape(t, RANK)
    noise = Random(seed, "stream").normals(t * hidden).reshape(t, hidden)
    scale = np.where(draft, 0.6, 1.0)
    own = np.sqrt(1.0 - 0.9 * scale * scale).astype(f32)[:, None]
    along = np.zeros((t, hidden), dtype=f32)
    for r in range(RANK):
        along = along + coef[:, r:r + 1] * shared[r]
    structure = f32(0.7) * mean + f32(np.sqrt(0.9 / 4.0)) * along
    x = scale.astype(f32)[:, None] * structure + own * noise
    if s["dist"] == "outliers":
        pick, channels = Random(seed, "outliers"), list(range(hidden))
        for i in range(max(hidden // 100, 1)):
            j = i + pick.below(i, hidden - i)
            channels[i], channels[j] = channels[j], channels[i]
            x[:, channels[i]] *= f32(10.0)
    assert x.dtype == f32
    wide = x.astype(np.float64)
    squares = np.add.accumulate(wide * wide, axis=1)[:, -1:] if t else np.zeros((0, 1))  # in index order
    inverse = 1.0 / np.sqrt(squares / float(hidden) + 1e-5)
    return x, bf16((wide * inverse).astype(f32))


def digest(x):
    raw = np.ascontiguousarray(x).tobytes()
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 8), dtype=np.uint64)
    i = np.arange(1, len(words) + 1, dtype=np.uint64)
    return (int(mix(words + i * np.uint64(GOLDEN)).sum(dtype=np.uint64)) + mix(len(raw))) & MASK


def digest_all(tensors):
    return sum(mix(fnv1a(k) ^ digest(v)) for k, v in tensors.items()) & MASK
