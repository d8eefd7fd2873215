// Sums and gathers of a few tokens over GPUs that write into each other's memory.
//
// Every rank pushes its whole part into every other rank's inbox and adds, by itself and in the order of the ranks,
// what comes in: one trip over the wire, the same bits everywhere, FP32 sums that are rounded once. Each packet
// carries the number of the call beside each half of its message, so that who reads it knows it is whole and new,
// without fences or a barrier between the ranks. Odd and even calls have inboxes of their own: a sender is at most
// one call ahead, since it needs the others' packets to end a call.
//
// Pushing everything to everyone costs (ranks - 1) times the part, twice for the flags, so this is for messages of
// up to about a megabyte; beyond, a ring that reduces on the way is better. A thread owns a packet (4 BF16 or 2 FP32) in
// each pass; 64 CTAs of 256 threads, so 8 tokens of 8192 columns are one pass. The kernel keeps the rules of dependent
// launch: its successors are resident and fill their rings with weights while it waits for the other ranks.
//
// A wait is bounded: after the time-out the word `lost` says for whom it was, and no later call waits.
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../include/peer.h"

namespace msl {
namespace {
constexpr int kPeerThreads = 256;

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
// Volatile accesses of 16 bytes: neither half of a packet is seen without its flag.
__device__ __forceinline__ void push(uint4* slot, uint2 v, uint32_t call) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(slot), "r"(v.x), "r"(call), "r"(v.y) : "memory");
}
__device__ __forceinline__ uint4 peek(const uint4* slot) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(slot) : "memory");
  return v;
}
__device__ __forceinline__ uint2 receive(const PeerParams& p, const uint4* slot, uint32_t call, int sender,
                                         uint64_t began) {
  volatile uint32_t* lost = p.lost;
  for (uint32_t tries = 1;; tries++) {
    const uint4 v = peek(slot);
    if (v.y == call && v.w == call) return make_uint2(v.x, v.z);
    if (tries % 1024 != 0) continue;
    if (*lost != 0) return make_uint2(0, 0);
    if (now_ns() - began > p.timeout_ns) {
      *lost = 1 + sender;
      return make_uint2(0, 0);
    }
  }
}

template <bool kGather>
__global__ void __launch_bounds__(kPeerThreads) peer_kernel(const __grid_constant__ PeerParams p) {
  pdl_launch();
  pdl_wait();
  const uint64_t began = now_ns();
  const uint32_t call = p.calls[blockIdx.x] + 1;
  const int64_t inbox = int64_t(call & 1) * p.ranks * p.capacity;
  const int packets = p.elements / (kGather ? 2 : 4);
  uint2* data = static_cast<uint2*>(p.data);
  const uint2* own = data + (kGather ? int64_t(p.rank) * packets : 0);
  const int first = blockIdx.x * kPeerThreads + threadIdx.x, step = kPeerCtas * kPeerThreads;
  for (int i = first; i < packets; i += step) {
    const uint2 v = __ldcg(own + i);
    for (int ahead = 1; ahead < p.ranks; ahead++) {
      const int to = (p.rank + ahead) % p.ranks;
      push(reinterpret_cast<uint4*>(p.inboxes[to]) + inbox + int64_t(p.rank) * p.capacity + i, v, call);
    }
  }
  const uint4* mine = reinterpret_cast<const uint4*>(p.inboxes[p.rank]) + inbox;
  for (int i = first; i < packets; i += step) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int from = 0; from < p.ranks; from++) {
      uint2 v;
      if (from == p.rank) v = __ldcg(own + i);
      else v = receive(p, mine + int64_t(from) * p.capacity + i, call, from, began);
      if constexpr (kGather) {
        if (from != p.rank) data[int64_t(from) * packets + i] = v;
      } else {
        sum.x += __uint_as_float(v.x << 16), sum.y += __uint_as_float(v.x & 0xFFFF0000u);
        sum.z += __uint_as_float(v.y << 16), sum.w += __uint_as_float(v.y & 0xFFFF0000u);
      }
    }
    if constexpr (!kGather) {
      const __nv_bfloat162 lo = __floats2bfloat162_rn(sum.x, sum.y), hi = __floats2bfloat162_rn(sum.z, sum.w);
      data[i] = make_uint2(reinterpret_cast<const uint32_t&>(lo), reinterpret_cast<const uint32_t&>(hi));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.calls[blockIdx.x] = call;
}
}  // namespace

int peer_sum(const PeerParams& p, const Launch& l) {
  return launch(peer_kernel<false>, dim3(kPeerCtas), dim3(kPeerThreads), 0, l, p);
}
int peer_gather(const PeerParams& p, const Launch& l) {
  return launch(peer_kernel<true>, dim3(kPeerCtas), dim3(kPeerThreads), 0, l, p);
}
int prepare_peer() {
  if (int e = prepare_kernel(peer_kernel<false>, 0)) return e;
  return prepare_kernel(peer_kernel<true>, 0);
}
}  // namespace msl
