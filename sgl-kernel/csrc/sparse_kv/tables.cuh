// The tables of the page cache, edited by one block per kv head.
//
// A unit that is missing is first *claimed*: slot_of holds kClaim + entry, and the lowest entry that asks for the unit
// wins. Claimed values and kNone are both negative, so a reader that sees one in place of the other draws the same
// conclusion. Between the phases stands a barrier of the block; another head's tables are another block's.
//
//   claim      slot_of: kNone -> kClaim + entry       stamp, ahead of hits
//   barrier
//   number     winners counted in order of entry; their entries listed
//   barrier
//   hand out   slot_of[old] -> kNone, slot_of[new] -> slot, page_of, stamp, ahead of victims
//   barrier
//   drop       slot_of of winners without a slot -> kNone
//
// A victim's old page is resident and a winner's page is not, so no page is written twice in "hand out".
#pragma once
#include "common.cuh"

namespace skv {

constexpr int kMaxThreads = 1024;
constexpr int kKeysInRegisters = 16;  // stamps per thread; more slots than 16 * threads are read from memory again

enum Mode { kResolve, kPrefetch, kInstall };

// The pages that one head is asked for, numbered in order of preference.
struct Entries {
  const SkvResolve* request;
  int64_t heads;
  int head;
  int count;
  bool by_rank;  // entry = rank * n + request instead of request * width + rank
  bool reversed;

  __device__ __forceinline__ int request_of(int e) const {
    return by_rank ? e % static_cast<int>(request->n) : e / static_cast<int>(request->width);
  }
  __device__ __forceinline__ int rank_of(int e) const {
    return by_rank ? e / static_cast<int>(request->n) : e % static_cast<int>(request->width);
  }
  __device__ __forceinline__ int64_t offset(int n, int rank) const {
    int64_t row = request->index.data ? get(request->index, n) : n;
    if (reversed) rank = static_cast<int>(request->width) - 1 - rank;
    return row * request->stride_n + head * request->stride_head + rank;
  }
  __device__ __forceinline__ int page(int n, int rank, const SkvView& view) const {
    if (request->active && !request->active[n]) return kNone;
    int64_t page = get(request->pages, offset(n, rank));
    if (page >= 0 && request->table) {
      int64_t closed = request->closed.data ? get(request->closed, n) : request->table_width;
      page = page < closed && page < request->table_width ? request->table[n * request->table_width + page] : kNone;
    }
    return page >= 0 && page < view.pages ? static_cast<int>(page) : kNone;
  }
  __device__ __forceinline__ int page(int e, const SkvView& view) const {
    return page(request_of(e), rank_of(e), view);
  }
  // Place of the entry in a [n][heads][width] result.
  __device__ __forceinline__ int64_t result(int e) const {
    return (static_cast<int64_t>(request_of(e)) * heads + head) * request->width + rank_of(e);
  }
  __device__ __forceinline__ int tokens(int e, const SkvView& view) const {
    if (!request->tokens.data) return static_cast<int>(view.page_size);
    return static_cast<int>(get(request->tokens, offset(request_of(e), rank_of(e))));
  }
};

struct TableScratch {
  BlockScratch block;
  int tally[kCounters];
  int first;  // row of the head's first unit in the list
  int kept;   // units that got a slot
};

__device__ __forceinline__ int* slot_row(const SkvView& view, int head) { return view.slot_of + head * view.pages; }

// Clears a slot's "fetched ahead" flag; true for the one caller that found it set. The atomic takes the flag's whole word:
// allocations are rounded up to far more than that.
__device__ __forceinline__ bool take_ahead(const SkvView& view, int64_t slot_index) {
  uint8_t* flag = view.ahead + slot_index;
  if (__ldcg(flag) == 0) return false;
  auto address = reinterpret_cast<uintptr_t>(flag);
  auto* word = reinterpret_cast<unsigned*>(address & ~uintptr_t(3));
  unsigned mask = 0xffu << ((address & 3) * 8);
  return (atomicAnd(word, ~mask) & mask) != 0;
}

__device__ __forceinline__ void count(TableScratch& scratch, Counter counter, int value) {
  int sum = __reduce_add_sync(kAll, value);
  if (lane_id() == 0 && sum) atomicAdd(&scratch.tally[counter], sum);
}

__device__ __forceinline__ void begin_tally(TableScratch& scratch) {
  if (threadIdx.x < kCounters) scratch.tally[threadIdx.x] = 0;
  __syncthreads();
}

// After the last count() and a barrier.
__device__ __forceinline__ void add_tally(const SkvView& view, const TableScratch& scratch) {
  if (threadIdx.x < kCounters && scratch.tally[threadIdx.x])
    atomicAdd(reinterpret_cast<Counter64*>(view.counters) + threadIdx.x, static_cast<Counter64>(scratch.tally[threadIdx.x]));
}

// Stamps what is resident (unless told not to) and claims what is not. True when a unit is missing. Ends with a barrier.
__device__ __forceinline__ bool claim_selection(const SkvView& view, const Entries& entries, int step, bool tally,
                                                bool stamp, int* slots, TableScratch& scratch) {
  int* slot_of = slot_row(view, entries.head);
  int64_t base = entries.head * view.slots;
  int selected = 0, hit = 0, useful = 0, missing = 0;
  for (int e = threadIdx.x; e < entries.count; e += blockDim.x) {
    int page = entries.page(e, view);
    int slot = kNone;
    if (page >= 0) {
      ++selected;
      slot = __ldcg(slot_of + page);
      if (slot >= 0) {
        ++hit;
        if (stamp) {
          view.stamp[base + slot] = step;
          useful += take_ahead(view, base + slot);
        }
      } else {
        slot = kNone;
        missing = 1;
        atomicMin(slot_of + page, kClaim + e);
      }
    }
    if (slots) slots[entries.result(e)] = slot;
  }
  if (tally) {
    count(scratch, kSelected, selected);
    count(scratch, kHit, hit);
  }
  count(scratch, kUseful, useful);
  return __syncthreads_or(missing);
}

// The same for predicted pages: one warp per request counts its missing units in order of rank, up to `cap`.
__device__ __forceinline__ bool claim_predicted(const SkvView& view, const Entries& entries, int step, int cap) {
  constexpr int kBatch = 4;  // loads in flight per lane
  int* slot_of = slot_row(view, entries.head);
  int64_t base = entries.head * view.slots;
  int width = static_cast<int>(entries.request->width), requests = static_cast<int>(entries.request->n);
  int claimed = 0;
  for (int n = warp_id(); n < requests && cap >= 0; n += blockDim.x >> 5) {
    int seen = 0;
    for (int first = 0; first < width; first += 32 * kBatch) {
      int page[kBatch], slot[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        int rank = first + j * 32 + lane_id();
        page[j] = rank < width ? entries.page(n, rank, view) : kNone;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) slot[j] = page[j] >= 0 ? __ldcg(slot_of + page[j]) : kNone;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        bool missing = page[j] >= 0 && slot[j] < 0;
        unsigned votes = __ballot_sync(kAll, missing);
        if (missing && seen + __popc(votes & lanes_below()) < cap) {
          int rank = first + j * 32 + lane_id();
          atomicMin(slot_of + page[j], kClaim + rank * requests + n);
          claimed = 1;
        }
        if (slot[j] >= 0 && view.stamp[base + slot[j]] < step) view.stamp[base + slot[j]] = step;
        seen += __popc(votes);
      }
    }
  }
  return __syncthreads_or(claimed);
}

