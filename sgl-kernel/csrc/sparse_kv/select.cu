// The best pages of each (request, row, kv head), exactly: ties go to the lower page. One block each.
//
// Scores are spread over kBins bins of equal width between the lowest and the highest. The bin that holds the last page
// within the budget is found by a prefix sum; above it everything is chosen, and inside it, where few pages lie, each is
// ranked against the others. Should many lie there (equal scores, or outliers that squeeze the rest into one bin), a
// bitwise search for the threshold takes over. Equal-width bins rather than the digits of a radix sort: log-probabilities
// share their exponents, so digits would send most pages to one counter.
#include "common.cuh"

namespace skv {

constexpr int kChunk = 64;  // pages per partial sum, as score writes them
constexpr int kBins = 2048;
constexpr int kRankable = 1024;  // most pages of one bin that are ranked against each other
constexpr int kMaxGroup = 32;

// Order-preserving map of floats to integers; 0 is below every score.
__device__ __forceinline__ uint32_t to_key(float x) {
  uint32_t bits = __float_as_uint(x + 0.0f);  // -0 counts as 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
constexpr uint32_t kNoKey = 0x007fffffu;  // to_key(-inf): keys up to here are no candidates

struct SelectScratch {
  BlockScratch block;
  float norm[kMaxGroup];
  uint32_t low[32], high[32];
  int candidates, bin, above, listed;
};

// One (request, row, kv head) of the scores, and where it lies in the arrays.
struct Line {
  int n, row, head;
  int64_t index;  // in [n][rows][heads]
  int lo, hi;     // candidates
};

__device__ __forceinline__ Line line_of(const SkvSelect& args) {
  int64_t index = blockIdx.x;
  int head = static_cast<int>(index % args.heads), row = static_cast<int>(index / args.heads % args.rows);
  int n = static_cast<int>(index / args.heads / args.rows);
  Line line{n, row, head, index, 0, static_cast<int>(args.table_width)};
  if (args.logits) {
    line.lo = static_cast<int>(max(get(args.lo, n * args.rows + row), int64_t(0)));
    line.hi = static_cast<int>(min(get(args.hi, n * args.rows + row), args.table_width));
  }
  return line;
}

// Logarithm (base 2) of the sum over all candidates, for each query head; chunks are joined in a fixed order.
__device__ __forceinline__ void normalise(const SkvSelect& args, const Line& line, SelectScratch& scratch) {
  int chunks = static_cast<int>((args.table_width + kChunk - 1) / kChunk);
  int first = line.lo / kChunk, last = line.lo < line.hi ? (line.hi + kChunk - 1) / kChunk : first;
  for (int q = warp_id(); q < args.group; q += blockDim.x >> 5) {
    auto* partials = reinterpret_cast<const float2*>(args.partials) + (line.index * args.group + q) * chunks;
    float top = -kInf;
    for (int c = first + lane_id(); c < last; c += 32) top = fmaxf(top, partials[c].x);
    for (int bits = 16; bits; bits >>= 1) top = fmaxf(top, __shfl_xor_sync(kAll, top, bits));
    float sum = 0;
    for (int c = first + lane_id(); c < last; c += 32)
      if (partials[c].x > -kInf) sum += partials[c].y * exp2f(partials[c].x - top);
    for (int bits = 16; bits; bits >>= 1) sum += __shfl_xor_sync(kAll, sum, bits);
    if (lane_id() == 0) scratch.norm[q] = top > -kInf ? top + log2f(sum) : 0.0f;
  }
  __syncthreads();
}

// kGroup 0: any group, from args.
template <int kGroup>
__device__ __forceinline__ float best_of_group(const SkvSelect& args, const Line& line, const SelectScratch& scratch,
                                               int page) {
  const float* logits = args.logits + line.index * args.group * args.table_width + page;
  float best = -kInf;
#pragma unroll
  for (int q = 0; q < (kGroup ? kGroup : static_cast<int>(args.group)); ++q)
    best = fmaxf(best, logits[q * args.table_width] - scratch.norm[q]);
  return best * kLn2;
}

// The first logits of a thread, of groups of kGroup: on their way while the norms are computed.
struct Early {
  static constexpr int kAtOnce = 4, kGroup = 4;
  float logits[kAtOnce][kGroup];

  __device__ __forceinline__ static bool serves(const SkvSelect& args) { return args.logits && args.group == kGroup; }
  __device__ __forceinline__ void load(const SkvSelect& args, const Line& line, int span) {
    const float* first = args.logits + line.index * kGroup * args.table_width + line.lo;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int i = min(static_cast<int>(threadIdx.x) + j * static_cast<int>(blockDim.x), span - 1);
#pragma unroll
      for (int q = 0; q < kGroup; ++q) logits[j][q] = first[q * args.table_width + i];
    }
  }
  __device__ __forceinline__ float best(int j, const SelectScratch& scratch) const {
    float best = -kInf;
#pragma unroll
    for (int q = 0; q < kGroup; ++q) best = fmaxf(best, logits[j][q] - scratch.norm[q]);
    return best * kLn2;
  }
};

// Calls f(i, score) for candidates i = threadIdx.x + skipped, that + blockDim.x, ... below span.
template <typename F>
__device__ __forceinline__ void each_score(const SkvSelect& args, const Line& line, const SelectScratch& scratch,
                                           int span, F f, int skipped = 0) {
  auto walk = [&](auto score) {
    constexpr int kAtOnce = 4;  // f may write memory, which a load does not pass
    int start = static_cast<int>(threadIdx.x) + skipped;
    for (int first = start; first < span; first += kAtOnce * static_cast<int>(blockDim.x)) {
      float scores[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        scores[j] = score(line.lo + min(first + j * static_cast<int>(blockDim.x), span - 1));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        int i = first + j * static_cast<int>(blockDim.x);
        if (i < span) f(i, scores[j]);
      }
    }
  };
  if (!args.logits) {
    walk([&](int page) { return args.scores[line.index * args.table_width + page]; });
  } else if (args.group == 4) {
    walk([&](int page) { return best_of_group<4>(args, line, scratch, page); });
  } else if (args.group == 8) {
    walk([&](int page) { return best_of_group<8>(args, line, scratch, page); });
  } else {
    walk([&](int page) { return best_of_group<0>(args, line, scratch, page); });
  }
}

// What score() promises, as a tensor.
__global__ void dense_kernel(const __grid_constant__ SkvSelect args) {
  __shared__ SelectScratch scratch;
  wait_for_previous_kernel();
  Line line = line_of(args);
  normalise(args, line, scratch);
  float* dense = args.dense + line.index * args.table_width;
  for (int page = threadIdx.x; page < args.table_width; page += blockDim.x)
    if (page < line.lo || page >= line.hi) dense[page] = -kInf;
  each_score(args, line, scratch, line.hi - line.lo, [&](int i, float score) { dense[line.lo + i] = score; });
}

// Which candidates are chosen, as bits from line.lo on. `keys` holds `span` of them. All threads call it.
struct Chooser {
  const uint32_t* keys;
  uint32_t* bits;
  int* bins;             // [kBins]
  unsigned long long* ranked;  // [kRankable]
  int span;
  float lowest, scale;

