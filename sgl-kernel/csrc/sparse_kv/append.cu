// Row 0's token: its open unit made resident, K/V written to the slot and through to the host, landmark at page close.
#include "landmark.cuh"
#include "mover.cuh"
#include "tables.cuh"

namespace skv {

// One warp writes one request's token. Without a slot (the cache was too small, which is reported) the host still gets it.
__device__ __forceinline__ void write_one(const SkvView& view, const SkvAppend& args, int n, int head, int slot) {
  int dim = static_cast<int>(view.head_dim), bytes = dim * element_bytes(view.dtype), pieces = bytes >> 4;
  int64_t page = get(args.page, n), offset = get(args.offset, n);
  int64_t unit = 2 * view.page_size * bytes, half = view.page_size * bytes;
  char* cached = static_cast<char*>(view.kv) + (head * view.slots + slot) * unit;
  char* truth = static_cast<char*>(view.host) + (page * view.heads + head) * unit;
  int element = element_bytes(view.dtype);
  auto* k = reinterpret_cast<const int4*>(static_cast<const char*>(args.k) + (n * args.stride_k + head * dim) * element);
  auto* v = reinterpret_cast<const int4*>(static_cast<const char*>(args.v) + (n * args.stride_v + head * dim) * element);
  for (int i = lane_id(); i < 2 * pieces; i += 32) {
    bool is_value = i >= pieces;
    int piece = is_value ? i - pieces : i;
    int4 data = is_value ? v[piece] : k[piece];
    int64_t place = (is_value ? half : 0) + offset * bytes + piece * 16;
    if (slot >= 0) *reinterpret_cast<int4*>(cached + place) = data;
    if (args.through) *reinterpret_cast<int4*>(truth + place) = data;
  }
}

// The same warp makes the landmark of a page that the token closes.
__device__ __forceinline__ void close_one(const SkvView& view, const SkvAppend& args, int n, int head, int slot) {
  if (get(args.offset, n) != view.page_size - 1 || slot < 0) return;
  int64_t page = get(args.page, n), dim = view.head_dim, bytes = dim * element_bytes(view.dtype);
  const char* cached = static_cast<const char*>(view.kv) + (head * view.slots + slot) * 2 * view.page_size * bytes;
  __syncwarp();  // the lanes read each other's part of the new key
  with_type(view.dtype, [&](auto type) {
    auto* keys = reinterpret_cast<const decltype(type)*>(cached);
    make_landmark<decltype(type)>(view, page * view.heads + head, [&](int t) { return keys + t * dim; });
  });
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    append_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvWork work,
                  const __grid_constant__ SkvAppend args) {
  __shared__ TableScratch scratch;
  begin_tally(scratch);
  wait_for_previous_kernel();
  int head = static_cast<int>(blockIdx.x);
  SkvResolve request{};
  request.pages = args.page;
  request.tokens = args.offset;
  request.stride_n = 1;
  request.active = args.active;
  request.slots = args.slots;
  request.n = args.n;
  request.width = 1;
  request.step = args.step;
  Entries entries{&request, view.heads, head, static_cast<int>(args.n), false, false};
  auto* units = reinterpret_cast<int4*>(work.rows);

  PageTable table{&request, nullptr, 0, 0, 0};
  Selection selection(view, entries);
  bool missing = selection.claim_missing(work, table, false, true, scratch);
  selection.take_flags();
  if (missing) {
    hand_out(view, entries, work, scratch.step, kResolve, true, list_of(view, work, 0, head), units, -1,
             static_cast<int>(head * work.list_width), scratch);
    write_slots(view, entries, table, scratch);
    // The committed tokens of a page that comes back: few units, few bytes, and the write below must come after them.
    move_plain(view, UnitRows{units, scratch.first, 1, scratch.skip ? 0 : scratch.kept}, nullptr);
    __syncthreads();
  }
  add_tally(view, scratch);
  for (int n = warp_id(); n < args.n; n += blockDim.x >> 5) {
    int slot = __ldcg(args.slots + n * view.heads + head);
    if (entries.page(n, view) < 0) continue;
    write_one(view, args, n, head, slot);
    close_one(view, args, n, head, slot);
  }
}

// The slot of one request's open unit; false where there is no request.
__device__ __forceinline__ bool find_open(const SkvView& view, const SkvAppend& args, int n, int head, int& slot) {
  int64_t page = get(args.page, n);
  if (!args.active[n] || page < 0 || page >= view.pages) return false;
  slot = args.slots ? args.slots[n * view.heads + head] : __ldcg(slot_row(view, head) + page);
  return true;
}

// A warp for each unit, and one more to put its queries in order.
__global__ void write_token_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvAppend args) {
  wait_for_previous_kernel();
  int64_t item = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) >> 5, units = args.n * view.heads;
  bool orders = item >= units;
  if (orders) item -= units;
  if (item >= units) return;
  int n = static_cast<int>(item / view.heads), head = static_cast<int>(item % view.heads), slot;
  if (orders) {
    if (args.q_out == nullptr) return;
    int element = element_bytes(view.dtype), bytes = static_cast<int>(args.group * view.head_dim) * element;
    auto* from = static_cast<const char*>(args.q) + n * args.stride_q * element + static_cast<int64_t>(head) * bytes;
    copy16(static_cast<char*>(args.q_out) + item * bytes, from, bytes, lane_id(), 32);
  } else if (find_open(view, args, n, head, slot)) {
    write_one(view, args, n, head, slot);
    if (args.slots) close_one(view, args, n, head, slot);
  }
}

__global__ void close_pages_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvAppend args) {
  wait_for_previous_kernel();
  int64_t item = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) >> 5;
  if (item >= args.n * view.heads) return;
  int n = static_cast<int>(item / view.heads), head = static_cast<int>(item % view.heads), slot;
  if (find_open(view, args, n, head, slot)) close_one(view, args, n, head, slot);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_append(const SkvView* view, const SkvWork* work, const SkvAppend* args, const Launch* where) {
  return launch(*where, append_kernel, dim3(view->heads), kMaxThreads, 0, *view, *work, *args);
}

SKV_EXPORT int skv_write_token(const SkvView* view, const SkvAppend* args, const Launch* where) {
  unsigned blocks = static_cast<unsigned>((2 * args->n * view->heads + 7) / 8);
  return launch(*where, write_token_kernel, dim3(blocks), 256, 0, *view, *args);
}

SKV_EXPORT int skv_close_pages(const SkvView* view, const SkvAppend* args, const Launch* where) {
  unsigned blocks = static_cast<unsigned>((args->n * view->heads + 7) / 8);
  return launch(*where, close_pages_kernel, dim3(blocks), 256, 0, *view, *args);
}
