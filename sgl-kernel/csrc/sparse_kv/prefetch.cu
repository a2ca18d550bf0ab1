// Prefetches of other layers, planned while a layer's own pages are chosen and looked up.
#include "prefetch.cuh"

namespace skv {

// Each is a job of its own from the second on: the first one's scratch is the resolve's that runs beside.
struct Prefetches {
  SkvView view[SKV_JOBS - 1];
  SkvResolve request[SKV_JOBS - 1];
};

__global__ void __launch_bounds__(kMaxThreads, 1)
    plan_prefetches_kernel(const __grid_constant__ SkvWork work, const __grid_constant__ Prefetches all) {
  __shared__ TableScratch scratch;
  begin_tally(scratch);
  wait_for_previous_kernel();
  int heads = static_cast<int>(all.view[0].heads), head = blockIdx.x % heads, i = blockIdx.x / heads;
  plan_head(all.view[i], work, all.request[i], head, i + 1, scratch);
}

}  // namespace skv

using namespace skv;

// Of layers with as many heads. The second is optional.
SKV_EXPORT int skv_plan_prefetches(const SkvWork* work, const SkvView* first_view, const SkvResolve* first,
                                   const SkvView* second_view, const SkvResolve* second, const Launch* where) {
  Prefetches all{};
  all.view[0] = *first_view;
  all.request[0] = *first;
  if (second != nullptr) {
    all.view[1] = *second_view;
    all.request[1] = *second;
  }
  unsigned blocks = static_cast<unsigned>(first_view->heads) * (second == nullptr ? 1 : 2);
  return launch(*where, plan_prefetches_kernel, dim3(blocks), kMaxThreads, 0, *work, all);
}
