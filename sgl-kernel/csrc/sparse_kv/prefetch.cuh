// Planning of a prefetch by one block per kv head: alone, or with another layer's in one launch.
#pragma once
#include "tables.cuh"

namespace skv {

// Enters the predicted units of one head that are not resident. All threads of the block call it, after begin_tally.
__device__ __forceinline__ void plan_head(const SkvView& view, const SkvWork& work, const SkvResolve& request, int head,
                                          int job, TableScratch& scratch) {
  int step = *request.step, cap = *request.cap;
  Entries entries{&request, view.heads, head, cap < 0 ? 0 : static_cast<int>(request.n * request.width), true, false};
  if (claim_predicted(view, entries, step, cap, scratch)) {
    hand_out(view, entries, work, step, kPrefetch, false, list_of(view, work, job, head),
             reinterpret_cast<int4*>(request.units), job, 0, scratch);
  } else if (threadIdx.x == 0) {
    take_rows(view, work, request, job, 0);
  }
  add_tally(view, scratch);
}

}  // namespace skv
