// Slots for a true selection, for predicted pages and for a prefill chunk's pages; clearing entries; checking tables.
#include "mover.cuh"
#include "prefetch.cuh"

namespace skv {

// For measurements: lists a share of the hits, drawn anew in each step, to be brought again into the slots they have.
__device__ __forceinline__ void force_misses(const SkvView& view, const Entries& entries, int step, int rate, bool tally,
                                             int4* rows, TableScratch& scratch) {
  const int* slot_of = slot_row(view, entries.head);
  int missed = 0, tokens_in = 0;
  for (int first = warp_id() * 32; first < entries.count; first += blockDim.x) {
    int e = first + lane_id();
    int page = e < entries.count ? entries.page(e, view) : kNone;
    int slot = page >= 0 ? __ldcg(slot_of + page) : kNone;
    uint32_t hash = page * 0x9e3779b1u ^ (entries.head + 1) * 0x85ebca77u ^ step * 0xc2b2ae3du;
    hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
    hash = (hash ^ hash >> 12) * 0x297a2d39u;
    bool forced = slot >= 0 && (hash ^ hash >> 15) % 1000000u < static_cast<uint32_t>(rate);
    int tokens = forced ? entries.tokens(e, view) : 0;
    forced = tokens > 0;
    unsigned votes = __ballot_sync(kAll, forced);
    int start = lane_id() == 0 && votes ? atomicAdd(&scratch.forced, __popc(votes)) : 0;
    start = __shfl_sync(kAll, start, 0);
    if (!forced) continue;
    rows[start + __popc(votes & lanes_below())] = make_int4(page, entries.head, slot, tokens);
    ++missed;
    tokens_in += tokens;
  }
  __syncwarp();
  count(scratch, kMissed, missed);
  count(scratch, kTokensIn, tokens_in);
  if (tally) count(scratch, kHit, -missed);
  __syncthreads();
}

// A head's misses are moved by its own block and kMovers - 1 more: one block alone moves 18 GB/s, and often one head has
// most of the misses. What the table's block tells the others:
constexpr int kMovers = 3;
// A word for each block that helps, which it clears; the numbers behind them count when the word says that there is work.
enum Task { kFirst = 4, kKept, kForced, kTaskWords = 8 };
enum Word { kWait, kNothing, kUnits };
static_assert(kMovers <= kFirst);

__device__ __forceinline__ void announce(int32_t* task, int parts, int first, int kept, int forced) {
  if (threadIdx.x != 0) return;
  if (kept + forced > 0) {
    task[kFirst] = first;
    task[kKept] = kept;
    task[kForced] = forced;
    __threadfence();
  }
  for (int part = 1; part < parts; ++part)
    *static_cast<volatile int32_t*>(task + part) = kept + forced > part ? kUnits : kNothing;
}

template <bool kBulk>
__device__ __forceinline__ void move_part(const SkvView& view, const SkvWork& work, const SkvResolve& request, int head,
                                          int part, int parts, int first, int kept, int forced, char* stages,
                                          int num_stages, MoverScratch& mover) {
  auto* units = reinterpret_cast<const int4*>(request.units) + first;
  auto* again = reinterpret_cast<const int4*>(work.rows) + head * work.list_width;
  JoinedRows rows{units, kept, again, part, parts, (kept + forced - part + parts - 1) / parts};
  if (kBulk) {
    if (warp_id() == 0) move_bulk(view, rows, stages, num_stages, mover, nullptr);
  } else {
    move_plain(view, rows, nullptr);
  }
  __syncthreads();
}

// A block that helps to move one head's misses, once it knows of any. Blocks of tables come first in the launch, so the
// one that it waits for runs.
template <bool kBulk>
__device__ __forceinline__ void help(const SkvView& view, const SkvWork& work, const SkvResolve& request, int head,
                                     int part, int parts, char* stages, int num_stages, MoverScratch& mover) {
  __shared__ int told[3];
  if (threadIdx.x == 0) {
    int32_t* task = work.tasks + head * kTaskWords;
    auto* word = static_cast<volatile int32_t*>(task + part);
    int said;
    while ((said = *word) == kWait) __nanosleep(64);
    *word = kWait;
    if (said == kUnits) __threadfence();
    for (int i = 0; i < 3; ++i) told[i] = said == kUnits ? __ldcg(task + kFirst + i) : 0;
  }
  __syncthreads();
  int first = told[0], kept = told[1], forced = told[2];
  if (kept + forced == 0) return;
  if (threadIdx.x == 0) begin_urgent(work);
  move_part<kBulk>(view, work, request, head, part, parts, first, kept, forced, stages, num_stages, mover);
  if (threadIdx.x == 0) end_urgent(view, work);
}

// One block per head, then those that help.
template <bool kBulk>
__global__ void __launch_bounds__(kMaxThreads, 1)
    resolve_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvWork work,
                   const __grid_constant__ SkvResolve request, int num_stages) {
  SKV_DYNAMIC_SHARED(stages);
  __shared__ TableScratch scratch;
  __shared__ MoverScratch mover;
  begin_tally(scratch);
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads), head = blockIdx.x % heads, part = blockIdx.x / heads;
  int parts = gridDim.x / heads;
  auto mode = static_cast<Mode>(request.mode);
  if (mode == kPrefetch) {
    plan_head(view, work, request, head, 0, scratch);
    return;
  }
  if (part > 0) {
    help<kBulk>(view, work, request, head, part, parts, stages, num_stages, mover);
    return;
  }
  Entries entries{&request, view.heads, head, static_cast<int>(request.n * request.width), false, mode == kInstall};
  Selection selection(view, entries);
  PageTable table{&request, reinterpret_cast<int*>(stages), heads, head, static_cast<int>(view.slots)};
  bool missing = selection.claim_missing(work, table, mode == kResolve && request.tally, mode == kResolve, scratch);
  if (missing && request.open_tokens.data) excuse_open(view, entries, request.tally, scratch);
  int step = scratch.step, rate = scratch.rate;
  bool move = request.move && !scratch.skip;
  if (move && rate > 0) {
    auto* again = reinterpret_cast<int4*>(work.rows) + head * work.list_width;
    force_misses(view, entries, step, rate, request.tally, again, scratch);
  }
  int forced = move ? scratch.forced : 0;
  int32_t* task = work.tasks + head * kTaskWords;
  if (!missing) {
    if (parts > 1) announce(task, parts, 0, 0, forced);
    if (threadIdx.x == blockDim.x - 1) take_rows(view, work, request, 0, 0);
  }
  if (mode == kResolve) selection.take_flags();
  move = move && (scratch.claimed > scratch.begun || forced > 0);
  if (move && threadIdx.x == 0) begin_urgent(work);  // now: prefetches leave the link while victims are chosen
  if (missing) {
    hand_out(view, entries, work, step, mode, mode == kResolve, list_of(view, work, 0, head),
             reinterpret_cast<int4*>(request.units), 0, 0, scratch);
    if (parts > 1) announce(task, parts, scratch.first, move ? scratch.kept : 0, forced);
    write_slots(view, entries, table, scratch);
  }
  add_tally(view, scratch);
  if (!move) return;
  __syncthreads();  // the table's starts lie where units will arrive
  int first = missing ? scratch.first : 0;
  move_part<kBulk>(view, work, request, head, 0, parts, first, scratch.kept, forced, stages, num_stages, mover);
  if (threadIdx.x == 0) end_urgent(view, work);
}

