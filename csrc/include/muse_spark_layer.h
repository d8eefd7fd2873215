/* The C interface of muse-spark-layer: one Muse Spark Open decoder layer on one Hopper GPU.
 *
 * Link the cdylib (libmuse_spark_layer.so). Every call returns a status; the text of the last failed call
 * of the calling thread is msl_last_error(). No call aborts, throws or unwinds into the caller.
 *
 * Structs that are passed by pointer begin with struct_size = sizeof(the struct): zero the struct, set the
 * size, set the fields. A library that is newer than the caller's header takes what the caller knew.
 *
 * A step:  msl_layer_create -> msl_plan_create -> msl_workspace_create -> msl_forward ... -> *_destroy.
 * msl_forward allocates nothing, does not synchronise, uses only the given stream, and may be captured into
 * a CUDA graph (as its first call too). Everything that varies between replays is read on the device.
 *
 * T tokens of the step, B requests. All pointers in msl_step are device pointers. Activations, caches and
 * outputs are 16-byte aligned; index arrays and scalars are aligned to their elements. All are contiguous
 * but the page table, whose rows may be any distance apart. Outputs alias no input and no other output.
 */
#ifndef MUSE_SPARK_LAYER_H
#define MUSE_SPARK_LAYER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MSL_ABI_VERSION 1u

/* Compare with MSL_ABI_VERSION: other versions are not compatible. */
uint32_t msl_abi_version(void);
/* "0.1.0" */
const char* msl_version(void);
/* What the last failed call of this thread had to say; "" if none failed. Valid until the thread's next call. */
const char* msl_last_error(void);

/* Statuses. The text names the tensor or field, what was wanted and what was given. */
enum {
  MSL_OK = 0,
  MSL_INVALID_ARGUMENT = 1,   /* shape, type, stride, alignment, overlap, value, limit, plan mismatch */
  MSL_INVALID_DATA = 2,       /* NaN block scale, unreadable file */
  MSL_UNSUPPORTED = 3,        /* another GPU than sm_90, other dimensions, an engine this build lacks */
  MSL_NO_DEVICE = 4,          /* no driver, no GPU, or a build without CUDA */
  MSL_CUDA_ERROR = 5,         /* a CUDA call failed */
  MSL_INTERNAL = 6            /* a fault of the library */
};
typedef int32_t msl_status;

/* Element types. */
enum { MSL_F32 = 0, MSL_BF16 = 1, MSL_F16 = 2, MSL_E4M3 = 3, MSL_U8 = 4, MSL_I32 = 5, MSL_I64 = 6 };

/* A named tensor in device memory (host memory for MSL_CPU), contiguous and 16-byte aligned. Fixed in this ABI version. */
typedef struct msl_tensor {
  const char* name;
  const void* data;
  int32_t dtype;
  int32_t rank;        /* 0..4 */
  int64_t shape[4];
} msl_tensor;

typedef struct msl_layer msl_layer;
typedef struct msl_plan msl_plan;
typedef struct msl_workspace msl_workspace;
typedef struct msl_scheduler_metadata msl_scheduler_metadata;

/* ---- layer ------------------------------------------------------------------------------------------- */

enum { MSL_NVFP4 = 0, MSL_BF16_EXPERTS = 1 };

/* The CPU backend, in place of a device: the reference, for tests and for machines without a GPU. Weights and
 * the pointers of msl_step are then host memory, aligned to their elements; msl_forward computes before it
 * returns, on any dimensions; workspaces are empty, the stream is not looked at; segments and taps are not there. */
enum { MSL_CPU = -1 };
/* The released dimensions, or small ones (the CPU only): hidden 64, 4 query and 2 key/value heads of 16, window 24,
 * expert_dim 32, 32 experts of which 8 local, top 4. The shapes below are the released ones. */
enum { MSL_RELEASED = 0, MSL_SMALL = 1 };

typedef struct msl_layer_options {
  uint32_t struct_size;
  int32_t device;      /* CUDA ordinal, or MSL_CPU */
  int32_t experts;     /* MSL_NVFP4 or MSL_BF16_EXPERTS */
  int32_t dimensions;  /* MSL_RELEASED or MSL_SMALL */
} msl_layer_options;

