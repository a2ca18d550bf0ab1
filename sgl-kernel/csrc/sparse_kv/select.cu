// The best pages of each (request, kv head) of a row, exactly (select_search.cuh): ties go to the lower page. One block
// each. A step waits for what row 0 selects; what row 1 predicts is found by a launch of its own, beside what follows.
//
// Instructions, barriers and trips to memory take the time. Each thread keeps its candidates in registers, the search ends
// in one rank that a candidate reaches or not, and what score reads, too, is loaded while score still runs.
#include "score_chunks.cuh"
#include "select_search.cuh"

namespace skv {

// Less than any score. Of a candidate whose scores are no numbers: it is one all the same, so that heads agree how many
// pages a request selects, and which of them is the open one.
constexpr float kWorst = -3e38f;

// One (request, row, kv head) of the scores, and where it lies in the arrays.
struct Line {
  int n, row, head;
  int64_t index;  // in [n][rows][heads]
  int lo, hi;     // candidates
};

__device__ __forceinline__ Line line_of(const SkvSelect& args, int n, int row, int head) {
  int rows = static_cast<int>(args.rows);
  int64_t index = (static_cast<int64_t>(n) * rows + row) * args.heads + head;
  Line line{n, row, head, index, 0, static_cast<int>(args.table_width)};
  if (args.logits) {
    line.lo = static_cast<int>(max(get(args.lo, n * rows + row), int64_t(0)));
    line.hi = static_cast<int>(min(get(args.hi, n * rows + row), args.table_width));
  }
  return line;
}

// Maxima and sums of exponentials of a line's chunks. A warp takes a query head; the first chunk of each lane is loaded
// before anything is looked at.
struct Partials {
  const float2* of;  // [group][chunks]
  int chunks, first, last;
  float2 mine;

  __device__ __forceinline__ Partials(const SkvSelect& args, const Line& line) {
    chunks = static_cast<int>((args.table_width + kChunk - 1) / kChunk);
    of = reinterpret_cast<const float2*>(args.partials) + line.index * args.group * chunks;
    first = line.lo / kChunk + lane_id();
    last = line.lo < line.hi ? (line.hi + kChunk - 1) / kChunk : 0;
  }
  __device__ __forceinline__ void load(const SkvSelect& args, int q) {
    mine = q < args.group && first < last ? of[q * chunks + first] : make_float2(-kInf, 0);
  }
  // Logarithm (base 2) of the sum over all candidates, for each query head; chunks are joined in a fixed order.
  __device__ __forceinline__ void normalise(const SkvSelect& args, SelectScratch& scratch) {
    for (int q = warp_id(); q < args.group; q += blockDim.x >> 5) {
      if (q != warp_id()) load(args, q);
      float top = mine.x, sum = 0;
#pragma unroll 1
      for (int c = first + 32; c < last; c += 32) top = fmaxf(top, of[q * chunks + c].x);
      top = from_key(__reduce_max_sync(kAll, to_key(top)));
      auto add = [&](float2 chunk) {
        if (chunk.x > -kInf) sum += chunk.y * exp2f(chunk.x - top);
      };
      add(mine);
#pragma unroll 1
      for (int c = first + 32; c < last; c += 32) add(of[q * chunks + c]);
      for (int bits = 16; bits; bits >>= 1) sum += __shfl_xor_sync(kAll, sum, bits);
      if (lane_id() == 0) scratch.norm[q] = top > -kInf ? top + log2f(sum) : 0.0f;
    }
    __syncthreads();
  }
};

// The best of a page's scores by the query heads, any number of them.
__device__ __forceinline__ float best_of_group(const SkvSelect& args, const Line& line, const SelectScratch& scratch,
                                               int page) {
  if (!args.logits) return args.scores[line.index * args.table_width + page];
  const float* logits = args.logits + line.index * args.group * args.table_width + page;
  float best = kWorst;
  for (int q = 0; q < args.group; ++q) best = fmaxf(best, logits[q * args.table_width] - scratch.norm[q]);
  return best * kLn2;
}

// What score() promises, as a tensor, of all rows.
__global__ void dense_kernel(const __grid_constant__ SkvSelect args) {
  __shared__ SelectScratch scratch;
  wait_for_previous_kernel();
  int heads = static_cast<int>(args.heads), rows = static_cast<int>(args.rows), index = static_cast<int>(blockIdx.x);
  Line line = line_of(args, index / heads / rows, index / heads % rows, index % heads);
  Partials partials(args, line);
  partials.load(args, warp_id());
  partials.normalise(args, scratch);
  float* dense = args.dense + line.index * args.table_width;
  for (int page = threadIdx.x; page < args.table_width; page += blockDim.x)
    dense[page] = page >= line.lo && page < line.hi ? best_of_group(args, line, scratch, page) : -kInf;
}

// The logits of kAtOnce candidates of a thread, loaded before they are looked at. kGroup 0: any group.
template <int kGroup>
struct Loaded {
  static constexpr int kAtOnce = kGroup == 8 ? 2 : 4;
  float logits[kAtOnce][kGroup > 0 ? kGroup : 1];