// Clears the entries of pages, repeats allowed: whoever takes an entry out of slot_of frees its slot.
__global__ void invalidate_kernel(const __grid_constant__ SkvView view, SkvInts pages, int count) {
  wait_for_previous_kernel();
  int head = blockIdx.y;
  int wasted = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    int64_t page = get(pages, i);
    if (page < 0 || page >= view.pages) continue;
    int slot = atomicExch(slot_row(view, head) + page, kNone);
    if (slot < 0) continue;
    int64_t place = head * view.slots + slot;
    wasted += view.ahead[place] && take_ahead(view, place);
    view.page_of[place] = kNone;
    view.stamp[place] = kNever;
  }
  __syncwarp();
  wasted = __reduce_add_sync(kAll, wasted);
  if (lane_id() == 0 && wasted)
    atomicAdd(reinterpret_cast<Counter64*>(view.counters) + kWasted, static_cast<Counter64>(wasted));
}

__global__ void clear_kernel(const __grid_constant__ SkvView view) {
  wait_for_previous_kernel();
  int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t entries = view.heads * view.pages, slots = view.heads * view.slots;
  int wasted = 0;
  for (int64_t i = first; i < entries; i += stride) view.slot_of[i] = kNone;
  for (int64_t i = first; i < slots; i += stride) {
    view.page_of[i] = kNone;
    if (view.stamp[i] != kReserved) view.stamp[i] = kNever;
    wasted += view.ahead[i] != 0;
    view.ahead[i] = 0;
  }
  __syncwarp();
  wasted = __reduce_add_sync(kAll, wasted);
  if (lane_id() == 0 && wasted)
    atomicAdd(reinterpret_cast<Counter64*>(view.counters) + kWasted, static_cast<Counter64>(wasted));
}

