// What ranks whose memory is mapped into each other's address space exchange directly: beside ops.h, since a layer
// runs without it.
#pragma once
#include "params.h"

namespace msl {

constexpr int kPeerCtas = 64;  // of every launch, whatever its size: a CTA's call counter is every CTA's

// peer_sum, peer_gather. A packet is 16 bytes: 8 of the message, each half beside the number of the call.
struct PeerParams {
  void* data;           // sum: BF16 [elements], the partial and then the sum; gather: FP32 [ranks][elements], own part there
  uint32_t* inboxes[8]; // by rank: packets [2][ranks][capacity]; odd and even calls, by sender
  uint32_t* calls;      // [kPeerCtas] calls so far, the same in every word
  uint32_t* lost;       // host memory: 0, or 1 + the rank whose packets did not come in time
  uint64_t timeout_ns;
  int32_t elements;     // sum: a multiple of 4; gather: of 2
  int32_t capacity;     // packets a sender
  int32_t rank;
  int32_t ranks;
};

int peer_sum(const PeerParams&, const Launch&);
int peer_gather(const PeerParams&, const Launch&);
int prepare_peer();
}  // namespace msl
