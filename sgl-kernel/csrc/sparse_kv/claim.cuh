// The first phase of an edit: what is resident is found and stamped, what is missing is claimed. See tables.cuh.
#pragma once
#include "entries.cuh"

namespace skv {

constexpr int kMaxThreads = 1024;
constexpr int kKeysInRegisters = 16;  // stamps per thread; more slots than 16 * threads are read from memory again
constexpr int kBatch = 4;             // entries that a thread reads at once
constexpr int kCandidates = 2048;     // entries that claim and find room in shared memory; more take a slower path
constexpr int kAges = 512;            // bins of the histogram of ages
constexpr int kMarks = 512;           // words of marks, one bit per entry; more entries take the slower path, too
static_assert(kAges + kMarks == kMaxThreads, "find_bin gives each thread one of them");
constexpr int kCopies = 8;            // of each bin, so that a warp with one age does not queue at one word
constexpr int kFree = INT32_MAX;      // age of a free slot

enum Mode { kResolve, kPrefetch, kInstall };

struct TableScratch {
  BlockScratch block;
  int tally[kCounters];
  int first;    // row of the head's first unit in the list
  int kept;     // units that got a slot
  int claimed;  // entries that claimed a unit
  int won;      // units that are missing
  int begun;    // of those that claimed, open pages without a committed token: there is nothing to bring
  int forced;   // hits that are brought again
  int bin, before;
  int step, skip, rate;  // of SkvResolve and SkvWork
  union {
    int ages[kAges * kCopies];
    int victims[kAges * kCopies];  // once the histogram has told how old they are
  };
  unsigned marks[kMarks];     // entries that won
  int marks_before[kMarks];   // of the words before
  int2 candidates[kCandidates];  // page, entry
  uint16_t winners[kCandidates];
};

__device__ __forceinline__ int* slot_row(const SkvView& view, int head) { return view.slot_of + head * view.pages; }

// Clears a slot's "fetched ahead" flag; true for the one caller that found it set. The atomic takes the flag's whole word:
// allocations are rounded up to far more than that.
__device__ __forceinline__ bool take_ahead(const SkvView& view, int64_t slot_index) {
  auto address = reinterpret_cast<uintptr_t>(view.ahead + slot_index);
  auto* word = reinterpret_cast<unsigned*>(address & ~uintptr_t(3));
  unsigned mask = 0xffu << ((address & 3) * 8);
  return (atomicAnd(word, ~mask) & mask) != 0;
}

__device__ __forceinline__ void count(TableScratch& scratch, Counter counter, int value) {
  int sum = __reduce_add_sync(kAll, value);
  if (lane_id() == 0 && sum) atomicAdd(&scratch.tally[counter], sum);
}

__device__ __forceinline__ void clear_ages(TableScratch& scratch) {
  for (int i = threadIdx.x; i < kAges * kCopies; i += blockDim.x) scratch.ages[i] = 0;
}

__device__ __forceinline__ void begin_tally(TableScratch& scratch) {
  if (threadIdx.x < kCounters) scratch.tally[threadIdx.x] = 0;
  if (threadIdx.x == 0) scratch.claimed = scratch.begun = scratch.won = scratch.kept = scratch.forced = 0;
  clear_ages(scratch);
  for (int i = threadIdx.x; i < kMarks; i += blockDim.x) scratch.marks[i] = 0;
  __syncthreads();
}

// After the last count() and a barrier.
__device__ __forceinline__ void add_tally(const SkvView& view, const TableScratch& scratch) {
  if (threadIdx.x < kCounters && scratch.tally[threadIdx.x])
    atomicAdd(reinterpret_cast<Counter64*>(view.counters) + threadIdx.x, static_cast<Counter64>(scratch.tally[threadIdx.x]));
}

// Claims the units of those lanes that say so; whole warps call it.
__device__ __forceinline__ void claim(int* slot_of, int page, int entry, bool missing, TableScratch& scratch) {
  unsigned votes = __ballot_sync(kAll, missing);
  if (votes == 0) return;
  int start = lane_id() == 0 ? atomicAdd(&scratch.claimed, __popc(votes)) : 0;
  start = __shfl_sync(kAll, start, 0);
  if (!missing) return;
  int place = start + __popc(votes & lanes_below());
  if (place < kCandidates) scratch.candidates[place] = make_int2(page, entry);
  atomicMin(slot_of + page, kClaim + entry);
}

// Adds missing units to their request's account.
__device__ __forceinline__ void charge(const SkvResolve& request, int n, int column, int units) {
  if (request.fetched) atomicAdd(request.fetched + 2 * get(request.owner, n) + column, units);
}

// Stamps what is resident (unless told not to) and claims what is not. What attention waits for is written first; the flags
// of hits are taken a turn later, and those of the last turn by whoever calls take_flags().
struct Selection {
  const SkvView& view;
  const Entries& entries;
  int64_t base;
  int page[kBatch], slot[kBatch];
  int useful = 0;

  __device__ __forceinline__ Selection(const SkvView& view, const Entries& entries)
      : view(view), entries(entries), base(entries.head * view.slots) {}

  __device__ __forceinline__ int entry(int first, int j) const { return first + j * blockDim.x + threadIdx.x; }
  // Whether the warp has a j-th turn.
  __device__ __forceinline__ bool serves(int first, int j) const { return entry(first, j) - lane_id() < entries.count; }