  __device__ __forceinline__ int bin(uint32_t key) const {
    int b = static_cast<int>((from_key(key) - lowest) * scale);
    return min(max(b, 0), kBins - 1);
  }
  // Sets the bit of every candidate for which f(key) holds.
  template <typename F>
  __device__ __forceinline__ void mark(F f) const {
    for (int base = warp_id() * 32; base < span; base += blockDim.x) {
      int i = base + lane_id();
      uint32_t key = i < span ? keys[i] : 0;
      unsigned votes = __ballot_sync(kAll, key > kNoKey && f(key));
      if (lane_id() == 0) bits[base / 32] = votes;
    }
  }

  __device__ __forceinline__ void choose(int candidates, int budget, uint32_t low, uint32_t high,
                                         SelectScratch& scratch) {
    if (candidates <= budget || budget == 0) {
      mark([&](uint32_t) { return budget > 0; });
      __syncthreads();
      return;
    }
    lowest = from_key(low);
    float width = from_key(high) - lowest;
    scale = width > 0 && width < kInf ? (kBins - 1) / width : 0.0f;
    if (!(scale < kInf)) scale = 0.0f;
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) bins[b] = 0;
    if (threadIdx.x == 0) scratch.listed = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < span; i += blockDim.x)
      if (keys[i] > kNoKey) atomicAdd(&bins[bin(keys[i])], 1);
    __syncthreads();
    // Each thread sums neighbouring bins, the first thread the highest.
    int each = kBins / static_cast<int>(blockDim.x), top = kBins - 1 - threadIdx.x * each;
    int mine = 0, total;
    for (int j = 0; j < each; ++j) mine += bins[top - j];
    int above = block_scan(mine, scratch.block, total);
    if (above < budget && above + mine >= budget) {
      int b = top;
      while (above + bins[b] < budget) above += bins[b--];
      scratch.bin = b;
      scratch.above = above;
    }
    __syncthreads();
    decide(budget, scratch);
  }

  __device__ __forceinline__ void decide(int budget, SelectScratch& scratch) {
    int border = scratch.bin, needed = budget - scratch.above, inside = bins[border];
    mark([&](uint32_t key) { return bin(key) > border || (inside == needed && bin(key) == border); });
    __syncthreads();
    if (inside == needed) return;
    if (inside <= kRankable) {
      for (int i = threadIdx.x; i < span; i += blockDim.x)
        if (keys[i] > kNoKey && bin(keys[i]) == border)
          ranked[atomicAdd(&scratch.listed, 1)] = static_cast<unsigned long long>(keys[i]) << 32 | ~static_cast<uint32_t>(i);
      __syncthreads();
      for (int e = threadIdx.x; e < inside; e += blockDim.x) {
        unsigned long long me = ranked[e];
        int better = 0;
        for (int j = 0; j < inside; ++j) better += ranked[j] > me;
        uint32_t i = ~static_cast<uint32_t>(me);
        if (better < needed) atomicOr(&bits[i / 32], 1u << (i % 32));
      }
      __syncthreads();
      return;
    }
    // Highest threshold that at least `needed` keys of the bin reach, bit by bit.
    uint32_t threshold = 0;
    int turn = 0, equal_needed = 0;
    auto counted = [&](auto f) {
      int n = 0;
      for (int i = threadIdx.x; i < span; i += blockDim.x) n += keys[i] > kNoKey && bin(keys[i]) == border && f(keys[i]);
      return block_sum(n, scratch.block, turn ^= 1);
    };
    for (int bit = 31; bit >= 0; --bit) {
      uint32_t candidate = threshold | 1u << bit;
      if (counted([&](uint32_t key) { return key >= candidate; }) >= needed) threshold = candidate;
    }
    equal_needed = needed - counted([&](uint32_t key) { return key > threshold; });
    __syncthreads();
    int taken = 0;
    for (int base = 0; base < span; base += blockDim.x) {
      int i = base + threadIdx.x;
      uint32_t key = i < span ? keys[i] : 0;
      bool in_bin = key > kNoKey && bin(key) == border;
      bool equal = in_bin && key == threshold;
      int total, before = block_scan(equal, scratch.block, total);
      if ((in_bin && key > threshold) || (equal && taken + before < equal_needed)) atomicOr(&bits[i / 32], 1u << (i % 32));
      taken += total;
    }
    __syncthreads();
  }
};

