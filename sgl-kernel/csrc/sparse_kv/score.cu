// Scores of candidate pages: every query head of both rows against the landmarks, each landmark read once.
//
// Work is cut into chunks of kChunk logical pages of one (request, kv head), counted from page 0, whatever the batch: a
// request's result does not depend on its neighbours. A warp takes a chunk at a time; chunks without candidates do not
// exist, so a captured launch costs what the lengths of the moment need. Where there is a warp for every chunk that a
// table has room for, each knows its own without looking at the lengths, which saves a trip to memory. Logits are kept in
// base 2 and not yet normalised: select needs the sum over all chunks first.
#include "ptx.cuh"

namespace skv {

constexpr int kChunk = 64;
constexpr int kScoreThreads = 128;
constexpr int kFewBlocks = 256;  // two for each multiprocessor of a large device, whatever their registers

// Bounds of one request: chunks [first, first + count) hold a candidate of some row.
struct Spans {
  int* start;  // [n + 1] chunks before each request
  int* first;  // [n]
};

__device__ __forceinline__ void find_spans(const SkvScore& args, const Spans& spans, BlockScratch& scratch) {
  int before = 0, n = static_cast<int>(args.n), rows = static_cast<int>(args.rows);
  for (int base = 0; base < n; base += blockDim.x) {
    int i = base + threadIdx.x, first = 0, last = 0;
    if (i < n) {
      int64_t low = args.table_width, high = 0;
      for (int r = 0; r < rows; ++r) {
        int64_t lo = get(args.lo, i * rows + r), hi = min(get(args.hi, i * rows + r), args.table_width);
        if (lo >= hi) continue;
        low = min(low, lo);
        high = max(high, hi);
      }
      if (low < high) {
        first = static_cast<int>(low / kChunk);
        last = static_cast<int>((high + kChunk - 1) / kChunk);
      }
      spans.first[i] = first;
    }
    int total, mine = block_scan(last - first, scratch, total);
    if (i < n) spans.start[i] = before + mine;
    before += total;
  }
  if (threadIdx.x == 0) spans.start[n] = before;
  __syncthreads();
}

// Queries in the order in which attention reads them, 16 bytes a thread: by blocks beyond those that score.
__device__ __forceinline__ void reorder(const SkvView& view, const SkvScore& args) {
  int rows = static_cast<int>(args.rows), heads = static_cast<int>(view.heads), element = element_bytes(args.q_dtype);
  int bytes = static_cast<int>(args.group * view.head_dim) * element, pieces = bytes / 16;
  int i = static_cast<int>((blockIdx.x - args.blocks) * blockDim.x + threadIdx.x), line = i / pieces;
  int row = line % rows, head = line / rows % heads, n = line / rows / heads;
  if (n >= args.n) return;
  auto* source = static_cast<const char*>(args.q) + (n * rows + row) * args.stride_q * element + head * bytes;
  static_cast<int4*>(args.q_out)[i] = reinterpret_cast<const int4*>(source)[i - line * pieces];
}

// Chunks for one warp: first the one of its own number, then whichever nobody has taken. Blocks that start late, where
// other kernels hold multiprocessors, find less to do.
struct Tickets {
  int32_t* counters;
  int items, blocks, warps;
  int ticket = 0;

  __device__ __forceinline__ bool more() const { return items > warps; }
  __device__ __forceinline__ void draw() {
    if (more() && lane_id() == 0) ticket = atomicAdd(counters, 1);
  }
  __device__ __forceinline__ int next() const { return more() ? warps + __shfl_sync(kAll, ticket, 0) : items; }
  // The last block leaves the counters as the next call expects them.
  __device__ __forceinline__ void finish() const {
    if (!more()) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(counters + 1, 1) != blocks - 1) return;
    atomicExch(counters, 0);
    atomicExch(counters + 1, 0);
  }
};

struct Item {
  int n, head, page;  // request, kv head, first logical page of the chunk
};

// Chunks that the tables of all requests have room for.
__device__ __forceinline__ int chunks_of(const SkvScore& args) {
  return static_cast<int>((args.table_width + kChunk - 1) / kChunk);
}