/* Repacks the weights, which are named and shaped as the reference's: qkv_gate [2304, 8192] BF16,
 * o [8192, 1024] BF16, attn_residual_gate, pre_ffn_norm [8192] BF16, router [256, 8192] F32,
 * router_bias [256] F32, pooler [4096, 8192] BF16, pre_expert_norm [4096] BF16, w13 [32, 8192, 2048] U8,
 * w13_sf [32, 8192, 256] E4M3, w13_gs [32] or [32, 2] F32, w2 [32, 4096, 2048] U8, w2_sf [32, 4096, 256]
 * E4M3, w2_gs [32] F32, post_expert_norm [4096] BF16, unpooler [8192, 4096] BF16, post_ffn_norm,
 * ffn_residual_gate [8192] BF16, next_pre_attn_norm [8192] BF16 (absent: steps give no hidden).
 * Synchronises the device; the originals may be freed afterwards. */
msl_status msl_layer_create(const msl_layer_options* options, const msl_tensor* weights, size_t count,
                            msl_layer** layer);
void msl_layer_destroy(msl_layer* layer);
/* Device memory that the weights take. */
uint64_t msl_layer_weight_bytes(const msl_layer* layer);

/* ---- plan -------------------------------------------------------------------------------------------- */

enum { MSL_FULL = 0, MSL_SLIDING = 1 };
enum { MSL_QUERY_FP16 = 0, MSL_QUERY_E4M3 = 1 };
enum { MSL_ATTENTION_OWN = 0, MSL_ATTENTION_FA3 = 1 };

typedef struct msl_plan_options {
  uint32_t struct_size;
  uint32_t tokens;          /* T, padding rows included; 0 is legal */
  uint32_t requests;        /* B, zero-length ones included */
  uint32_t max_q_len;       /* bound on a request's query length */
  uint32_t table_width;     /* valid columns of the page table */
  uint32_t page_size;       /* a power of two from 1 to 256 */
  int32_t kind;             /* MSL_FULL or MSL_SLIDING */
  int32_t engine;           /* MSL_ATTENTION_OWN, or MSL_ATTENTION_FA3 (with MSL_QUERY_E4M3) where the build has it */
  int32_t query;            /* MSL_QUERY_FP16 or MSL_QUERY_E4M3 */
  uint32_t rank;            /* of TP8/EP8: the unpooler's slice at up to 8 tokens */
  int32_t taps;             /* 1: msl_step.taps may be used */
  int32_t plain_launch;     /* 1: no programmatic dependent launch */
  uint32_t route_bound;     /* local routes a pass of the experts holds; 0: chosen */
  int32_t skip_slot_zero;   /* 1: tokens with cache_loc 0 store nothing */
  int32_t synchronize;      /* 1: debugging: wait after each operation and name the one that failed */
  /* A mixed batch: its last requests, of at most short_max_q_len (1 to 16) tokens each, behind longer ones. Their
   * attention takes the kernels for few tokens; with 0 all requests take the longest one's. */
  uint32_t short_requests;  /* fewer than all; 0: none */
  uint32_t short_tokens;    /* T - cu_seqlens_q[B - short_requests] */
  uint32_t short_max_q_len;
} msl_plan_options;

/* Decides every launch of the steps that fit the options. Plans are plain data: any thread may use one. */
msl_status msl_plan_create(const msl_layer* layer, const msl_plan_options* options, msl_plan** plan);
void msl_plan_destroy(msl_plan* plan);
/* Bytes of workspace that a call with this plan needs. */
uint64_t msl_plan_workspace_bytes(const msl_plan* plan);
/* The plan as text, for people; lives as long as the plan. */
const char* msl_plan_text(const msl_plan* plan);

/* ---- scheduler metadata of MSL_ATTENTION_FA3 ---------------------------------------------------------- */

/* 32-bit words of device memory, 16-byte aligned, that the metadata takes; 0 for other engines. */
uint64_t msl_plan_metadata_words(const msl_plan* plan);
/* Queues the kernel that works the schedule of a step's attention out of its lengths (cu_seqlens_q I32 [B + 1],
 * cache_seqlens I32 [B], on the device) into `memory`. May be captured. The handle may go into the steps of
 * all layers of a kind that follow on the stream: same requests and query lengths, cache lengths may be others.
 * It refers to `memory`, which the steps write too. Steps without one prepare their own. */
msl_status msl_scheduler_metadata_prepare(const msl_plan* plan, const void* cu_seqlens_q, const void* cache_seqlens,
                                          void* memory, void* stream, msl_scheduler_metadata** metadata);
void msl_scheduler_metadata_destroy(msl_scheduler_metadata* metadata);

/* ---- workspace --------------------------------------------------------------------------------------- */

/* Memory that a call works in: reusable by every plan that fits and by all layers on one stream, never by
 * two streams at once. It must outlive the graphs that were captured with it. */
