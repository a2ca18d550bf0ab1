// Whole pages of a prefix from the host by the device's copy engine, and which pages are worth it.
#include "common.cuh"

#ifndef SPARSE_KV_EMULATE
#include <vector>
#endif

namespace skv {

// A thread counts one page of one layer.
__global__ void __launch_bounds__(256) absent_kernel(const __grid_constant__ SkvAbsent args) {
  wait_for_previous_kernel();
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= args.layers * args.count) return;
  int64_t page = get(args.pages, i % args.count);
  const auto* slot_of = reinterpret_cast<const int32_t*>(args.tables[i / args.count]);
  int absent = 0;
  if (page >= 0 && page < args.num_pages)
    for (int64_t head = 0; head < args.heads; ++head) absent += __ldcg(slot_of + head * args.num_pages + page) < 0;
  args.absent[i] = static_cast<uint8_t>(absent);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_absent(const SkvAbsent* args, const Launch* where) {
  unsigned blocks = static_cast<unsigned>((args->layers * args->count + 255) / 256);
  return launch(*where, absent_kernel, dim3(blocks), 256, 0, *args);
}

#if defined(SPARSE_KV_EMULATE)
SKV_EXPORT int64_t skv_lands() { return 1; }
#elif CUDART_VERSION >= 12080
// Whether many copies can be handed over at once, which the driver must know, too.
SKV_EXPORT int64_t skv_lands() {
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12080;
}
#else
SKV_EXPORT int64_t skv_lands() { return 0; }
#endif

SKV_EXPORT int skv_land(const SkvView* view, const SkvLand* args, const Launch* where) {
  size_t page = static_cast<size_t>(view->heads * 2 * view->page_size * view->head_dim * (view->dtype == SKV_FP32 ? 4 : 2));
  const char* host = static_cast<const char*>(view->host);
  char* landing = static_cast<char*>(args->landing);
#if defined(SPARSE_KV_EMULATE)
  (void)where;
  for (const int64_t* run = args->runs; run != args->runs + 3 * args->count; run += 3)
    memcpy(landing + run[1] * page, host + run[0] * page, run[2] * page);
  return 0;
#elif CUDART_VERSION >= 12080
  if (args->count == 0) return 0;
  thread_local std::vector<void*> to, from;
  thread_local std::vector<size_t> sizes;
  to.clear(), from.clear(), sizes.clear();
  for (const int64_t* run = args->runs; run != args->runs + 3 * args->count; run += 3) {
    to.push_back(landing + run[1] * page);
    from.push_back(const_cast<char*>(host) + run[0] * page);
    sizes.push_back(run[2] * page);
  }
  cudaError_t status = cudaSetDevice(where->device);
  if (status != cudaSuccess) return status;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t all = 0;
#if CUDART_VERSION >= 13000
  status = cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &all, 1, where->stream);
#else
  size_t failed = 0;
  status = cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &all, 1, &failed,
                                where->stream);
#endif
  if (status != cudaSuccess) cudaGetLastError();  // told here; the next launch would take it for its own
  return status;
#else
  (void)host, (void)landing, (void)page, (void)where;
  return cudaErrorNotSupported;
#endif
}