  __device__ __forceinline__ void load(const SkvSelect& args, const Line& line, const Candidates& candidates, int turn) {
    if (kGroup == 0) return;
    const float* from = args.logits + line.index * kGroup * args.table_width + line.lo;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int i = min(candidates.index(turn + j), candidates.span - 1);
#pragma unroll
      for (int q = 0; q < kGroup; ++q) logits[j][q] = from[q * args.table_width + i];
    }
  }
  // Of the candidate at turn + j.
  __device__ __forceinline__ float score(const SkvSelect& args, const Line& line, const SelectScratch& scratch,
                                         const Candidates& candidates, int turn, int j) const {
    int i = candidates.index(turn + j);
    if (kGroup == 0) return i < candidates.end ? best_of_group(args, line, scratch, line.lo + i) : -kInf;
    float best = kWorst;
#pragma unroll
    for (int q = 0; q < kGroup; ++q) best = fmaxf(best, logits[j][q] - scratch.norm[q]);
    return i < candidates.end ? best * kLn2 : -kInf;
  }
};

// Pages by rank: each counts those that are better. `parts` threads share a page's count.
__device__ __forceinline__ void write_predicted(const SelectScratch& scratch, int chosen, int budget, int lo,
                                                int32_t* predicted) {
  int shift = 0;
  while (shift < 5 && chosen << (shift + 1) <= static_cast<int>(blockDim.x)) ++shift;
  int parts = 1 << shift, part = threadIdx.x & (parts - 1), stride = blockDim.x >> shift;
  for (int base = 0; base < chosen; base += stride) {
    int e = base + (static_cast<int>(threadIdx.x) >> shift);
    Rank me = e < chosen ? scratch.ranked[e] : 0;
    int better = 0;
    for (int j = part; j < chosen; j += parts) better += scratch.ranked[j] > me;
    for (int d = 1; d < parts; d *= 2) better += __shfl_xor_sync(kAll, better, d);
    if (e < chosen && part == 0) predicted[better] = lo + static_cast<int>(~static_cast<uint32_t>(me));
  }
  for (int k = chosen + threadIdx.x; k < budget; k += blockDim.x) predicted[k] = kNone;
}

// The pages that row 0 attends to whatever their scores: sinks before the chosen ones, recent pages behind them.
struct Frame {
  int sinks = 0, recent = 0, count = 0;

  // A negative length is that of a padded row.
  __device__ __forceinline__ Frame(const SkvSelect& args, const Line& line, int64_t length) {
    if (line.row != 0 || length < 0) return;
    int page_size = static_cast<int>(args.page_size), open = static_cast<int>(length) / page_size;
    recent = max(static_cast<int>(length + 1 - args.window), 0) / page_size;
    sinks = min(static_cast<int>(args.sinks), recent);
    count = sinks + open - recent + 1;
  }
  // The t-th of them.
  __device__ __forceinline__ int32_t physical(const SkvSelect& args, const int32_t* table, int t) const {
    int logical = t < sinks ? t : recent + t - sinks;
    return t < count && logical < args.table_width ? table[logical] : kNone;
  }
};

// What a request selected in the step before the row's, a bit for each candidate: a warp's candidates of one turn are a
// word. ops/hysteresis.py says what it is for, and why there are two.
struct Last {
  const uint32_t* read;  // null: none is kept
  uint32_t* write;
  int words, first;  // of this warp
  float bonus;

