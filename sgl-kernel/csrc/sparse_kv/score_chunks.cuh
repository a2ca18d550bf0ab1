// Which chunks of logical pages hold candidates, and which of them a warp scores.
//
// A chunk is kChunk pages of one (request, kv head), counted from page 0, whatever the batch: a request's result does not
// depend on its neighbours.
#pragma once
#include "common.cuh"

namespace skv {

constexpr int kChunk = 64;

// Bounds of one request: chunks [first, first + count) hold a candidate of some row.
struct Spans {
  int* start;  // [n + 1] chunks before each request
  int* first;  // [n]
};

__device__ __forceinline__ void find_spans(const SkvScore& args, const Spans& spans, BlockScratch& scratch) {
  int before = 0, n = static_cast<int>(args.n), rows = static_cast<int>(args.rows);
  for (int base = 0; base < n; base += blockDim.x) {
    int i = base + threadIdx.x, first = 0, last = 0;
    if (i < n) {
      int64_t low = args.table_width, high = 0;
      for (int r = 0; r < rows; ++r) {
        int64_t lo = get(args.lo, i * rows + r), hi = min(get(args.hi, i * rows + r), args.table_width);
        if (lo >= hi) continue;
        low = min(low, lo);
        high = max(high, hi);
      }
      if (low < high) {
        first = static_cast<int>(low / kChunk);
        last = static_cast<int>((high + kChunk - 1) / kChunk);
      }
      spans.first[i] = first;
    }
    int total, mine = block_scan(last - first, scratch, total);
    if (i < n) spans.start[i] = before + mine;
    before += total;
  }
  if (threadIdx.x == 0) spans.start[n] = before;
  __syncthreads();
}

// Chunks for one warp: first the one of its own number, then whichever nobody has taken. Blocks that start late, where
// other kernels hold multiprocessors, find less to do.
struct Tickets {
  int32_t* counters;
  int items, blocks, warps;
  int ticket = 0;

  __device__ __forceinline__ bool more() const { return items > warps; }
  __device__ __forceinline__ void draw() {
    if (more() && lane_id() == 0) ticket = atomicAdd(counters, 1);
  }
  __device__ __forceinline__ int next() const { return more() ? warps + __shfl_sync(kAll, ticket, 0) : items; }
  // The last block leaves the counters as the next call expects them.
  __device__ __forceinline__ void finish() const {
    if (!more()) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(counters + 1, 1) != blocks - 1) return;
    atomicExch(counters, 0);
    atomicExch(counters + 1, 0);
  }
};

struct Item {
  int n, head, page;  // request, kv head, first logical page of the chunk
};

// Chunks that the tables of all requests have room for.
__device__ __forceinline__ int chunks_of(const SkvScore& args) {
  return static_cast<int>((args.table_width + kChunk - 1) / kChunk);
}

// All chunks of each (request, kv head) when `every`, those with a candidate otherwise.
__device__ __forceinline__ Item find_item(const SkvScore& args, const Spans& spans, bool every, int n, int heads, int item) {
  int chunk = item / heads;
  if (every) return Item{chunk / chunks_of(args), item % heads, chunk % chunks_of(args) * kChunk};
  int low = 0, high = n - 1;  // last request that starts at or before the chunk
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (spans.start[middle] <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return Item{low, item % heads, (spans.first[low] + chunk - spans.start[low]) * kChunk};
}

__device__ __forceinline__ Tickets tickets_for(const SkvScore& args, int items) {
  int blocks = static_cast<int>(args.blocks);
  return Tickets{args.tickets, items, blocks, blocks * static_cast<int>(blockDim.x >> 5)};
}

}  // namespace skv
