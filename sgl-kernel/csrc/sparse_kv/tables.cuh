// The tables of the page cache, edited by one block per kv head.
//
// A unit that is missing is first *claimed*: slot_of holds kClaim + entry, and the lowest entry that asks for the unit
// wins. Claimed values and kNone are both negative, so a reader that sees one in place of the other draws the same
// conclusion. Between the phases stands a barrier of the block; another head's tables are another block's.
//
//   claim      slot_of: kNone -> kClaim + entry       stamp, ahead of hits; entries that claim are listed
//   barrier
//   number     winners among the listed; ages of all slots into a histogram
//   barriers   the age that the last victim has
//   hand out   slot_of[old] -> kNone, slot_of[new] -> slot, page_of, stamp, ahead of victims
//   drop       slot_of of winners without a slot -> kNone
//   barrier
//
// A victim's old page is resident and a winner's page is not, so no page is written twice in "hand out". Dependent reads
// and barriers take the time, so a thread reads several entries at once, and what a phase learns waits in shared memory.
#pragma once
#include "claim.cuh"

namespace skv {

// Marks the winners among the candidates; scratch.won counts them.
__device__ __forceinline__ void find_winners(const SkvView& view, const Entries& entries, TableScratch& scratch) {
  const int* slot_of = slot_row(view, entries.head);
  int won = 0;
  for (int i = threadIdx.x; i < scratch.claimed; i += blockDim.x) {
    int2 candidate = scratch.candidates[i];
    if (__ldcg(slot_of + candidate.x) != kClaim + candidate.y) continue;
    atomicOr(&scratch.marks[candidate.y / 32], 1u << (candidate.y % 32));
    ++won;
  }
  __syncwarp();
  won = __reduce_add_sync(kAll, won);
  if (lane_id() == 0 && won) atomicAdd(&scratch.won, won);
}

// After find_bin: puts the winners in order of entry into scratch.winners.
__device__ __forceinline__ void number_candidates(TableScratch& scratch) {
  for (int i = threadIdx.x; i < scratch.claimed; i += blockDim.x) {
    int entry = scratch.candidates[i].y;
    unsigned word = scratch.marks[entry / 32], bit = 1u << (entry % 32);
    if (word & bit) scratch.winners[scratch.marks_before[entry / 32] + __popc(word & (bit - 1u))] = static_cast<uint16_t>(i);
  }
}

// Lists the winning entries in order, where shared memory is too small for that. Returns how many, the same in every
// thread. Ends with a barrier.
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

// Ages of one head's slots in steps, kFree for free ones, negative where a slot must stay. They are split over the block:
// warp w owns slots [w * 32 * per_lane, ...), lane l every 32nd of them, so that slot order is that of (warp, turn, lane).
struct Ages {
  const int* stamps;
  int slots;
  int step;
  int per_lane;
  int key[kKeysInRegisters];

  __device__ __forceinline__ void load(const SkvView& view, int head, int now) {
    stamps = view.stamp + head * view.slots;
    slots = static_cast<int>(view.slots);
    step = now;
    per_lane = (slots + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
#pragma unroll
    for (int j = 0; j < kKeysInRegisters; ++j) key[j] = read(j);
  }
  __device__ __forceinline__ int slot(int j) const { return (warp_id() * per_lane + j) * 32 + lane_id(); }
  __device__ __forceinline__ int read(int j) const {
    int s = slot(j);
    int stamp = j < per_lane && s < slots ? __ldcg(stamps + s) : kReserved;
    return stamp == kNever ? kFree : stamp < step ? step - 1 - stamp : -1;
  }
  // Calls f(turn, age) for every slot of this thread, all lanes together.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int j = 0; j < kKeysInRegisters; ++j)
      if (j < per_lane) f(j, key[j]);
    for (int j = kKeysInRegisters; j < per_lane; ++j) f(j, read(j));
  }
};

// From the oldest bin on, the one that holds the `wanted`-th slot, or the last slot, goes to scratch.bin, and the number of
// slots in older bins to scratch.before. Returns the number of slots in all bins. Half of the block does that; the other
// half sums up the marks before each word. Ends with a barrier.
__device__ __forceinline__ int find_bin(TableScratch& scratch, int wanted) {
  constexpr int kBinWarps = kAges / 32;
  int bin = kAges - 1 - static_cast<int>(threadIdx.x), word = -1 - bin, mine = 0;
  if (bin >= 0) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) mine += scratch.ages[bin * kCopies + i];
  } else {
    mine = __popc(scratch.marks[word]);
  }
  int inclusive = mine;
  for (int d = 1; d < 32; d <<= 1) {
    int other = __shfl_up_sync(kAll, inclusive, d);
    if (lane_id() >= d) inclusive += other;
  }
  if (lane_id() == 31) scratch.block.warp[0][warp_id()] = inclusive;
  __syncthreads();
  int sum = scratch.block.warp[0][lane_id()];
  int total = __reduce_add_sync(kAll, lane_id() < kBinWarps ? sum : 0);
  bool counts = lane_id() < warp_id() && lane_id() / kBinWarps == warp_id() / kBinWarps;
  int before = __reduce_add_sync(kAll, counts ? sum : 0) + inclusive - mine;
  wanted = min(wanted, total);
  if (bin < 0) {
    scratch.marks_before[word] = before;
  } else if (before < wanted && before + mine >= wanted) {
    scratch.bin = bin;
    scratch.before = before;
  }
  __syncthreads();
  return total;
}