// Lists the winning entries in order. Returns how many, the same in every thread. Ends with a barrier.
__device__ __forceinline__ int number_winners(const SkvView& view, const Entries& entries, int* list,
                                              TableScratch& scratch) {
  int* slot_of = slot_row(view, entries.head);
  int winners = 0;
  for (int first = 0; first < entries.count; first += blockDim.x) {
    int e = first + threadIdx.x;
    int page = e < entries.count ? entries.page(e, view) : kNone;
    bool won = page >= 0 && __ldcg(slot_of + page) == kClaim + e;
    int total;
    int before = block_scan(won, scratch.block, total);
    if (won) list[winners + before] = e;
    winners += total;
  }
  __syncthreads();
  return winners;
}

// Stamps of one head, split over the block: warp w owns slots [w * 32 * per_lane, ...), lane l every 32nd of them, so that
// slot order is the order of (warp, turn, lane).
struct Stamps {
  const int* row;
  int slots;
  int per_lane;
  int key[kKeysInRegisters];

  __device__ __forceinline__ void load(const SkvView& view, int head) {
    row = view.stamp + head * view.slots;
    slots = static_cast<int>(view.slots);
    per_lane = (slots + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
#pragma unroll
    for (int j = 0; j < kKeysInRegisters; ++j) key[j] = read(j);
  }
  __device__ __forceinline__ int slot(int j) const { return (warp_id() * per_lane + j) * 32 + lane_id(); }
  __device__ __forceinline__ int read(int j) const {
    int s = slot(j);
    return j < per_lane && s < slots ? __ldcg(row + s) : kReserved;
  }
  // Calls f(turn, stamp) for every slot of this thread, all lanes together.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int j = 0; j < kKeysInRegisters; ++j)
      if (j < per_lane) f(j, key[j]);
    for (int j = kKeysInRegisters; j < per_lane; ++j) f(j, read(j));
  }
  __device__ __forceinline__ int up_to(int limit) const {
    int n = 0;
    each([&](int, int stamp) { n += stamp <= limit; });
    return n;
  }
};

