// The best of a block's candidates, exactly: where the last one within the budget lies.
//
// Scores are spread over kBins bins of equal width between the lowest and the highest. The bin that holds the last page
// within the budget is found by a prefix sum; above it everything is chosen, and inside it, where few pages lie, each is
// ranked against the others. Should many lie there (equal scores, or outliers that squeeze the rest into one bin), a
// bitwise search takes over. Equal-width bins rather than the digits of a radix sort: log-probabilities share their
// exponents, so digits would send most pages to one counter.
#pragma once
#include "common.cuh"

namespace skv {

constexpr int kBins = 2048;
constexpr int kRankable = 1024;  // most pages of one bin that are ranked against each other
constexpr int kMaxGroup = 32;
constexpr int kHeld = 8;  // candidates that a thread keeps in registers

// Order-preserving map of floats to integers.
__device__ __forceinline__ uint32_t to_key(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);  // -0 counts as 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A candidate as one number: a higher score is more, and of equal ones the lower page.
using Rank = unsigned long long;
__device__ __forceinline__ Rank rank_of(float score, int i) {
  return static_cast<Rank>(to_key(score)) << 32 | ~static_cast<uint32_t>(i);
}

// The last that is chosen.
struct Limit {
  float score;
  int i;
  __device__ __forceinline__ bool admits(float other, int other_i) const {
    return other > score || (other == score && other_i <= i);
  }
};

struct SelectScratch {
  BlockScratch block;
  float norm[kMaxGroup];
  uint32_t low[32], high[32];
  int candidates[32], chosen[32];  // of each warp
  int listed, bin, above;
  int predicted;  // where row 0, which takes all, is also the last row
  Rank limit;
  int bins[kBins];
  Rank ranked[kRankable];
};

// Threads of a block are a power of two.
__device__ __forceinline__ int log2_of_threads() { return __popc(blockDim.x - 1); }

// A line's candidates, split over the block: warp w owns [w * 32 * turns, ...) of them, lane l every 32nd, so that the
// order of pages is that of (warp, turn, lane). A thread's first kHeld are in registers, the others in `rest`.
struct Candidates {
  float held[kHeld];
  float* rest;  // [span]
  int span, turns;
  int first, end;  // of this thread: index(turn) below `end` is one

  __device__ __forceinline__ Candidates(int span, float* rest) : rest(rest), span(span) {
    turns = (span + static_cast<int>(blockDim.x) - 1) >> log2_of_threads();
    first = warp_id() * turns * 32 + lane_id();
    end = min(span, (warp_id() + 1) * turns * 32);
  }
  __device__ __forceinline__ int index(int turn) const { return first + turn * 32; }
  // Calls f(turn, i, score, in registers) for every turn, all lanes together; a score of -inf is none.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int turn = 0; turn < kHeld; ++turn)
      if (turn < turns) f(turn, index(turn), held[turn], true);
#pragma unroll 1
    for (int turn = kHeld; turn < turns; ++turn)
      f(turn, index(turn), index(turn) < end ? rest[index(turn)] : -kInf, false);
  }
};

// Finds the last of the `budget` best candidates, of more than that. All threads call it, with the bins cleared.
struct Search {
  const Candidates& candidates;
  SelectScratch& scratch;
  float lowest, scale;

  __device__ __forceinline__ int bin(float score) const {
    int b = static_cast<int>((score - lowest) * scale);
    return min(max(b, 0), kBins - 1);
  }

  __device__ __forceinline__ Rank last(int budget, float highest) {
    float width = highest - lowest;
    scale = width > 0 && width < kInf ? (kBins - 1) / width : 0.0f;
    if (!(scale < kInf)) scale = 0.0f;
    candidates.each([&](int, int, float score, bool) {
      if (score > -kInf) atomicAdd(&scratch.bins[bin(score)], 1);
    });
    __syncthreads();
    // Each thread sums neighbouring bins, the first thread the highest.
    int each = kBins >> log2_of_threads(), top = kBins - 1 - static_cast<int>(threadIdx.x) * each;
    int mine = 0, total;
    for (int j = 0; j < each; ++j) mine += scratch.bins[top - j];
    int above = block_scan(mine, scratch.block, total);
    if (above < budget && above + mine >= budget) {
      int b = top;
      while (above + scratch.bins[b] < budget) above += scratch.bins[b--];
      scratch.bin = b;
      scratch.above = above;
    }
    __syncthreads();
    int border = scratch.bin, needed = budget - scratch.above, inside = scratch.bins[border];
    if (inside > kRankable) return crowded(border, needed);
    candidates.each([&](int, int i, float score, bool) {
      if (score > -kInf && bin(score) == border) scratch.ranked[atomicAdd(&scratch.listed, 1)] = rank_of(score, i);
    });
    __syncthreads();
    for (int e = threadIdx.x; e < inside; e += blockDim.x) {
      Rank me = scratch.ranked[e];
      int better = 0;
      for (int j = 0; j < inside; ++j) better += scratch.ranked[j] > me;
      if (better == needed - 1) scratch.limit = me;
    }
    __syncthreads();
    return scratch.limit;
  }

  // The highest rank that `needed` candidates of the bin reach, bit by bit.
  __device__ __forceinline__ Rank crowded(int border, int needed) const {
    Rank limit = 0;
#pragma unroll 1
    for (int bit = 63; bit >= 0; --bit) {
      Rank candidate = limit | Rank(1) << bit;
      int reached = 0;
      candidates.each([&](int, int i, float score, bool) {
        reached += score > -kInf && bin(score) == border && rank_of(score, i) >= candidate;
      });
      if (block_sum(reached, scratch.block, bit & 1) >= needed) limit = candidate;
    }
    return limit;
  }
};

}  // namespace skv