// All chunks of each (request, kv head) when `spans` is not known, those with a candidate otherwise.
__device__ __forceinline__ Item find_item(const SkvScore& args, const Spans& spans, bool every, int n, int heads, int item) {
  int chunk = item / heads;
  if (every) return Item{chunk / chunks_of(args), item % heads, chunk % chunks_of(args) * kChunk};
  int low = 0, high = n - 1;  // last request that starts at or before the chunk
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (spans.start[middle] <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return Item{low, item % heads, (spans.first[low] + chunk - spans.start[low]) * kChunk};
}

// Maximum and sum of exponentials of a set of base-2 logits.
struct Sum {
  float top = -kInf, sum = 0;
  __device__ __forceinline__ void add(float x) { join(x, 1.0f); }
  __device__ __forceinline__ void join(float other_top, float other_sum) {
    float highest = fmaxf(top, other_top);
    if (highest == -kInf) return;
    sum = sum * exp2f(top - highest) + other_sum * exp2f(other_top - highest);
    top = highest;
  }
  __device__ __forceinline__ void join_lane(int bits) {
    float other_top = __shfl_xor_sync(kAll, top, bits), other_sum = __shfl_xor_sync(kAll, sum, bits);
    join(other_top, other_sum);
  }
};

// What one lane knows of a query column: where its logits go and which pages are its candidates.
struct Column {
  float* logits;   // of its query head, or null for a column beyond the last
  float* partial;
  int lo, hi;
};

__device__ __forceinline__ Column column_of(const SkvScore& args, int64_t heads, const Item& item, int index) {
  if (index >= args.rows * args.group) return Column{nullptr, nullptr, 0, 0};
  int group = static_cast<int>(args.group), row = index / group, query = index % group;
  int64_t line = ((item.n * args.rows + row) * heads + item.head) * args.group + query;
  int64_t chunks = (args.table_width + kChunk - 1) / kChunk;
  return Column{args.logits + line * args.table_width, args.partials + (line * chunks + item.page / kChunk) * 2,
                static_cast<int>(get(args.lo, item.n * args.rows + row)),
                static_cast<int>(min(get(args.hi, item.n * args.rows + row), args.table_width))};
}

// Tensor cores: landmarks are the 16-row operand, queries the 8-column one. A dot product does not care for the order of
// its terms, so lane c of a row's four lanes takes 16 contiguous bytes at 64 j + 16 c instead of the fragment's own two
// times four: 32-byte sectors are read whole.
// kAtOnce: groups of 16 pages whose landmarks are loaded together.
template <typename T, int kDim, int kTiles, int kAtOnce>
__global__ void __launch_bounds__(kScoreThreads, kTiles == 1 && kAtOnce == 2 ? 4 : 1)
    score_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvScore args) {
  constexpr int kSteps = kDim / 32;  // of 32 dimensions: one 16-byte load, two multiplies
  SKV_DYNAMIC_SHARED(shared);
  __shared__ BlockScratch scratch;
  wait_for_previous_kernel();
  if (blockIdx.x >= args.blocks) {
    reorder(view, args);
    return;
  }
  int requests = static_cast<int>(args.n), heads = static_cast<int>(view.heads);
  Spans spans{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + requests + 1};
  int blocks = static_cast<int>(args.blocks), warps = blocks * static_cast<int>(blockDim.x >> 5);
  int items = requests * chunks_of(args) * heads;
  bool every = items <= warps;
  if (!every) {
    find_spans(args, spans, scratch);
    items = spans.start[requests] * heads;
  }
  Tickets tickets{args.tickets, items, blocks, warps};
  int row = lane_id() / 4, part = lane_id() % 4;
  auto* landmarks = static_cast<const T*>(view.landmarks);
  float scale = static_cast<float>(args.scale) * kLog2e;

  for (int index = blockIdx.x * (blockDim.x >> 5) + warp_id(); index < items; index = tickets.next()) {
    Item item = find_item(args, spans, every, requests, heads, index);
    tickets.draw();
    uint32_t query[kTiles][kSteps][4];
    Column columns[kTiles][2];
    Sum sums[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int q = tile * 8 + row;  // the query head whose elements this lane holds
      int group = static_cast<int>(args.group);
      int64_t line = item.n * args.rows + q / group;
      auto* source = static_cast<const T*>(args.q) + line * args.stride_q + (item.head * group + q % group) * kDim + part * 8;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        int4 data = make_int4(0, 0, 0, 0);
        if (q < args.rows * args.group) data = *reinterpret_cast<const int4*>(source + step * 32);
        query[tile][step][0] = data.x;
        query[tile][step][1] = data.y;
        query[tile][step][2] = data.z;
        query[tile][step][3] = data.w;
      }
      columns[tile][0] = column_of(args, heads, item, tile * 8 + part * 2);
      columns[tile][1] = column_of(args, heads, item, tile * 8 + part * 2 + 1);
    }
    // Physical pages of the chunk, two a lane; kNone beyond the table.
    const int32_t* table = args.table + item.n * args.table_width;
    int low_page = item.page + lane_id() < args.table_width ? table[item.page + lane_id()] : kNone;
    int high_page = item.page + 32 + lane_id() < args.table_width ? table[item.page + 32 + lane_id()] : kNone;
    if (every) {
      bool wanted = false;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const Column& column = columns[i / 2][i % 2];
        wanted |= column.logits && column.lo < item.page + kChunk && column.hi > item.page;
      }
      if (!__any_sync(kAll, wanted)) break;
    }