__device__ __forceinline__ int* list_of(const SkvView& view, const SkvWork& work, int job, int head) {
  return work.list + (job * view.heads + head) * work.list_width;
}

// Adds a head's units to its job's and returns the row of the first of them; one thread of each of the job's blocks calls
// it, once. The last block publishes the number of units and leaves the cursor as the next call expects it.
__device__ __forceinline__ int take_rows(const SkvView& view, const SkvWork& work, const SkvResolve& request, int job,
                                         int units) {
  auto* cursor = reinterpret_cast<Counter64*>(work.cursor) + job;  // blocks in the upper half, units in the lower
  Counter64 before = atomicAdd(cursor, Counter64(1) << 32 | static_cast<unsigned>(units));
  int first = static_cast<int>(static_cast<unsigned>(before));
  if (static_cast<int64_t>(before >> 32) == view.heads - 1) {
    *request.count = first + units;
    *cursor = 0;
  }
  return first;
}

// Gives the missing units a slot each, as far as they reach: the oldest slots, ties to the lower one. Writes the units'
// rows from `units` on, where their job has room or, without a job (negative), from first_row on, and leaves their number
// in scratch.kept. All threads of the block call it after a claim, with the histogram cleared. Ends with a barrier.
__device__ __forceinline__ void hand_out(const SkvView& view, const Entries& entries, const SkvWork& work, int step,
                                         Mode mode, bool must, int* list, int4* units, int job, int first_row,
                                         TableScratch& scratch) {
  int head = entries.head;
  int* slot_of = slot_row(view, head);
  int64_t base = head * view.slots;
  bool listed = scratch.claimed > kCandidates || entries.count > kMarks * 32;  // winners are in `list`
  int winners = listed ? number_winners(view, entries, list, scratch) : 0;
  Ages ages;
  ages.load(view, head, step);
  if (!listed) find_winners(view, entries, scratch);
  // Each recent age has a bin; all others share the one before the last, and free slots have the last.
  ages.each([&](int, int age) {
    int bin = age == kFree ? kAges - 1 : min(age, kAges - 2);
    if (bin >= 0) atomicAdd(&scratch.ages[bin * kCopies + lane_id() % kCopies], 1);
  });
  __syncthreads();
  if (!listed) winners = scratch.won;
  int usable = find_bin(scratch, winners), kept = min(winners, usable);
  if (threadIdx.x == 0) {
    if (must && winners > usable && atomicCAS(work.error, 0, kErrorCapacity) == 0) {
      work.error[1] = head;
      work.error[2] = winners;
      work.error[3] = usable;
    }
    scratch.kept = kept;
    scratch.first = job >= 0 ? take_rows(view, work, *entries.request, job, kept) : first_row;
  }
  int limit = scratch.bin, all_older = scratch.before;
  if (!listed) number_candidates(scratch);
  if (limit == kAges - 1) {
    limit = kFree;
  } else if (limit == kAges - 2 && kept > 0) {
    // Old slots: narrower and narrower ranges of ages, which are [limit, oldest] in the end with limit == oldest.
    int oldest = step - 1;
    while (limit < oldest) {
      int shift = 0;
      while ((oldest - limit) >> shift >= kAges) ++shift;
      clear_ages(scratch);
      __syncthreads();
      ages.each([&](int, int age) {
        if (age >= limit && age <= oldest)
          atomicAdd(&scratch.ages[((age - limit) >> shift) * kCopies + lane_id() % kCopies], 1);
      });
      __syncthreads();
      find_bin(scratch, kept - all_older);
      limit += scratch.bin << shift;
      oldest = limit + min(oldest - limit, (1 << shift) - 1);
      all_older += scratch.before;
    }
  }
  int mine_older = 0, mine_equal = 0;
  ages.each([&](int, int age) {
    mine_older += age > limit;
    mine_equal += age == limit;
  });
  mine_older = __reduce_add_sync(kAll, mine_older);
  mine_equal = __reduce_add_sync(kAll, mine_equal);
  if (lane_id() == 0) {
    scratch.block.warp[0][warp_id()] = mine_older;
    scratch.block.warp[1][warp_id()] = mine_equal;
  }
  __syncthreads();
  bool is_before = lane_id() < warp_id();
  const int warp_older = __reduce_add_sync(kAll, is_before ? scratch.block.warp[0][lane_id()] : 0);
  const int warp_equal = __reduce_add_sync(kAll, is_before ? scratch.block.warp[1][lane_id()] : 0) + all_older;
  const int first = scratch.first;

  int evicted = 0, wasted = 0, brought = 0, tokens_in = 0;
  for (int begin = 0; begin < kept; begin += kAges * kCopies) {
    int older = warp_older, equal = warp_equal;
    ages.each([&](int j, int age) {
      unsigned older_votes = __ballot_sync(kAll, age > limit), equal_votes = __ballot_sync(kAll, age == limit);
      if (age >= limit) {
        int place = age > limit ? older + __popc(older_votes & lanes_below())
                                : equal + __popc(equal_votes & lanes_below());
        if (place >= begin && place < min(kept, begin + kAges * kCopies)) scratch.victims[place - begin] = ages.slot(j);
      }
      older += __popc(older_votes);
      equal += __popc(equal_votes);
    });
    __syncthreads();
    for (int place = begin + threadIdx.x; place < min(kept, begin + kAges * kCopies); place += blockDim.x) {
      int slot = scratch.victims[place - begin];
      int old = __ldcg(view.page_of + base + slot);
      bool unused = __ldcg(view.ahead + base + slot) != 0;
      int2 won = listed ? make_int2(kNone, __ldcg(list + place)) : scratch.candidates[scratch.winners[place]];
      int page = listed ? entries.page(won.y, view) : won.x, tokens = entries.tokens(won.y, view);
      if (old >= 0) {
        ++evicted;
        wasted += unused;
        slot_of[old] = kNone;
      }
      slot_of[page] = slot;
      view.page_of[base + slot] = page;
      view.stamp[base + slot] = step;
      view.ahead[base + slot] = mode == kPrefetch;
      units[first + place] = make_int4(page, head, slot, tokens);
      brought += tokens > 0;
      tokens_in += tokens;
    }
    if (begin + kAges * kCopies < kept) __syncthreads();
  }
  __syncwarp();
  count(scratch, kEvicted, evicted);
  count(scratch, kWasted, wasted);
  if (mode != kInstall) {
    count(scratch, mode == kPrefetch ? kPrefetched : kMissed, brought);
    count(scratch, kTokensIn, tokens_in);
  }
  for (int i = kept + threadIdx.x; i < winners; i += blockDim.x)
    slot_of[listed ? entries.page(__ldcg(list + i), view) : scratch.candidates[scratch.winners[i]].x] = kNone;
  __syncthreads();
}

// Where the units that were missing went, for every entry that asked for one.
__device__ __forceinline__ void write_slots(const SkvView& view, const Entries& entries, const PageTable& table,
                                            const TableScratch& scratch) {
  const int* slot_of = slot_row(view, entries.head);
  bool listed = scratch.claimed > kCandidates;
  for (int i = threadIdx.x; i < (listed ? entries.count : scratch.claimed); i += blockDim.x) {
    int2 candidate = listed ? make_int2(entries.page(i, view), i) : scratch.candidates[i];
    if (candidate.x >= 0) tell(entries, table, candidate.y, __ldcg(slot_of + candidate.x));
  }
}

}  // namespace skv
