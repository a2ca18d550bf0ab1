// Copies named units, or whole pages for a prefill, from host memory.
#include "mover.cuh"

namespace skv {

constexpr int kPlainThreads = 512;

// Whole pages into a staging buffer [count][heads] of units: unit i is head i % heads of page i / heads.
struct PageRows {
  SkvInts pages;
  int heads;
  int page_size;
  int first;
  int stride;
  int count;
  __device__ __forceinline__ int4 load(int i) const {
    int unit = first + i * stride;
    return make_int4(static_cast<int>(get(pages, unit / heads)), unit % heads, unit / heads * heads, page_size);
  }
};

template <bool kBulk, typename Rows>
__device__ __forceinline__ void move(const SkvView& view, const Rows& rows, char* stages, int num_stages,
                                     MoverScratch& scratch, const int32_t* urgent) {
  if (kBulk) {
    move_bulk(view, rows, stages, num_stages, scratch, urgent);
  } else {
    move_plain(view, rows, urgent);
  }
}

__device__ __forceinline__ int share(int total) {
  int mine = total - static_cast<int>(blockIdx.x);
  return mine > 0 ? (mine - 1) / static_cast<int>(gridDim.x) + 1 : 0;
}

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
  if (threadIdx.x == 0) atomicAdd(work.urgent, 1);
  move<kBulk>(view, rows, stages, num_stages, scratch, nullptr);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(work.urgent, -1);
}

template <bool kBulk>
__global__ void stage_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvStage args,
                             int num_stages) {
  SKV_DYNAMIC_SHARED(stages);
  __shared__ MoverScratch scratch;
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads);
  PageRows rows{args.pages, heads, static_cast<int>(view.page_size), static_cast<int>(blockIdx.x),
                static_cast<int>(gridDim.x), share(static_cast<int>(args.count) * heads)};
  SkvView target = view;
  target.kv = args.target;
  target.slots = 1;  // unit (head, slot) lies at head + slot, and slot is page number * heads
  move<kBulk>(target, rows, stages, num_stages, scratch, nullptr);
}

}  // namespace skv

using namespace skv;

static size_t stage_bytes(const SkvView& view, int stages) {
  return static_cast<size_t>(stages) * 2 * view.page_size * view.head_dim * (view.dtype == SKV_FP32 ? 4 : 2);
}

SKV_EXPORT int skv_gather(const SkvView* view, const SkvWork* work, const SkvGather* args, const Launch* where) {
  bool bulk = use_bulk(*view, where->device);
  int stages = bulk ? mover_stages(*view, where->device) : 0;
  return launch(*where, bulk ? gather_kernel<true> : gather_kernel<false>, dim3(args->blocks), bulk ? 32 : kPlainThreads,
                stage_bytes(*view, stages), *view, *work, *args, stages);
}

SKV_EXPORT int skv_stage(const SkvView* view, const SkvStage* args, const Launch* where) {
  bool bulk = use_bulk(*view, where->device);
  int stages = bulk ? mover_stages(*view, where->device) : 0;
  return launch(*where, bulk ? stage_kernel<true> : stage_kernel<false>, dim3(args->blocks), bulk ? 32 : kPlainThreads,
                stage_bytes(*view, stages), *view, *args, stages);
}
