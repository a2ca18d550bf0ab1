// Around the attention kernel: queries and page tables into the form it reads, row 1's own token into what it returns.
// Its sequences are (request, kv head) pairs, each with the query heads of both rows.
#include "common.cuh"

namespace skv {

// One block per sequence: its part of the page table, and its queries in order.
__global__ void prepare_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvAttend args) {
  __shared__ BlockScratch scratch;
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads), n = blockIdx.x / heads, head = blockIdx.x % heads;
  int before = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) before += static_cast<int>(max(get(args.num_pages, i), int64_t(1)));
  before = block_sum(before, scratch, 0);
  int pages = static_cast<int>(get(args.num_pages, n));
  // A padded row attends to one token of some slot: no kernel downstream needs to know of empty sequences.
  int shown = max(pages, 1), first = before * heads + head * shown;
  int32_t* indices = args.indices + first;
  const int32_t* slots = args.slots + (static_cast<int64_t>(n) * heads + head) * args.width;
  for (int c = threadIdx.x; c < shown; c += blockDim.x) {
    int slot = c < pages ? slots[c] : 0;
    indices[c] = head * static_cast<int>(view.slots) + (slot >= 0 && slot < view.slots ? slot : 0);
  }
  if (threadIdx.x == 0) {
    args.indptr[blockIdx.x] = first;
    if (blockIdx.x == gridDim.x - 1) args.indptr[gridDim.x] = first + shown;
    args.last_page[blockIdx.x] = pages > 0 ? static_cast<int>(get(args.last_tokens, n)) : 1;
  }
  if (args.q_out == nullptr) return;
  int element = element_bytes(view.dtype), bytes = static_cast<int>(args.group * view.head_dim) * element, pieces = bytes >> 4;
  for (int i = threadIdx.x; i < args.rows * pieces; i += blockDim.x) {
    int row = i / pieces, piece = i % pieces;
    auto* source = static_cast<const char*>(args.q) + (n * args.rows + row) * args.stride_q * element +
                   static_cast<int64_t>(head) * bytes;
    auto* target = static_cast<char*>(args.q_out) + (blockIdx.x * args.rows + row) * bytes;
    reinterpret_cast<int4*>(target)[piece] = reinterpret_cast<const int4*>(source)[piece];
  }
}

// One warp per query head: row 0's result moves to its place, row 1's is joined with its own token. Everything is loaded
// before anything is looked at, and what is older than attention's kernels before those end.
template <typename T>
__global__ void finish_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvAttend args) {
  constexpr int kMost = 8;  // elements of a lane: head_dim at most 256
  int item = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) >> 5);
  int heads = static_cast<int>(view.heads), rows = static_cast<int>(args.rows), group = static_cast<int>(args.group);
  int dim = static_cast<int>(view.head_dim), line = item / group, query = item - line * group;  // line: [n][heads][rows]
  int sequence = line / rows, row = line - sequence * rows, n = sequence / heads, head = sequence - n * heads;
  if (n >= args.n) return;
  auto* partial = static_cast<const T*>(args.partial) + static_cast<int64_t>(item) * dim;
  int64_t place = static_cast<int64_t>(head * group + query) * dim;
  auto* out = static_cast<T*>(args.out) + static_cast<int64_t>(n * rows + row) * heads * group * dim + place;
  // Row 0 reads row 1's keys and values too, and forgets them.
  auto* q = static_cast<const T*>(args.q) + (n * rows + row) * args.stride_q + place;
  auto* k = static_cast<const T*>(args.k_row1) + n * args.stride_k + head * dim;
  auto* v = static_cast<const T*>(args.v_row1) + n * args.stride_v + head * dim;

  T paged[kMost], asked[kMost], key[kMost], own_value[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    int d = i * 32 + lane_id();
    if (d >= dim) continue;
    asked[i] = q[d];
    key[i] = k[d];
    own_value[i] = v[d];
  }
  int64_t pages = get(args.num_pages, n);
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kMost; ++i)
    if (i * 32 + lane_id() < dim) paged[i] = partial[i * 32 + lane_id()];
  float rest = args.lse[item];
  bool padded = pages <= 0;

  float rest_weight = 1.0f, own_weight = 0.0f, total = 1.0f;
  if (row == 1 && !padded) {
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i * 32 + lane_id() < dim) dot += to_float(asked[i]) * to_float(key[i]);
    for (int bits = 16; bits; bits >>= 1) dot += __shfl_xor_sync(kAll, dot, bits);
    float own = dot * static_cast<float>(args.scale) * kLog2e, top = fmaxf(own, rest);
    own_weight = exp2f(own - top);
    rest_weight = exp2f(rest - top);
    total = own_weight + rest_weight;
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    int d = i * 32 + lane_id();
    if (d >= dim) continue;
    float value = padded ? 0.0f : to_float(paged[i]);
    if (row == 1 && !padded) value = (value * rest_weight + to_float(own_value[i]) * own_weight) / total;
    out[d] = from_float<T>(value);
  }
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_attend_prepare(const SkvView* view, const SkvAttend* args, const Launch* where) {
  return launch(*where, prepare_kernel, dim3(args->n * view->heads), 128, 0, *view, *args);
}

SKV_EXPORT int skv_attend_finish(const SkvView* view, const SkvAttend* args, const Launch* where) {
  int64_t warps = args->n * view->heads * args->rows * args->group;
  auto* kernel = view->dtype == SKV_BF16   ? finish_kernel<__nv_bfloat16>
                 : view->dtype == SKV_FP16 ? finish_kernel<__half>
                                           : finish_kernel<float>;
  return launch(*where, kernel, dim3(static_cast<unsigned>((warps + 7) / 8)), 256, 0, *view, *args);
}
