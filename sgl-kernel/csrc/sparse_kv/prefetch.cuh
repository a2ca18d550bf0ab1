// Planning of a prefetch by one block per kv head: alone, or beside another layer's append in one launch.
#pragma once
#include "tables.cuh"

namespace skv {

__device__ __forceinline__ int* list_of(const SkvView& view, const SkvWork& work, int job, int head) {
  return work.list + (job * view.heads + head) * work.list_width;
}

// The last of a job's blocks publishes the number of units and leaves the counters as the next call expects them. After a
// barrier, by the last thread, while the first warps have other things to do.
__device__ __forceinline__ void publish(const SkvWork& work, int job, int blocks, int32_t* count) {
  if (threadIdx.x != blockDim.x - 1) return;
  int32_t* cursor = work.cursor + 2 * job;
  __threadfence();
  if (atomicAdd(cursor + 1, 1) != blocks - 1) return;
  __threadfence();
  *count = atomicExch(cursor, 0);
  atomicExch(cursor + 1, 0);
}

// Enters the predicted units of one head that are not resident. All threads of the block call it, after begin_tally.
__device__ __forceinline__ void plan_head(const SkvView& view, const SkvWork& work, const SkvResolve& request, int head,
                                          int job, TableScratch& scratch) {
  int step = *request.step, cap = *request.cap;
  Entries entries{&request, view.heads, head, cap < 0 ? 0 : static_cast<int>(request.n * request.width), true, false};
  if (claim_predicted(view, entries, step, cap, scratch))
    hand_out(view, entries, work, step, kPrefetch, false, list_of(view, work, job, head),
             reinterpret_cast<int4*>(request.units), work.cursor + 2 * job, 0, scratch);
  __syncthreads();
  add_tally(view, scratch);
  publish(work, job, static_cast<int>(view.heads), request.count);
}

}  // namespace skv
