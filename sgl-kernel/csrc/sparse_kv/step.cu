// What a decode step knows about its batch, in one launch instead of twenty; counting right guesses, likewise.
#include "common.cuh"

namespace skv {

// Physical page of a logical one of the request in row `row` of SGLang's token table; junk beyond what it owns.
__device__ __forceinline__ int32_t page_of(const SkvStep& args, int64_t row, int64_t logical) {
  int64_t token = logical * args.page_size;
  if (token >= args.row_length) return 0;
  return static_cast<int32_t>(args.req_to_token[row * args.row_length + token] / args.page_size);
}

__global__ void step_kernel(const __grid_constant__ SkvStep args) {
  wait_for_previous_kernel();
  int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = first; n < args.n; n += stride) {
    int64_t row = get(args.req, n), length = get(args.length, n), open = length / args.page_size;
    args.active[n] = row > 0;
    args.lengths[n] = length;
    args.open_page[n] = open < args.width ? page_of(args, row, open) : 0;
    args.offset[n] = length % args.page_size;
    args.closed[n] = open;
    args.last_tokens[n] = length % args.page_size + 1;
    for (int64_t r = 0; r < args.rows; ++r) {
      int64_t hi = max(length + r + 1 - args.window, int64_t(0)) / args.page_size;
      args.lo[n * args.rows + r] = min(args.sinks, hi);
      args.hi[n * args.rows + r] = hi;
    }
  }
  for (int64_t i = first; i < args.n * args.width; i += stride)
    args.table[i] = page_of(args, get(args.req, i / args.width), i % args.width);
}

// counts[0] += right guesses, counts[1] += guesses; a negative guess is none. One block.
__global__ void count_guides_kernel(SkvInts guess, SkvInts token, int count, Counter64* counts) {
  wait_for_previous_kernel();
  int right = 0, guesses = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    int64_t guessed = get(guess, i);
    guesses += guessed >= 0;
    right += guessed >= 0 && guessed == get(token, i);
  }
  __syncwarp();
  right = __reduce_add_sync(kAll, right);
  guesses = __reduce_add_sync(kAll, guesses);
  if (lane_id() != 0) return;
  if (right) atomicAdd(counts, static_cast<Counter64>(right));
  if (guesses) atomicAdd(counts + 1, static_cast<Counter64>(guesses));
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_step(const SkvStep* args, const Launch* where) {
  int64_t blocks = (args->n * args->width + 255) / 256;
  return launch(*where, step_kernel, dim3(static_cast<unsigned>(blocks < 1024 ? blocks : 1024)), 256, 0, *args);
}

SKV_EXPORT int skv_count_guides(const SkvInts* guess, const SkvInts* token, int64_t count, int64_t* counts,
                                const Launch* where) {
  return launch(*where, count_guides_kernel, dim3(count > 0), 128, 0, *guess, *token, static_cast<int>(count),
                reinterpret_cast<Counter64*>(counts));
}