#pragma unroll
    for (int begin = 0; begin < kChunk / 16; begin += kAtOnce) {
      int4 data[kAtOnce][2][kSteps];  // loaded before the first logit is stored, which no later load passes
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        int group = begin + i / 2;
        int page = __shfl_sync(kAll, group < 2 ? low_page : high_page, group % 2 * 16 + row + i % 2 * 8);
        bool wanted = page >= 0 && page < view.pages;
        const T* source = landmarks + (static_cast<int64_t>(wanted ? page : 0) * heads + item.head) * kDim + part * 8;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          data[i / 2][i % 2][step] =
              wanted ? __ldcg(reinterpret_cast<const int4*>(source + step * 32)) : make_int4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce * kTiles; ++i) {
        int group = begin + i / kTiles, tile = i % kTiles;
        float logits[4] = {0, 0, 0, 0};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          auto& a = data[i / kTiles][0][step];
          auto& b = data[i / kTiles][1][step];
          multiply<T>(logits, {uint32_t(a.x), uint32_t(b.x), uint32_t(a.y), uint32_t(b.y)}, query[tile][step][0],
                      query[tile][step][1]);
          multiply<T>(logits, {uint32_t(a.z), uint32_t(b.z), uint32_t(a.w), uint32_t(b.w)}, query[tile][step][2],
                      query[tile][step][3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Column& column = columns[tile][j % 2];
          int page = item.page + group * 16 + row + j / 2 * 8;
          if (column.logits == nullptr || page < column.lo || page >= column.hi) continue;
          float x = logits[j] * scale;
          column.logits[page] = x;
          sums[tile][j % 2].add(x);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        for (int bits = 4; bits < 32; bits <<= 1) sums[tile][j].join_lane(bits);
        if (row == 0 && columns[tile][j].logits)
          *reinterpret_cast<float2*>(columns[tile][j].partial) = make_float2(sums[tile][j].top, sums[tile][j].sum);
      }
  }
  tickets.finish();
}

// Any types and any head_dim that is a multiple of 4: a lane takes a page, queries wait in shared memory as float32.
constexpr int kPlainQueries = 8;  // query heads per pass

