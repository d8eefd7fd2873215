"""class Layer: the weights on the GPU, plans by shape, workspaces by size, one call a step."""

import ctypes

import torch

from . import _native as native

FP8 = torch.float8_e4m3fn
_DTYPES = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.float16: native.F16, FP8: native.E4M3,
           torch.uint8: native.U8, torch.int32: native.I32, torch.int64: native.I64}
HIDDEN, EXPERT_DIM, TOP_K, HKV, HEAD_DIM, SLICE = 8192, 4096, 8, 2, 64, 1024

# The intermediate results that a call can return: name -> (type, columns).
TAPS = {"attn_core": (torch.float32, (1024,)), "attn_out": (torch.bfloat16, (8192,)),
        "stream_after_attn": (torch.float32, (8192,)), "ffn_input": (torch.bfloat16, (3, 8192)),
        "router_logits": (torch.float32, (256,)), "topk_scores": (torch.float32, (8,)),
        "expert_input": (torch.float32, (4096,)), "moe_mix": (torch.bfloat16, (4096,)),
        "ffn_out": (torch.float32, (8192,))}


def _tensor(name, t, dtype, shape, contiguous=True):
    """Checks a tensor and gives its address."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: wanted a torch tensor, got {type(t).__name__}")
    if t.dtype != dtype:
        raise TypeError(f"{name}: wanted {dtype}, got {t.dtype}")
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name}: wanted shape {tuple(shape)}, got {tuple(t.shape)}")
    if contiguous and not t.is_contiguous():
        raise ValueError(f"{name}: wanted a contiguous tensor, got strides {t.stride()}")
    return t.data_ptr()


def _scalar(name, t, dtype):
    if isinstance(t, torch.Tensor) and t.numel() == 1:
        return _tensor(name, t, dtype, t.shape)
    return _tensor(name, t, dtype, (1,))


class SchedulerMetadata:
    """See Layer.scheduler_metadata. Keeps its device memory: it must outlive the graphs it was captured into."""

    def __init__(self, lib, plan, data, device):
        words = lib.msl_plan_metadata_words(plan.value)
        self.memory = torch.empty(max(words, 1), dtype=torch.int32, device=device)
        requests = data["cache_seqlens"].shape[0]
        self.handle = native.Handle(
            "scheduler_metadata", lib.msl_scheduler_metadata_prepare, plan.value,
            _tensor("cu_seqlens_q", data["cu_seqlens_q"], torch.int32, (requests + 1,)),
            _tensor("cache_seqlens", data["cache_seqlens"], torch.int32, (requests,)), self.memory.data_ptr(),
            torch.cuda.current_stream(device).cuda_stream)


class Layer:
    """A decoder layer.

    weights: torch tensors on one GPU, named as the reference's; read here only, not kept.
    engine: "own", or "fa3" where the library has it (query "e4m3" then). query: "fp16" or "e4m3".
    rank: this GPU's rank of TP8/EP8 (the unpooler's slice at up to 8 tokens).
    taps: names (or True: all) of intermediate results that each call leaves in `self.tapped`.
    dependent_launch: programmatic dependent launch between the step's kernels.

    data["config"] is the reference's. In a mixed batch it may say short=(requests, tokens, q_len): that many of the last
    requests, with that many rows in all, have at most q_len (1 to 16) tokens each, and take their own attention kernels.

    Plans and workspaces are made on the first call of a shape, which synchronises: call once before a
    capture, or `prepare`. A workspace serves the calls of one stream at a time, in order. The layer must
    outlive the graphs it was captured into.
    """

    def __init__(self, weights, *, engine="own", query="fp16", rank=0, taps=(), dependent_launch=True,
                 synchronize=False):
        for name, given, wanted in (("engine", engine, ("own", "fa3")), ("query", query, ("fp16", "e4m3"))):
            if given not in wanted:
                raise ValueError(f"{name}: wanted {' or '.join(wanted)}, got {given}")
        self._engine, self._query, self._rank = engine, query, rank
        self._dependent_launch, self._synchronize = dependent_launch, synchronize
        self._taps = tuple(TAPS) if taps is True else tuple(taps)
        for name in self._taps:
            if name not in TAPS:
                raise ValueError(f"taps: wanted some of {', '.join(TAPS)}, got {name}")
        self.tapped = {}
        self._plans, self._workspaces = {}, {}

        devices = {w.device for w in weights.values()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            raise ValueError(f"weights: wanted tensors on one CUDA device, got {sorted(map(str, devices))}")
        self.device = next(iter(devices))
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        kept = [(k.encode(), w.contiguous()) for k, w in weights.items()]
        torch.cuda.current_stream(self.device).synchronize()
        given = (native.Tensor * len(kept))()
        for slot, (name, w) in zip(given, kept):
            if w.dtype not in _DTYPES or w.dim() > 4:
                raise TypeError(f"{name.decode()}: {w.dtype} with {w.dim()} dimensions")
            slot.name, slot.data, slot.dtype, slot.rank = name, w.data_ptr(), _DTYPES[w.dtype], w.dim()
            slot.shape[:w.dim()] = w.shape
        self.has_next_norm = "next_pre_attn_norm" in weights
        options = native.LayerOptions(device=index, experts=int(weights["w13"].dtype == torch.bfloat16))
        lib = native.library()
        self._lib = lib
        self._layer = native.Handle("layer", lib.msl_layer_create, ctypes.byref(options), given, len(kept))

    # ---- plans -----------------------------------------------------------------------------------------

    def _plan(self, tokens, requests, max_q_len, table_width, page_size, sliding, short):
        """(plan, workspace) for a shape, made on its first use."""
        key = tokens, requests, max_q_len, table_width, page_size, sliding, short
        found = self._plans.get(key)
        if found is None:
            options = native.PlanOptions(
                tokens=tokens, requests=requests, max_q_len=max_q_len, table_width=table_width, page_size=page_size,
                kind=int(sliding), engine=int(self._engine == "fa3"), query=int(self._query == "e4m3"), rank=self._rank,
                taps=int(bool(self._taps)), plain_launch=int(not self._dependent_launch),
                synchronize=int(self._synchronize), short_requests=short[0], short_tokens=short[1],
                short_max_q_len=short[2])
            lib = self._lib
            plan = native.Handle("plan", lib.msl_plan_create, self._layer.value, ctypes.byref(options))
            # One workspace for all shapes of a size class, so that many shapes cost twice the largest.
            wanted = max(lib.msl_plan_workspace_bytes(plan.value), 1 << 20)
            size = 1 << (wanted - 1).bit_length()
            if size not in self._workspaces:
                self._workspaces[size] = native.Handle("workspace", lib.msl_workspace_create, self._layer.value, size)
            found = self._plans[key] = plan, self._workspaces[size]
        return found

    @staticmethod
    def _shape(data):
        cfg = data["config"]
        tokens, requests = data["attn_input"].shape[0], data["cache_seqlens"].shape[0]
        return (tokens, requests, min(cfg["q_len"], tokens), data["page_table"].shape[1], cfg["page_size"],
                bool(cfg["window"]), tuple(cfg.get("short", (0, 0, 0))))

    def prepare(self, data):
        """Makes what a call with `data` needs, so that the call itself neither allocates nor synchronises."""
        self._plan(*self._shape(data))

    def plan_text(self, data):
        """The plan of a call with `data`, for people."""
        plan, _ = self._plan(*self._shape(data))
        return self._lib.msl_plan_text(plan.value).decode()

    def scheduler_metadata(self, data):
        """The engine fa3's schedule for a step like `data`, queued on the current stream (a capture takes it
        in): for the calls of all layers of a kind that follow on the stream."""
        plan, _ = self._plan(*self._shape(data))
        return SchedulerMetadata(self._lib, plan, data, self.device)

    # ---- steps -----------------------------------------------------------------------------------------

    def _attention_fields(self, data, tokens, requests, page_size, metadata=None):
        table, k, v = data["page_table"], data["k_cache"], data["v_cache"]
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(f"page_table: wanted rows of columns next to each other, got strides {table.stride()}")
        pool = (k.shape[0], page_size, HKV, HEAD_DIM)
        return dict(
            attn_input=_tensor("attn_input", data["attn_input"], torch.bfloat16, (tokens, HIDDEN)),
            positions=_tensor("positions", data["positions"], torch.int64, (tokens,)),
            cache_loc=_tensor("cache_loc", data["cache_loc"], torch.int64, (tokens,)),
            cu_seqlens_q=_tensor("cu_seqlens_q", data["cu_seqlens_q"], torch.int32, (requests + 1,)),
            cache_seqlens=_tensor("cache_seqlens", data["cache_seqlens"], torch.int32, (requests,)),
            page_table=_tensor("page_table", table, torch.int32, (requests, table.shape[1]), contiguous=False),
            table_stride=table.stride(0) if requests > 1 else table.shape[1],
            k_scale=_scalar("k_scale", data["k_scale"], torch.float32),
            v_scale=_scalar("v_scale", data["v_scale"], torch.float32),
            k_cache=_tensor("k_cache", k, FP8, pool), v_cache=_tensor("v_cache", v, FP8, pool), pages=k.shape[0],
            scheduler_metadata=None if metadata is None else metadata.handle.value)

    def _moe_fields(self, data, tokens):
        padded = data.get("num_tokens_non_padded")
        return dict(
            stream=_tensor("stream", data["stream"], torch.float32, (tokens, HIDDEN)),
            local_start=_scalar("local_start", data["local_start"], torch.int32),
            num_tokens_non_padded=None if padded is None else _scalar("num_tokens_non_padded", padded, torch.int32))

    def _outputs(self, tokens):
        new = lambda dtype, width: torch.empty((tokens, width), dtype=dtype, device=self.device)  # noqa: E731
        hidden = new(torch.bfloat16, HIDDEN) if self.has_next_norm else None
        return hidden, new(torch.float32, HIDDEN), new(torch.int32, TOP_K)

    def _run(self, call, shape, *more, **fields):
        plan, workspace = self._plan(*shape)
        step = native.Step(**fields)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        native.check(getattr(self._lib, f"msl_{call}")(self._layer.value, plan.value, workspace.value, ctypes.byref(step),
                                                       *more, stream))

    def __call__(self, data, scheduler_metadata=None):
        """One step: (hidden BF16 [T, 8192], stream FP32 [T, 8192], topk_ids INT32 [T, 8]). The cache in
        `data` gets the step's entries. scheduler_metadata: from the method of that name, or absent."""
        shape = self._shape(data)
        tokens, requests, _, _, page_size, *_ = shape
        hidden, stream, topk_ids = self._outputs(tokens)
        taps = {n: torch.empty((tokens, *TAPS[n][1]), dtype=TAPS[n][0], device=self.device) for n in self._taps}
        wanted = (native.Tap * max(len(taps), 1))(*((n.encode(), t.data_ptr()) for n, t in taps.items()))
        self._run("forward", shape, **self._attention_fields(data, tokens, requests, page_size, scheduler_metadata),
                  **self._moe_fields(data, tokens), hidden=None if hidden is None else hidden.data_ptr(),
                  stream_out=stream.data_ptr(), topk_ids=topk_ids.data_ptr(), tap_count=len(taps), taps=wanted)
        self.tapped = taps
        return hidden, stream, topk_ids

    def attention_block(self, data, scheduler_metadata=None):
        """The first segment: attn_out BF16 [T, 8192], to be summed over the ranks."""
        shape = self._shape(data)
        tokens, requests, _, _, page_size, *_ = shape
        attn_out = torch.empty((tokens, HIDDEN), dtype=torch.bfloat16, device=self.device)
        self._run("attention_block", shape,
                  **self._attention_fields(data, tokens, requests, page_size, scheduler_metadata),
                  attn_out=attn_out.data_ptr())
        return attn_out

    def moe_block(self, data, attn_out):
        """The second segment: (moe_mix BF16 [T, 4096], to be summed over the ranks, stream_after_attn, topk_ids)."""
        shape = self._shape(data)
        tokens = shape[0]
        _, stream_after_attn, topk_ids = self._outputs(tokens)
        moe_mix = torch.empty((tokens, EXPERT_DIM), dtype=torch.bfloat16, device=self.device)
        self._run("moe_block", shape, **self._moe_fields(data, tokens),
                  attn_out=_tensor("attn_out", attn_out, torch.bfloat16, (tokens, HIDDEN)),
                  stream_after_attn=stream_after_attn.data_ptr(), topk_ids=topk_ids.data_ptr(), moe_mix=moe_mix.data_ptr())
        return moe_mix, stream_after_attn, topk_ids

    def final_block(self, data, moe_mix, stream_after_attn):
        """The third segment: (hidden, stream). Over ranks, at up to 8 tokens: unpool_block, a gather, ffn_block."""
        shape = self._shape(data)
        tokens = shape[0]
        hidden, stream, _ = self._outputs(tokens)
        self._run("final_block", shape,
                  moe_mix=_tensor("moe_mix", moe_mix, torch.bfloat16, (tokens, EXPERT_DIM)),
                  stream_after_attn=_tensor("stream_after_attn", stream_after_attn, torch.float32, (tokens, HIDDEN)),
                  hidden=None if hidden is None else hidden.data_ptr(), stream_out=stream.data_ptr())
        return hidden, stream

    def unpool_block(self, data, moe_mix):
        """The third segment's first half at up to 8 tokens: this rank's slice FP32 [T, 1024], to be gathered."""
        shape = self._shape(data)
        tokens = shape[0]
        part = torch.empty((tokens, SLICE), dtype=torch.float32, device=self.device)
        self._run("unpool_block", shape, part.data_ptr(),
                  moe_mix=_tensor("moe_mix", moe_mix, torch.bfloat16, (tokens, EXPERT_DIM)))
        return part

    def ffn_block(self, data, slices, stream_after_attn):
        """The second half, over the ranks' slices FP32 [ranks, T, 1024]: (hidden, stream)."""
        shape = self._shape(data)
        tokens, ranks = shape[0], slices.shape[0]
        hidden, stream, _ = self._outputs(tokens)
        slices = _tensor("slices", slices, torch.float32, (ranks, tokens, SLICE))
        self._run("ffn_block", shape, slices, ranks,
                  stream_after_attn=_tensor("stream_after_attn", stream_after_attn, torch.float32, (tokens, HIDDEN)),
                  hidden=None if hidden is None else hidden.data_ptr(), stream_out=stream.data_ptr())
        return hidden, stream