  __device__ __forceinline__ Last(const SkvSelect& args, const Line& line, int64_t length, int turns) : read(nullptr) {
    if (!args.last) return;
    uint32_t* both = args.last + get(args.owner, line.n) * args.last_stride;
    int64_t odd = (length + line.row) & 1;
    read = both + (odd * args.heads + line.head) * args.last_words;
    write = both + ((1 - odd) * args.heads + line.head) * args.last_words;
    words = static_cast<int>(args.last_words);
    first = warp_id() * turns;
    bonus = *args.bonus;
  }
  __device__ __forceinline__ bool has(int turn) const {
    return read && first + turn < words && (read[first + turn] >> lane_id() & 1);
  }
  // Rounded as a sum of its own, like torch's.
  __device__ __forceinline__ float favoured(float score, bool chosen) const {
    return chosen ? __fadd_rn(score, bonus) : score;
  }
  __device__ __forceinline__ void remember(int turn, unsigned votes) const {
    if (lane_id() == 0 && first + turn < words) write[first + turn] = votes;
  }
};

// After a score, all that is older than its result is read while it still runs: score waited for it. Row 1 reads what
// row 0 has just selected, and its launch overlaps nothing.
template <int kGroup>
__global__ void __launch_bounds__(1024, 1) select_kernel(const __grid_constant__ SkvSelect args) {
  SKV_DYNAMIC_SHARED(shared);
  __shared__ SelectScratch scratch;
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) scratch.bins[b] = 0;
  if (threadIdx.x == 0) scratch.listed = scratch.predicted = 0;
  if (!args.logits) wait_for_previous_kernel();
  int heads = static_cast<int>(args.heads), index = static_cast<int>(blockIdx.x);
  Line line = line_of(args, index / heads, static_cast<int>(args.row), index % heads);
  bool active = args.active[line.n];
  int64_t length = get(args.length, line.n), kept = args.keep.data ? get(args.keep, line.n) : line.n;
  const int32_t* table = args.table + line.n * args.table_width;
  Candidates candidates(active ? max(line.hi - line.lo, 0) : 0,
                        args.rest ? args.rest + line.index * args.table_width : reinterpret_cast<float*>(shared));
  int32_t physical[kHeld];
#pragma unroll
  for (int turn = 0; turn < kHeld; ++turn) {
    bool wanted = line.row == 0 && candidates.index(turn) < candidates.end;
    physical[turn] = wanted ? table[line.lo + candidates.index(turn)] : kNone;
  }
  Last before(args, line, length, candidates.turns);
  uint32_t favourites = 0;  // of the candidates in registers
#pragma unroll
  for (int turn = 0; turn < kHeld; ++turn)
    if (turn < candidates.turns) favourites |= static_cast<uint32_t>(before.has(turn)) << turn;
  Frame frame(args, line, active ? length : -1);
  int32_t around = frame.physical(args, table, threadIdx.x);
  Partials partials(args, line);
  Loaded<kGroup> loaded;
  constexpr int kAtOnce = Loaded<kGroup>::kAtOnce;
  if (args.logits) {
    wait_for_previous_kernel();
    partials.load(args, warp_id());
    if (candidates.span) loaded.load(args, line, candidates, 0);
    partials.normalise(args, scratch);
  }

  float low = kInf, high = -kInf;
  int count = 0;
  auto note = [&](float score) {
    high = fmaxf(high, score);
    low = fminf(low, score > -kInf ? score : kInf);
    count += score > -kInf;
    return score;
  };
#pragma unroll
  for (int turn = 0; turn < kHeld; turn += kAtOnce) {
    if (turn >= candidates.turns) continue;
    if (turn) loaded.load(args, line, candidates, turn);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      candidates.held[turn + j] = note(before.favoured(loaded.score(args, line, scratch, candidates, turn, j),
                                                       favourites >> (turn + j) & 1));
  }