msl_status msl_workspace_create(const msl_layer* layer, uint64_t bytes, msl_workspace** workspace);
/* The same in the caller's device memory, 256-byte aligned. The first 1024 bytes are counters and flags:
 * they are zeroed here, and nobody else may write them. The rest is scratch. */
msl_status msl_workspace_wrap(const msl_layer* layer, void* memory, uint64_t bytes, msl_workspace** workspace);
void msl_workspace_destroy(msl_workspace* workspace);
uint64_t msl_workspace_bytes(const msl_workspace* workspace);

/* ---- step -------------------------------------------------------------------------------------------- */

/* Names, types and shapes of the intermediate results: attn_core F32 [T, 1024], attn_out BF16 [T, 8192],
 * stream_after_attn F32 [T, 8192], ffn_input BF16 [T, 3, 8192] (three planes to be summed), router_logits
 * F32 [T, 256], topk_scores F32 [T, 8], expert_input F32 [T, 4096], moe_mix BF16 [T, 4096],
 * ffn_out F32 [T, 8192]. */
typedef struct msl_tap {
  const char* name;
  void* data;
} msl_tap;

typedef struct msl_step {
  uint32_t struct_size;
  uint32_t tap_count;
  /* attention block */
  const void* attn_input;       /* BF16 [T, 8192] */
  const void* positions;        /* I64 [T], for RoPE only */
  const void* cache_loc;        /* I64 [T]: flat cache row (page * page_size + offset); < 0: not stored */
  const void* cu_seqlens_q;     /* I32 [B + 1] */
  const void* cache_seqlens;    /* I32 [B], new tokens included */
  const void* page_table;       /* I32 [B, table_width] */
  int64_t table_stride;         /* elements between rows of page_table */
  const void* k_scale;          /* F32 [1] */
  const void* v_scale;          /* F32 [1] */
  void* k_cache;                /* E4M3 [pages, page_size, 2, 64] */
  void* v_cache;
  int64_t pages;
  /* boundary and MoE block */
  const void* stream;           /* F32 [T, 8192] */
  const void* local_start;      /* I32 [1]: first expert of this rank; experts wrap at 256 */
  const void* num_tokens_non_padded; /* I32 [1] or null: tokens from this one on take no route */
  void* topk_ids;               /* I32 [T, 8], out */
  /* final block */
  void* hidden;                 /* BF16 [T, 8192], out; null if the layer has no next_pre_attn_norm */
  void* stream_out;             /* F32 [T, 8192], out */
  /* borders of the segments: unused (null) in msl_forward */
  void* attn_out;               /* BF16 [T, 8192]: out of the attention block, into the MoE block */
  void* stream_after_attn;      /* F32 [T, 8192]: out of the MoE block, into the final block */
  void* moe_mix;                /* BF16 [T, 4096]: out of the MoE block, into the final block */
  /* intermediate results wanted by msl_forward; needs a plan with taps = 1 */
  const msl_tap* taps;
  /* of MSL_ATTENTION_FA3, or null; in any of the calls with an attention block */
  const msl_scheduler_metadata* scheduler_metadata;
} msl_step;

/* The whole layer; the collectives are the identity. `stream` is a cudaStream_t. */
msl_status msl_forward(const msl_layer* layer, const msl_plan* plan, msl_workspace* workspace, const msl_step* step,
                       void* stream);
/* The same in three calls. Sum attn_out over the ranks after the first, moe_mix after the second. At up to 8 tokens the
 * unpooler is sliced over the ranks: then the third is msl_unpool_block, a gather, and msl_ffn_block. */
msl_status msl_attention_block(const msl_layer* layer, const msl_plan* plan, msl_workspace* workspace,
                               const msl_step* step, void* stream);
msl_status msl_moe_block(const msl_layer* layer, const msl_plan* plan, msl_workspace* workspace,
                         const msl_step* step, void* stream);
msl_status msl_final_block(const msl_layer* layer, const msl_plan* plan, msl_workspace* workspace,
                           const msl_step* step, void* stream);
/* moe_mix to this rank's slice of the unpooled branch, F32 [T, 1024], to be gathered over the ranks. */
msl_status msl_unpool_block(const msl_layer* layer, const msl_plan* plan, msl_workspace* workspace,
                            const msl_step* step, void* slice, void* stream);
/* The final boundary over the gathered slices, F32 [ranks, T, 1024]. */
msl_status msl_ffn_block(const msl_layer* layer, const msl_plan* plan, msl_workspace* workspace,
                         const msl_step* step, const void* slices, uint32_t ranks, void* stream);

#ifdef __cplusplus
}
#endif
#endif /* MUSE_SPARK_LAYER_H */
