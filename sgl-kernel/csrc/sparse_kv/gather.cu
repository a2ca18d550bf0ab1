// Copies named units from host memory into slots.
#include "mover.cuh"

namespace skv {

template <bool kBulk>
__global__ void gather_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvWork work,
                              const __grid_constant__ SkvGather args, int num_stages) {
  SKV_DYNAMIC_SHARED(stages);
  __shared__ MoverScratch scratch;
  wait_for_previous_kernel();
  UnitRows rows{reinterpret_cast<const int4*>(args.units), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
                *work.skip ? 0 : share(*args.count)};
  if (rows.count == 0) return;
  if (args.ahead) {
    move<kBulk>(view, rows, stages, num_stages, scratch, work.urgent);
    return;
  }
  if (threadIdx.x == 0) begin_urgent(work);
  move<kBulk>(view, rows, stages, num_stages, scratch, nullptr);
  __syncthreads();
  if (threadIdx.x == 0) end_urgent(view, work);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_gather(const SkvView* view, const SkvWork* work, const SkvGather* args, const Launch* where) {
  bool bulk = use_bulk(*view, where->device);
  int stages = bulk ? mover_stages(*view, where->device) : 0;
  return launch(*where, bulk ? gather_kernel<true> : gather_kernel<false>, dim3(args->blocks), bulk ? 32 : kPlainThreads,
                shared_bytes(*view, stages), *view, *work, *args, stages);
}