  __device__ __forceinline__ void read_pages(int first) {
    entries.read(view, page, [&](int j, int& n, int& rank) {
      int e = entry(first, j);
      if (e >= entries.count) return false;
      n = entries.request_of(e);
      rank = entries.rank_of(e);
      return true;
    });
#pragma unroll
    for (int j = 0; j < kBatch; ++j) slot[j] = kNone;
  }
  __device__ __forceinline__ void count_useful() {
    uint8_t ahead[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) ahead[j] = slot[j] >= 0 ? __ldcg(view.ahead + base + slot[j]) : 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (ahead[j]) useful += take_ahead(view, base + slot[j]);
  }
  // True when a unit is missing. Ends with a barrier.
  __device__ __forceinline__ bool claim_missing(const SkvWork& work, const PageTable& table, bool tally, bool stamp,
                                                TableScratch& scratch) {
    int* slot_of = slot_row(view, entries.head);
    int selected = 0, hit = 0, first = 0, stride = blockDim.x * kBatch;
    do {
      read_pages(first);
      if (first == 0) {
        // Beside the loads of pages, by a thread that often has none.
        if (threadIdx.x == blockDim.x - 1) {
          scratch.step = *entries.request->step;
          scratch.skip = *work.skip;
          scratch.rate = *work.miss_rate;
        }
        table.begin();
        __syncthreads();
      }
      int step = scratch.step;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) slot[j] = page[j] >= 0 ? __ldcg(slot_of + page[j]) : kNone;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (!serves(first, j)) continue;
        int e = entry(first, j);
        selected += page[j] >= 0;
        hit += slot[j] >= 0;
        if (stamp && slot[j] >= 0) view.stamp[base + slot[j]] = step;
        if (e < entries.count) tell(entries, table, e, slot[j]);
        bool missing = page[j] >= 0 && slot[j] < 0;
        claim(slot_of, page[j], e, missing, scratch);
        if (missing) charge(*entries.request, entries.request_of(e), 0, 1);
      }
      first += stride;
      if (first < entries.count && stamp) count_useful();
    } while (first < entries.count);
    if (tally) {
      count(scratch, kSelected, selected);
      count(scratch, kHit, hit);
    }
    __syncthreads();
    return scratch.claimed > 0;
  }
  // Straight to the layer's counter, so that nobody waits.
  __device__ __forceinline__ void take_flags() {
    count_useful();
    __syncwarp();
    int sum = __reduce_add_sync(kAll, useful);
    if (lane_id() == 0 && sum)
      atomicAdd(reinterpret_cast<Counter64*>(view.counters) + kUseful, static_cast<Counter64>(sum));
  }
};

// After claim_missing, where open pages are told apart: those that claimed are hits on nobody's account, as if an append had
// made them resident. Ends with a barrier.
__device__ __forceinline__ void excuse_open(const SkvView& view, const Entries& entries, bool tally, TableScratch& scratch) {
  const SkvResolve& request = *entries.request;
  int excused = 0;
  for (int n = threadIdx.x; n < request.n; n += blockDim.x) {
    int rank = static_cast<int>(get(request.num_pages, n)) - 1, e = n * static_cast<int>(request.width) + rank;
    int page = rank >= 0 ? entries.page(e, view) : kNone;
    if (page < 0 || __ldcg(slot_row(view, entries.head) + page) >= 0) continue;
    ++excused;
    charge(request, n, 0, -1);
    if (entries.tokens(e, view) == 0) atomicAdd(&scratch.begun, 1);
  }
  __syncwarp();
  if (tally) count(scratch, kHit, excused);
  __syncthreads();
}

// The same for predicted pages: one warp per request counts its missing units in order of rank, up to `cap`.
__device__ __forceinline__ bool claim_predicted(const SkvView& view, const Entries& entries, int step, int cap,
                                                TableScratch& scratch) {
  int* slot_of = slot_row(view, entries.head);
  int64_t base = entries.head * view.slots;
  int width = static_cast<int>(entries.request->width), requests = static_cast<int>(entries.request->n);
  for (int n = warp_id(); n < requests && cap >= 0; n += blockDim.x >> 5) {
    int seen = 0;
    for (int first = 0; first < width; first += 32 * kBatch) {
      int page[kBatch], slot[kBatch];
      entries.read(view, page, [&](int j, int& request, int& rank) {
        request = n;
        rank = first + j * 32 + lane_id();
        return rank < width;
      });
#pragma unroll
      for (int j = 0; j < kBatch; ++j) slot[j] = page[j] >= 0 ? __ldcg(slot_of + page[j]) : kNone;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        bool missing = page[j] >= 0 && slot[j] < 0;
        unsigned votes = __ballot_sync(kAll, missing);
        bool within = missing && seen + __popc(votes & lanes_below()) < cap;
        claim(slot_of, page[j], (first + j * 32 + lane_id()) * requests + n, within, scratch);
        if (within) charge(*entries.request, n, 1, 1);
        if (slot[j] >= 0) atomicMax(view.stamp + base + slot[j], step);
        seen += __popc(votes);
      }
    }
  }
  __syncthreads();
  return scratch.claimed > 0;
}

}  // namespace skv