// Gives the first units of `list` a slot each: the slots with the oldest stamps below `step`, ties to the lower slot.
// Writes the units' rows from `rows` on and leaves their number in scratch.kept. All threads of the block call it.
__device__ __forceinline__ void hand_out(const SkvView& view, const Entries& entries, const SkvWork& work, int winners,
                                         int step, Mode mode, bool must, const int* list, int4* units, int* cursor,
                                         int first_row, TableScratch& scratch) {
  int head = entries.head;
  int* slot_of = slot_row(view, head);
  int64_t base = head * view.slots;
  Stamps stamps;
  stamps.load(view, head);
  int turn = 0;
  auto total = [&](int value) { return block_sum(value, scratch.block, turn ^= 1); };

  int usable = total(stamps.up_to(step - 1));
  int kept = min(winners, usable);
  if (threadIdx.x == 0) {
    if (must && winners > usable && atomicCAS(work.error, 0, kErrorCapacity) == 0) {
      work.error[1] = head;
      work.error[2] = winners;
      work.error[3] = usable;
    }
    scratch.kept = kept;
    scratch.first = cursor ? atomicAdd(cursor, kept) : first_row;
  }
  // Smallest `oldest` such that at least `kept` stamps are not above it.
  int low = kNever, high = step - 1;
  if (total(stamps.up_to(kNever)) < kept) {
    low = kNever + 1;
    while (low < high) {
      int middle = low + (high - low) / 2;
      if (total(stamps.up_to(middle)) >= kept) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
  }
  int oldest = low;
  int mine_older = stamps.up_to(oldest - 1), mine_equal = stamps.up_to(oldest) - mine_older;
  __syncthreads();  // the scans below reuse what the last sum is still read from
  int warp_older = __reduce_add_sync(kAll, mine_older), warp_equal = __reduce_add_sync(kAll, mine_equal);
  int all_older, all_equal;
  int lanes_first = lane_id() == 0;
  int older = block_scan(lanes_first ? warp_older : 0, scratch.block, all_older);
  int equal = block_scan(lanes_first ? warp_equal : 0, scratch.block, all_equal);
  older = __shfl_sync(kAll, older, 0);  // units before this warp's
  equal = __shfl_sync(kAll, equal, 0);
  int first = scratch.first;  // written before the barriers above

  int evicted = 0, wasted = 0, brought = 0, tokens_in = 0;
  stamps.each([&](int j, int stamp) {
    bool is_older = stamp < oldest, is_equal = stamp == oldest;
    unsigned older_votes = __ballot_sync(kAll, is_older), equal_votes = __ballot_sync(kAll, is_equal);
    int place = is_older ? older + __popc(older_votes & lanes_below())
                         : all_older + equal + __popc(equal_votes & lanes_below());
    older += __popc(older_votes);
    equal += __popc(equal_votes);
    if ((!is_older && !is_equal) || place >= kept) return;
    int slot = stamps.slot(j), entry = __ldcg(list + place);
    int page = entries.page(entry, view), tokens = entries.tokens(entry, view);
    int old = view.page_of[base + slot];
    if (old >= 0) {
      ++evicted;
      wasted += view.ahead[base + slot] != 0;
      slot_of[old] = kNone;
    }
    slot_of[page] = slot;
    view.page_of[base + slot] = page;
    view.stamp[base + slot] = step;
    view.ahead[base + slot] = mode == kPrefetch;
    units[first + place] = make_int4(page, head, slot, tokens);
    brought += tokens > 0;
    tokens_in += tokens;
  });
  count(scratch, kEvicted, evicted);
  count(scratch, kWasted, wasted);
  if (mode != kInstall) {
    count(scratch, mode == kPrefetch ? kPrefetched : kMissed, brought);
    count(scratch, kTokensIn, tokens_in);
  }
  for (int i = kept + threadIdx.x; i < winners; i += blockDim.x) slot_of[entries.page(__ldcg(list + i), view)] = kNone;
  __syncthreads();
}

}  // namespace skv