#pragma unroll 1
  for (int turn = kHeld; turn < candidates.turns; turn += kAtOnce) {
    loaded.load(args, line, candidates, turn);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float score = note(before.favoured(loaded.score(args, line, scratch, candidates, turn, j), before.has(turn + j)));
      if (candidates.index(turn + j) < candidates.end) candidates.rest[candidates.index(turn + j)] = score;
    }
  }
  uint32_t low_key = __reduce_min_sync(kAll, to_key(low)), high_key = __reduce_max_sync(kAll, to_key(high));
  count = __reduce_add_sync(kAll, count);
  if (lane_id() == 0) {
    scratch.low[warp_id()] = low_key;
    scratch.high[warp_id()] = high_key;
    scratch.candidates[warp_id()] = count;
  }
  __syncthreads();
  bool counts = lane_id() < static_cast<int>(blockDim.x >> 5);
  low_key = __reduce_min_sync(kAll, counts ? scratch.low[lane_id()] : 0xffffffffu);
  high_key = __reduce_max_sync(kAll, counts ? scratch.high[lane_id()] : 0u);
  count = __reduce_add_sync(kAll, counts ? scratch.candidates[lane_id()] : 0);
  bool last_row = line.row == args.rows - 1, whole = line.row == 0 && active && length < args.whole;
  int budget = static_cast<int>(args.budget), best = min(count, budget), chosen = whole ? count : best;
  Limit limit{best ? -kInf : kInf, -1};  // of the best; a row that takes all may have to predict, too
  if (best && count > budget && (last_row || !whole)) {
    Rank last = Search{candidates, scratch, from_key(low_key), 0.0f}.last(budget, from_key(high_key));
    limit = Limit{from_key(static_cast<uint32_t>(last >> 32)), static_cast<int>(~static_cast<uint32_t>(last))};
  }

  // Place of each chosen page, in ascending order of pages.
  int place = 0;
  Limit taking = whole ? Limit{-kInf, -1} : limit;
  candidates.each([&](int, int i, float score, bool) { place += __popc(__ballot_sync(kAll, taking.admits(score, i))); });
  if (lane_id() == 0) scratch.chosen[warp_id()] = place;
  __syncthreads();
  place = __reduce_add_sync(kAll, lane_id() < warp_id() ? scratch.chosen[lane_id()] : 0);

  int width = static_cast<int>(args.width);
  int32_t* pages = args.pages + (line.n * args.heads + line.head) * args.width;
  if (line.row == 0) {
    for (int t = threadIdx.x; t < frame.count; t += blockDim.x) {
      int c = t < frame.sinks ? t : t + chosen;
      if (c < width) pages[c] = t < static_cast<int>(blockDim.x) ? around : frame.physical(args, table, t);
    }
    int filled = frame.count + chosen;
    for (int c = filled + threadIdx.x; c < width; c += blockDim.x) pages[c] = kNone;
    if (line.head == 0 && threadIdx.x == 0) args.num_pages[line.n] = min(filled, width);
  }
  int room = line.row == 0 ? width - frame.sinks : 0;
  bool remembers = before.read && line.row == 0 && !whole && count > budget;
  candidates.each([&](int turn, int i, float score, bool in_registers) {
    bool taken = taking.admits(score, i);
    unsigned votes = __ballot_sync(kAll, taken);
    int mine = place + __popc(votes & lanes_below());
    place += __popc(votes);
    if (remembers) before.remember(turn, votes);
    if (!taken) return;
    if (mine < room) pages[frame.sinks + mine] = in_registers ? physical[turn] : table[line.lo + i];
    if (!last_row || !limit.admits(score, i)) return;
    scratch.ranked[whole ? atomicAdd(&scratch.predicted, 1) : mine] = rank_of(score, i);  // in any order
  });
  if (!last_row) return;
  __syncthreads();
  write_predicted(scratch, best, budget, line.lo,
                  args.predicted + kept * args.keep_stride + line.head * args.keep_stride_head);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_dense_scores(const SkvSelect* args, const Launch* where) {
  return launch(*where, dense_kernel, dim3(args->n * args->rows * args->heads), 512, 0, *args);
}

inline int select_threads(int64_t table_width) { return table_width <= 1024 ? 256 : table_width <= 8192 ? 512 : 1024; }

// Shared memory for scores beyond those that registers hold.
inline int64_t rest_bytes(int64_t table_width) {
  return table_width <= kHeld * select_threads(table_width) ? 0 : table_width * 4;
}

// Shared memory of a launch: the caller keeps such scores in global memory when a block cannot have that much.
SKV_EXPORT int64_t skv_select_shared(int64_t table_width) { return sizeof(SelectScratch) + 1024 + rest_bytes(table_width); }

SKV_EXPORT int skv_select(const SkvSelect* args, const Launch* given) {
  Launch where = *given;
  if (args->row > 0) where.overlap = 0;
  size_t shared = args->rest ? 0 : rest_bytes(args->table_width);
  auto* kernel = args->logits && args->group == 4   ? select_kernel<4>
                 : args->logits && args->group == 8 ? select_kernel<8>
                                                    : select_kernel<0>;
  int threads = select_threads(args->table_width);
  return launch(where, kernel, dim3(args->n * args->heads), threads, shared, *args);
}