__global__ void __launch_bounds__(1024, 1) select_kernel(const __grid_constant__ SkvSelect args) {
  SKV_DYNAMIC_SHARED(shared);
  __shared__ SelectScratch scratch;
  wait_for_previous_kernel();
  Line line = line_of(args);
  bool active = args.active[line.n];
  int64_t length = get(args.length, line.n), kept = args.keep.data ? get(args.keep, line.n) : line.n;
  int span = active ? max(line.hi - line.lo, 0) : 0, words = (span + 31) / 32;
  int max_words = static_cast<int>((args.table_width + 31) / 32);
  // Shared memory: ranked pairs (later the chosen pages), bins, bits, places of words, keys.
  auto* ranked = reinterpret_cast<unsigned long long*>(shared);
  auto* bins = reinterpret_cast<int*>(ranked + kRankable);
  auto* bits = reinterpret_cast<uint32_t*>(bins + kBins);
  auto* places = reinterpret_cast<int*>(bits + max_words);
  uint32_t* keys = args.keys ? args.keys + line.index * args.table_width : reinterpret_cast<uint32_t*>(places + max_words);

  Early early;
  bool ahead = span > 0 && Early::serves(args);
  if (ahead) early.load(args, line, span);
  if (args.logits && span) normalise(args, line, scratch);
  uint32_t low = 0xffffffffu, high = 0;
  int candidates = 0;
  auto note = [&](int i, float score) {
    uint32_t key = to_key(score);
    keys[i] = key;
    if (key <= kNoKey) return;
    low = min(low, key);
    high = max(high, key);
    ++candidates;
  };
  if (ahead) {
#pragma unroll
    for (int j = 0; j < Early::kAtOnce; ++j) {
      int i = static_cast<int>(threadIdx.x) + j * static_cast<int>(blockDim.x);
      if (i < span) note(i, early.best(j, scratch));
    }
  }
  each_score(args, line, scratch, span, note, ahead ? Early::kAtOnce * static_cast<int>(blockDim.x) : 0);
  __syncwarp();
  low = __reduce_min_sync(kAll, low);
  high = __reduce_max_sync(kAll, high);
  if (lane_id() == 0) {
    scratch.low[warp_id()] = low;
    scratch.high[warp_id()] = high;
  }
  candidates = block_sum(candidates, scratch.block, 0);
  int warps = blockDim.x >> 5;
  low = __reduce_min_sync(kAll, lane_id() < warps ? scratch.low[lane_id()] : 0xffffffffu);
  high = __reduce_max_sync(kAll, lane_id() < warps ? scratch.high[lane_id()] : 0u);
  __syncthreads();
  int budget = static_cast<int>(args.budget), chosen = min(candidates, budget);
  Chooser chooser{keys, bits, bins, ranked, span, 0.0f, 0.0f};
  chooser.choose(candidates, budget, low, high, scratch);

  // Place of the first chosen page of each word, in ascending order of pages.
  int before = 0;
  for (int base = 0; base < words; base += blockDim.x) {
    int w = base + threadIdx.x, total;
    int place = block_scan(w < words ? __popc(bits[w]) : 0, scratch.block, total);
    if (w < words) places[w] = before + place;
    before += total;
  }
  __syncthreads();

  auto each_chosen = [&](auto f) {
    for (int i = threadIdx.x; i < span; i += blockDim.x) {
      uint32_t word = bits[i / 32];
      if (word >> (i % 32) & 1) f(i, places[i / 32] + __popc(word & ((1u << (i % 32)) - 1u)));
    }
  };
  const int32_t* table = args.table + line.n * args.table_width;
  if (line.row == 0) {
    int width = static_cast<int>(args.width);
    int32_t* pages = args.pages + (line.n * args.heads + line.head) * args.width;
    int open = static_cast<int>(length / args.page_size);
    int recent = static_cast<int>(max(length + 1 - args.window, int64_t(0)) / args.page_size);
    int sinks = min(static_cast<int>(args.sinks), recent);
    int filled = active ? sinks + chosen + open - recent + 1 : 0;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
      if (active && c >= sinks && c < sinks + chosen) continue;
      int logical = c < sinks ? c : recent + c - sinks - chosen;
      pages[c] = c < filled && logical < args.table_width ? table[logical] : kNone;
    }
    if (active)
      each_chosen([&](int i, int place) {
        if (sinks + place < width) pages[sinks + place] = table[line.lo + i];
      });
    if (line.head == 0 && threadIdx.x == 0) args.num_pages[line.n] = min(filled, width);
  }
  if (line.row != args.rows - 1) return;
  // By rank: each chosen page counts those that are better. `parts` threads share a page's count.
  each_chosen([&](int i, int place) {
    ranked[place] = static_cast<unsigned long long>(keys[i]) << 32 | ~static_cast<uint32_t>(i);
  });
  __syncthreads();
  int32_t* predicted = args.predicted + kept * args.keep_stride + line.head * args.keep_stride_head;
  int parts = 1;
  while (parts < 32 && parts * 2 * chosen <= static_cast<int>(blockDim.x)) parts *= 2;
  int part = threadIdx.x % parts, stride = blockDim.x / parts;
  for (int base = 0; base < chosen; base += stride) {
    int e = base + static_cast<int>(threadIdx.x) / parts;
    unsigned long long me = e < chosen ? ranked[e] : 0;
    int better = 0;
    for (int j = part; j < chosen; j += parts) better += ranked[j] > me;
    for (int d = 1; d < parts; d *= 2) better += __shfl_xor_sync(kAll, better, d);
    if (e < chosen && part == 0) predicted[better] = line.lo + static_cast<int>(~static_cast<uint32_t>(me));
  }
  for (int k = chosen + threadIdx.x; k < budget; k += blockDim.x) predicted[k] = kNone;
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_dense_scores(const SkvSelect* args, const Launch* where) {
  return launch(*where, dense_kernel, dim3(args->n * args->rows * args->heads), 512, 0, *args);
}

// Shared memory of a launch, without the keys: the caller keeps them in global memory when they do not fit.
SKV_EXPORT int64_t skv_select_shared(int64_t table_width) {
  return kRankable * 8 + kBins * 4 + (table_width + 31) / 32 * 8;
}

SKV_EXPORT int skv_select(const SkvSelect* args, const Launch* where) {
  size_t shared = skv_select_shared(args->table_width) + (args->keys ? 0 : args->table_width * 4);
  int threads = args->table_width <= 1024 ? 256 : args->table_width <= 4096 ? 512 : 1024;
  return launch(*where, select_kernel, dim3(args->n * args->rows * args->heads), threads, shared, *args);
}