__global__ void __launch_bounds__(kScoreThreads)
    score_plain_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvScore args) {
  SKV_DYNAMIC_SHARED(shared);
  __shared__ BlockScratch scratch;
  wait_for_previous_kernel();
  if (blockIdx.x >= args.blocks) {
    reorder(view, args);
    return;
  }
  int requests = static_cast<int>(args.n), heads = static_cast<int>(view.heads), dim = static_cast<int>(view.head_dim);
  Spans spans{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + requests + 1};
  auto* queries = reinterpret_cast<float*>(shared + (2 * requests + 1 + 3) / 4 * 16) + warp_id() * kPlainQueries * dim;
  find_spans(args, spans, scratch);
  int items = spans.start[requests] * heads;
  int blocks = static_cast<int>(args.blocks);
  Tickets tickets{args.tickets, items, blocks, blocks * static_cast<int>(blockDim.x >> 5)};
  float scale = static_cast<float>(args.scale) * kLog2e;

  for (int index = blockIdx.x * (blockDim.x >> 5) + warp_id(); index < items; index = tickets.next()) {
    Item item = find_item(args, spans, false, requests, heads, index);
    tickets.draw();
    for (int first = 0; first < args.rows * args.group; first += kPlainQueries) {
      __syncwarp();  // the last pass may still read the queries
      for (int i = lane_id(); i < kPlainQueries * dim; i += 32) {
        int q = first + i / dim;
        int64_t line = item.n * args.rows + q / args.group;
        int64_t place = line * args.stride_q + (item.head * args.group + q % args.group) * dim + i % dim;
        queries[i] = q < args.rows * args.group ? load_element(args.q, place, args.q_dtype) : 0.0f;
      }
      __syncwarp();
      Sum sums[kPlainQueries];
      for (int half = 0; half < kChunk / 32; ++half) {
        int page = item.page + half * 32 + lane_id();
        int physical = page < args.table_width ? args.table[item.n * args.table_width + page] : kNone;
        if (physical >= view.pages) physical = kNone;
        float logits[kPlainQueries] = {};
        if (physical >= 0) {
          int64_t base = (static_cast<int64_t>(physical) * heads + item.head) * dim;
          for (int d = 0; d < dim; d += 4) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = load_element(view.landmarks, base + d + i, view.landmark_dtype);
#pragma unroll
            for (int q = 0; q < kPlainQueries; ++q) {
              float4 y = *reinterpret_cast<const float4*>(queries + q * dim + d);
              logits[q] += x[0] * y.x + x[1] * y.y + x[2] * y.z + x[3] * y.w;
            }
          }
        }
#pragma unroll
        for (int q = 0; q < kPlainQueries; ++q) {
          Column column = column_of(args, heads, item, first + q);
          if (column.logits == nullptr || page < column.lo || page >= column.hi) continue;
          float x = logits[q] * scale;
          column.logits[page] = x;
          sums[q].add(x);
        }
      }
#pragma unroll
      for (int q = 0; q < kPlainQueries; ++q) {
        for (int bits = 1; bits < 32; bits <<= 1) sums[q].join_lane(bits);
        Column column = column_of(args, heads, item, first + q);
        if (lane_id() == 0 && column.logits)
          *reinterpret_cast<float2*>(column.partial) = make_float2(sums[q].top, sums[q].sum);
      }
    }
  }
  tickets.finish();
}

inline dim3 grid(const SkvView& view, const SkvScore& args) {
  int64_t bytes = args.n * view.heads * args.rows * args.group * view.head_dim * (args.q_dtype == SKV_FP32 ? 4 : 2);
  int64_t more = args.q_out ? (bytes / 16 + kScoreThreads - 1) / kScoreThreads : 0;
  return dim3(static_cast<unsigned>(args.blocks + more));
}

template <typename T, int kDim>
int launch_score(const SkvView& view, const SkvScore& args, const Launch& where) {
  size_t shared = (2 * args.n + 1) * sizeof(int);
  // While the device is not full, a warp's own chain of loads is what takes the time: it loads a whole chunk at once.
  bool few = args.blocks <= kFewBlocks;
  auto* kernel = args.rows * args.group <= 8 ? few ? score_kernel<T, kDim, 1, kChunk / 16> : score_kernel<T, kDim, 1, 2>
                                             : score_kernel<T, kDim, 2, 1>;
  return launch(where, kernel, grid(view, args), kScoreThreads, shared, view, args);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_score(const SkvView* view, const SkvScore* args, const Launch* where) {
  bool same = view->landmark_dtype == args->q_dtype && args->rows * args->group <= 16;
  if (same && args->q_dtype == SKV_BF16 && view->head_dim == 128) return launch_score<__nv_bfloat16, 128>(*view, *args, *where);
  if (same && args->q_dtype == SKV_BF16 && view->head_dim == 64) return launch_score<__nv_bfloat16, 64>(*view, *args, *where);
  if (same && args->q_dtype == SKV_FP16 && view->head_dim == 128) return launch_score<__half, 128>(*view, *args, *where);
  if (same && args->q_dtype == SKV_FP16 && view->head_dim == 64) return launch_score<__half, 64>(*view, *args, *where);
  size_t queries = static_cast<size_t>(kScoreThreads / 32) * kPlainQueries * view->head_dim * sizeof(float);
  size_t shared = (2 * args->n + 1 + 3) / 4 * 16 + queries;
  return launch(*where, score_plain_kernel, grid(*view, *args), kScoreThreads, shared, *view, *args);
}
