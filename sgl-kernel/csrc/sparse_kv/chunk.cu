// A prefill's chunk: to the host, with the landmarks of the pages that it closes, and into slots.
#include "landmark.cuh"

namespace skv {

// A prefill chunk to the host, and the landmarks of the pages that it closes. A team of threads takes kTokens tokens of
// one head at a time, so that whole pages leave the GPU as contiguous kilobytes. Many teams hide the latency of their
// loads; they share few blocks, which leaves the other multiprocessors to the attention and the GEMMs beside them.
constexpr int kTokens = 16;
constexpr int kTeam = 256;
constexpr int kTeams = 4;  // of a block
constexpr int64_t kStoreBlocks = 8;

__device__ __forceinline__ const char* row_of(const SkvView& view, const void* base, int64_t stride, int64_t t, int head) {
  return static_cast<const char*>(base) + (t * stride + head * view.head_dim) * element_bytes(view.dtype);
}

// The landmark of the page that token t closes. One warp calls it.
__device__ __forceinline__ void summarise(const SkvView& view, const SkvChunk& args, int64_t t, int64_t loc, int head) {
  int size = static_cast<int>(view.page_size), dim = static_cast<int>(view.head_dim), lane = lane_id();
  int64_t unit = loc / size * view.heads + head;
  // A key of this chunk is taken from it: its copy on the host may still be on its way.
  unsigned inside = __ballot_sync(kAll, lane < size && t >= lane && get(args.loc, t - lane) == loc - lane);
  with_type(view.dtype, [&](auto type) {
    using T = decltype(type);
    const T* stored = static_cast<const T*>(view.host) + unit * 2 * size * dim;
    make_landmark<T>(view, unit, [&](int token) {
      int back = size - 1 - token;
      return inside >> back & 1 ? reinterpret_cast<const T*>(row_of(view, args.k, args.stride_k, t - back, head))
                                : stored + token * dim;
    });
  });
}

// turn: of the team. Pages close at the same place of every tile; another warp each time makes the landmark there.
__device__ __forceinline__ void store_tile(const SkvView& view, const SkvChunk& args, int64_t first, int head, int turn) {
  int bytes = static_cast<int>(view.head_dim) * element_bytes(view.dtype), pieces = bytes >> 4;
  int64_t half = view.page_size * bytes, unit = 2 * half, slots = view.pages * view.page_size;
  int tokens = static_cast<int>(min(static_cast<int64_t>(kTokens), args.tokens - first));
  for (int i = threadIdx.x % kTeam; args.through && i < tokens * pieces; i += kTeam) {
    int64_t t = first + i / pieces;
    int4 key = reinterpret_cast<const int4*>(row_of(view, args.k, args.stride_k, t, head))[i % pieces];
    int4 value = reinterpret_cast<const int4*>(row_of(view, args.v, args.stride_v, t, head))[i % pieces];
    int64_t loc = get(args.loc, t);
    if (loc < 0 || loc >= slots) continue;
    char* target = static_cast<char*>(view.host) + (loc / view.page_size * view.heads + head) * unit +
                   loc % view.page_size * bytes;
    reinterpret_cast<int4*>(target)[i % pieces] = key;
    reinterpret_cast<int4*>(target + half)[i % pieces] = value;
  }
  for (int64_t t = first + (warp_id() + turn) % (kTeam / 32); t < first + tokens; t += kTeam / 32) {
    int64_t loc = get(args.loc, t);
    if (loc < 0 || loc >= slots || loc % view.page_size != view.page_size - 1) continue;
    summarise(view, args, t, loc, head);
  }
}

__global__ void __launch_bounds__(kTeam * kTeams)
    store_chunk_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvChunk args) {
  wait_for_previous_kernel();
  int64_t items = (args.tokens + kTokens - 1) / kTokens * view.heads;
  int64_t team = blockIdx.x + threadIdx.x / kTeam * static_cast<int64_t>(gridDim.x);
  int turn = 0;
  for (int64_t item = team; item < items; item += gridDim.x * kTeams)
    store_tile(view, args, item / view.heads * kTokens, static_cast<int>(item % view.heads), turn++);
}

// A prefill chunk into the slots of those of its pages that have one: a warp writes one token of one head.
__global__ void __launch_bounds__(256)
    fill_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvChunk args) {
  wait_for_previous_kernel();
  int64_t item = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) >> 5;
  if (item >= args.tokens * view.heads) return;
  int64_t t = item / view.heads, head = item % view.heads, loc = get(args.loc, t), page = loc / view.page_size;
  if (loc < 0 || page >= view.pages) return;
  int slot = __ldcg(view.slot_of + head * view.pages + page);
  if (slot < 0) return;
  int element = element_bytes(view.dtype);
  int64_t bytes = view.head_dim * element, half = view.page_size * bytes;
  char* to = static_cast<char*>(view.kv) + (head * view.slots + slot) * 2 * half + loc % view.page_size * bytes;
  int64_t k = (t * args.stride_k + head * view.head_dim) * element, v = (t * args.stride_v + head * view.head_dim) * element;
  copy16(to, static_cast<const char*>(args.k) + k, static_cast<int>(bytes), lane_id(), 32);
  copy16(to + half, static_cast<const char*>(args.v) + v, static_cast<int>(bytes), lane_id(), 32);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_store_chunk(const SkvView* view, const SkvChunk* args, const Launch* where) {
  int64_t items = (args->tokens + kTokens - 1) / kTokens * view->heads;
  return launch(*where, store_chunk_kernel, dim3(static_cast<unsigned>(items < kStoreBlocks ? items : kStoreBlocks)),
                kTeam * kTeams, 0, *view, *args);
}

SKV_EXPORT int skv_fill(const SkvView* view, const SkvChunk* args, const Launch* where) {
  unsigned blocks = static_cast<unsigned>((args->tokens * view->heads + 7) / 8);
  return launch(*where, fill_kernel, dim3(blocks), 256, 0, *view, *args);
}

extern "C" int skv_resolve(const SkvView*, const SkvWork*, const SkvResolve*, const Launch*);
extern "C" int skv_invalidate(const SkvView*, const SkvInts*, int64_t, const Launch*);

// Makes the cache true to a chunk: clears the entries of the pages that it begins, enters them anew if asked to, fills.
SKV_EXPORT int skv_refresh(const SkvView* view, const SkvWork* work, const SkvResolve* begun, const SkvChunk* args,
                           int64_t install, const Launch* where) {
  int status = 0;
  if (begun->width > 0) {
    status = skv_invalidate(view, &begun->pages, begun->width, where);
    if (!status && install) status = skv_resolve(view, work, begun, where);
  }
  return status ? status : skv_fill(view, args, where);
}