// Counts violations of: slot_of and page_of are inverse, a used slot has a stamp, a free one has none and is not ahead.
__global__ void check_kernel(const __grid_constant__ SkvView view, int32_t* violations) {
  wait_for_previous_kernel();
  int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int bad = 0;
  for (int64_t i = first; i < view.heads * view.pages; i += stride) {
    int slot = view.slot_of[i];
    bad += slot < kNone || slot >= view.slots;
    if (slot >= 0 && slot < view.slots) bad += view.page_of[i / view.pages * view.slots + slot] != i % view.pages;
  }
  for (int64_t i = first; i < view.heads * view.slots; i += stride) {
    int page = view.page_of[i], stamp = view.stamp[i];
    bad += page < kNone || page >= view.pages;
    if (page >= 0 && page < view.pages) {
      bad += view.slot_of[i / view.slots * view.pages + page] != i % view.slots;
      bad += stamp < 0 || stamp == kReserved;
    } else {
      bad += (stamp != kNever && stamp != kReserved) || view.ahead[i];
    }
  }
  __syncwarp();
  bad = __reduce_add_sync(kAll, bad);
  if (lane_id() == 0 && bad) atomicAdd(violations, bad);
}

// Keeps one thread busy, to shake the order of kernels on other streams.
__global__ void sleep_kernel(int64_t cycles) {
  wait_for_previous_kernel();
  int64_t end = clock64() + cycles;
  while (clock64() < end) __nanosleep(100);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_resolve(const SkvView* view, const SkvWork* work, const SkvResolve* args, const Launch* where) {
  bool bulk = use_bulk(*view, where->device);
  int stages = bulk && args->move ? mover_stages(*view, where->device) : 0;
  size_t shared = static_cast<size_t>(stages) * 2 * view->page_size * view->head_dim * (view->dtype == SKV_FP32 ? 4 : 2);
  size_t starts = args->indices ? (args->n + 1) * sizeof(int) : 0;
  if (shared < starts) shared = starts;
  auto* kernel = bulk ? resolve_kernel<true> : resolve_kernel<false>;
  [[maybe_unused]] InOrder in_order;
  // Where nothing waits for the launch yet, GEMMs run beside it: few blocks. All heads are asked for the same pages
  // there, so they miss about as many, and a block each fills the link.
  bool helped = args->move && args->waited && view->heads <= SKV_MOST_HEADS;
  unsigned blocks = static_cast<unsigned>(view->heads) * (helped ? kMovers : 1);
  return launch(*where, kernel, dim3(blocks), kMaxThreads, shared, *view, *work, *args, stages);
}

SKV_EXPORT int skv_invalidate(const SkvView* view, const SkvInts* pages, int64_t count, const Launch* where) {
  unsigned blocks = static_cast<unsigned>((count + 255) / 256);
  return launch(*where, invalidate_kernel, dim3(blocks, view->heads), 256, 0, *view, *pages, static_cast<int>(count));
}

SKV_EXPORT int skv_clear(const SkvView* view, const Launch* where) {
  return launch(*where, clear_kernel, dim3(64), 512, 0, *view);
}

SKV_EXPORT int skv_check(const SkvView* view, int32_t* violations, const Launch* where) {
  return launch(*where, check_kernel, dim3(64), 512, 0, *view, violations);
}

SKV_EXPORT int skv_sleep(int64_t cycles, const Launch* where) {
  return launch(*where, sleep_kernel, dim3(1), 1, 0, cycles);
}
