// Scores of candidate pages: every query head of both rows against the landmarks, each landmark read once.
//
// Work is cut into chunks (score_chunks.cuh). Where the device has a block for every chunk that the tables have room for,
// the block's warps share its pages; a chunk without candidates ends at once. Otherwise a warp takes a chunk at a time;
// chunks without candidates do not exist, so a captured launch costs what the lengths of the moment need. Sums are taken
// over 16 pages and then joined in order, so both ways give the same bits. Logits are kept in base 2 and not yet
// normalised: select needs the sum over all chunks first.
#include "landmark.cuh"
#include "ptx.cuh"
#include "score_chunks.cuh"

#include <type_traits>

namespace skv {

constexpr int kScoreThreads = 128;
constexpr int kTile = 16;  // pages of a product: a warp's share of a chunk that a block has

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

// Maximum and sum of exponentials of a set of base-2 logits.
struct Sum {
  float top = -kInf, sum = 0;
  __device__ __forceinline__ void add(float x) { join(x, 1.0f); }
  __device__ __forceinline__ void join(float other_top, float other_sum) {
    float highest = fmaxf(top, other_top);
    if (highest == -kInf) return;
    sum = sum * power_of_two(top - highest) + other_sum * power_of_two(other_top - highest);
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

// Landmarks of a tile on their way: of two pages a lane, those of its row and of row + 8, its share of every vector.
template <int kDim>
struct Marks {
  static constexpr int kWords = kDim / 32;  // of eight codes; the four lanes of a row share a vector
  uint32_t codes[2][kParts][kWords];
  uint2 scales[2];

  __device__ __forceinline__ void load(const SkvView& view, int head, int page, int i) {
    bool wanted = page >= 0 && page < view.pages;
    int64_t unit = static_cast<int64_t>(wanted ? page : 0) * view.heads + head;
    using Piece = typename std::conditional<kWords == 4, uint4, uint2>::type;
    auto* source = reinterpret_cast<const Piece*>(static_cast<const uint32_t*>(view.landmarks) + unit * (kParts * kDim / 8));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Piece piece = __ldcg(source + part * 4 + lane_id() % 4);
      codes[i][part][0] = piece.x;
      codes[i][part][1] = piece.y;
      if constexpr (kWords == 4) {
        codes[i][part][2] = piece.z;
        codes[i][part][3] = piece.w;
      }
    }
    scales[i] = __ldcg(static_cast<const uint2*>(view.scales) + unit);
  }
  // Scales of one page times the queries' scale.
  __device__ __forceinline__ void scales_of(int i, float scale, float (&out)[kParts]) const {
    out[0] = __uint_as_float(scales[i].x << 16) * scale;
    out[1] = __uint_as_float(scales[i].x & 0xffff0000u) * scale;
    out[2] = __uint_as_float(scales[i].y << 16) * scale;
    out[3] = __uint_as_float(scales[i].y & 0xffff0000u) * scale;
  }
};

// Queries of a warp's columns as the products' second operand. A dot product does not care for the order of its terms: a
// lane holds what its words of codes are multiplied with, in the order in which their pairs come out.
template <typename T, int kDim, int kTiles>
struct Queries {
  static constexpr int kWords = kDim / 32;
  uint32_t pairs[kTiles][kWords][4];

  __device__ __forceinline__ void load(const SkvScore& args, const Item& item) {
    int group = static_cast<int>(args.group);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int q = tile * 8 + lane_id() / 4;  // the query head whose elements this lane holds
      int64_t line = item.n * args.rows + q / group;
      auto* source = static_cast<const T*>(args.q) + line * args.stride_q + (item.head * group + q % group) * kDim +
                     lane_id() % 4 * (kDim / 4);
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        uint4 data = make_uint4(0, 0, 0, 0);
        if (q < args.rows * args.group) data = *reinterpret_cast<const uint4*>(source + word * 8);
        pairs[tile][word][0] = __byte_perm(data.x, data.z, 0x5410);
        pairs[tile][word][1] = __byte_perm(data.x, data.z, 0x7632);
        pairs[tile][word][2] = __byte_perm(data.y, data.w, 0x5410);
        pairs[tile][word][3] = __byte_perm(data.y, data.w, 0x7632);
      }
    }
  }
};

// Largest value and sum over the eight rows of a column, the same in all of its lanes.
__device__ __forceinline__ Sum column_sum(float low, float high) {
  float top = fmaxf(low, high);
  for (int bits = 4; bits < 32; bits <<= 1) top = fmaxf(top, __shfl_xor_sync(kAll, top, bits));
  float sum = top > -kInf ? power_of_two(low - top) + power_of_two(high - top) : 0.0f;
  for (int bits = 4; bits < 32; bits <<= 1) sum += __shfl_xor_sync(kAll, sum, bits);
  return Sum{top, sum};
}

// Tensor cores: landmarks are the 16-row operand, one product for each of their vectors, and queries the 8-column one. So
// a lane gets all logits of a page and a query head. Writes the tile's logits and joins its sums to those before it.
template <typename T, int kDim, int kTiles>
__device__ __forceinline__ void score_tile(const Marks<kDim>& marks, const Queries<T, kDim, kTiles>& queries,
                                           const Column (&columns)[kTiles][2], int first, float scale,
                                           Sum (&sums)[kTiles][2]) {
  float logits[kTiles][kParts][4] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int word = 0; word < kDim / 32; ++word) {
      uint32_t a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = code_pair<T>(marks.codes[0][part][word], i);
        b[i] = code_pair<T>(marks.codes[1][part][word], i);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        auto& query = queries.pairs[tile][word];
        multiply<T>(logits[tile][part], {a[0], b[0], a[1], b[1]}, query[0], query[1]);
        multiply<T>(logits[tile][part], {a[2], b[2], a[3], b[3]}, query[2], query[3]);
      }
    }
  float scales[2][kParts];
  marks.scales_of(0, scale, scales[0]);
  marks.scales_of(1, scale, scales[1]);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Column& column = columns[tile][j];
      float joined[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[kParts], top = -kInf, sum = 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          x[part] = logits[tile][part][half * 2 + j] * scales[half][part];
          top = fmaxf(top, x[part]);
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum += power_of_two(x[part] - top);
        joined[half] = top + log_of_two(sum);
        int page = first + lane_id() / 4 + half * 8;
        if (page >= column.lo && page < column.hi) {
          column.logits[page] = joined[half];
        } else {
          joined[half] = -kInf;
        }
      }
      Sum mine = column_sum(joined[0], joined[1]);
      sums[tile][j].join(mine.top, mine.sum);
    }
}

template <int kTiles>
__device__ __forceinline__ void find_columns(const SkvScore& args, int64_t heads, const Item& item,
                                             Column (&columns)[kTiles][2]) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i)
    columns[i / 2][i % 2] = column_of(args, heads, item, i / 2 * 8 + lane_id() % 4 * 2 + i % 2);
}

// A block for each chunk, a tile for each of its warps.
template <typename T, int kDim, int kTiles>
__global__ void __launch_bounds__(kScoreThreads)
    score_few_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvScore args) {
  static_assert(kChunk == kTile * kScoreThreads / 32, "a tile for each warp");
  __shared__ float2 parts[kChunk / kTile][kTiles * 8];  // top and sum of each tile
  wait_for_previous_kernel();
  if (blockIdx.x >= args.blocks) {
    reorder(view, args);
    return;
  }
  int heads = static_cast<int>(view.heads), lane = lane_id();
  Item item = find_item(args, Spans{}, true, 0, heads, static_cast<int>(blockIdx.x));
  int first = item.page + warp_id() * kTile;
  int mine = first + lane % kTile < args.table_width ? args.table[item.n * args.table_width + first + lane % kTile] : kNone;
  bool wanted = false;
  for (int64_t row = item.n * args.rows; row < (item.n + 1) * args.rows; ++row)
    wanted |= get(args.lo, row) < item.page + kChunk && get(args.hi, row) > item.page;
  if (!wanted) return;
  Marks<kDim> marks;
  for (int i = 0; i < 2; ++i) marks.load(view, item.head, __shfl_sync(kAll, mine, lane / 4 + i * 8), i);
  Queries<T, kDim, kTiles> queries;
  queries.load(args, item);
  Column columns[kTiles][2];
  find_columns<kTiles>(args, heads, item, columns);
  Sum sums[kTiles][2];
  score_tile<T, kDim, kTiles>(marks, queries, columns, first, static_cast<float>(args.scale) * kLog2e, sums);
  for (int i = 0; i < 2 * kTiles; ++i)
    if (lane < 4) parts[warp_id()][i / 2 * 8 + lane * 2 + i % 2] = make_float2(sums[i / 2][i % 2].top, sums[i / 2][i % 2].sum);
  __syncthreads();
  Column column = column_of(args, heads, item, static_cast<int>(threadIdx.x));
  if (threadIdx.x >= kTiles * 8 || column.logits == nullptr) return;
  Sum all;
  for (int tile = 0; tile < kChunk / kTile; ++tile) all.join(parts[tile][threadIdx.x].x, parts[tile][threadIdx.x].y);
  *reinterpret_cast<float2*>(column.partial) = make_float2(all.top, all.sum);
}

// A warp for each chunk, tile after tile; the next one's landmarks are on their way.
template <typename T, int kDim, int kTiles>
__global__ void __launch_bounds__(kScoreThreads, kTiles == 1 ? 4 : 3)
    score_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvScore args) {
  SKV_DYNAMIC_SHARED(shared);
  __shared__ BlockScratch scratch;
  wait_for_previous_kernel();
  if (blockIdx.x >= args.blocks) {
    reorder(view, args);
    return;
  }
  int requests = static_cast<int>(args.n), heads = static_cast<int>(view.heads), row = lane_id() / 4;
  Spans spans{reinterpret_cast<int*>(shared), reinterpret_cast<int*>(shared) + requests + 1};
  find_spans(args, spans, scratch);
  int items = spans.start[requests] * heads;
  Tickets tickets = tickets_for(args, items);
  float scale = static_cast<float>(args.scale) * kLog2e;

  for (int index = blockIdx.x * (blockDim.x >> 5) + warp_id(); index < items; index = tickets.next()) {
    Item item = find_item(args, spans, false, requests, heads, index);
    tickets.draw();
    // Physical pages of the chunk, two a lane; kNone beyond the table.
    const int32_t* table = args.table + item.n * args.table_width;
    int low_page = item.page + lane_id() < args.table_width ? table[item.page + lane_id()] : kNone;
    int high_page = item.page + 32 + lane_id() < args.table_width ? table[item.page + 32 + lane_id()] : kNone;
    auto load = [&](Marks<kDim>& marks, int tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        marks.load(view, item.head, __shfl_sync(kAll, tile < 2 ? low_page : high_page, tile % 2 * kTile + row + i * 8), i);
    };
    Marks<kDim> marks[2];
    load(marks[0], 0);
    Queries<T, kDim, kTiles> queries;
    queries.load(args, item);
    Column columns[kTiles][2];
    find_columns<kTiles>(args, heads, item, columns);
    Sum sums[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kChunk / kTile; ++tile) {
      if (tile + 1 < kChunk / kTile) load(marks[(tile + 1) % 2], tile + 1);
      score_tile<T, kDim, kTiles>(marks[tile % 2], queries, columns, item.page + tile * kTile, scale, sums);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i)
      if (row == 0 && columns[i / 2][i % 2].logits)
        *reinterpret_cast<float2*>(columns[i / 2][i % 2].partial) = make_float2(sums[i / 2][i % 2].top, sums[i / 2][i % 2].sum);
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
  Tickets tickets = tickets_for(args, items);
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
        Sum joined[kPlainQueries];  // over the vectors of the page's landmark
        for (int part = 0; physical >= 0 && part < kParts; ++part) {
          int64_t vector = (static_cast<int64_t>(physical) * heads + item.head) * kParts + part;
          auto* words = static_cast<const uint32_t*>(view.landmarks) + vector * (dim / kRun);
          float times = to_float(static_cast<const __nv_bfloat16*>(view.scales)[vector]) * scale;
          float logits[kPlainQueries] = {};
          for (int d = 0; d < dim; d += kRun) {
            uint32_t word = words[d / kRun];
#pragma unroll
            for (int i = 0; i < kRun; ++i) {
              float x = static_cast<float>(static_cast<int>(word >> 4 * i & 15) - 8);
#pragma unroll
              for (int q = 0; q < kPlainQueries; ++q) logits[q] += x * queries[q * dim + d + i];
            }
          }
#pragma unroll
          for (int q = 0; q < kPlainQueries; ++q) joined[q].add(logits[q] * times);
        }
#pragma unroll
        for (int q = 0; q < kPlainQueries; ++q) {
          Column column = column_of(args, heads, item, first + q);
          if (column.logits == nullptr || page < column.lo || page >= column.hi) continue;
          float x = joined[q].top + log_of_two(joined[q].sum);
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
  int64_t chunks = args.n * view.heads * ((args.table_width + kChunk - 1) / kChunk);
  bool one = args.rows * args.group <= 8, few = args.blocks == chunks;
  auto* kernel = one ? few ? score_few_kernel<T, kDim, 1> : score_kernel<T, kDim, 1>
                     : few ? score_few_kernel<T, kDim, 2> : score_kernel<T, kDim, 2>;
  return launch(where, kernel, grid(view, args), kScoreThreads, few ? 0 : (2 * args.n + 1) * sizeof(int), view, args);
}

}  // namespace skv

using namespace skv;

SKV_EXPORT int skv_score(const SkvView* view, const SkvScore* args, const Launch* where) {
  bool cores = args->rows * args->group <= 16;
  if (cores && args->q_dtype == SKV_BF16 && view->head_dim == 128) return launch_score<__nv_bfloat16, 128>(*view, *args, *where);
  if (cores && args->q_dtype == SKV_BF16 && view->head_dim == 64) return launch_score<__nv_bfloat16, 64>(*view, *args, *where);
  if (cores && args->q_dtype == SKV_FP16 && view->head_dim == 128) return launch_score<__half, 128>(*view, *args, *where);
  if (cores && args->q_dtype == SKV_FP16 && view->head_dim == 64) return launch_score<__half, 64>(*view, *args, *where);
  size_t queries = static_cast<size_t>(kScoreThreads / 32) * kPlainQueries * view->head_dim * sizeof(float);
  size_t shared = (2 * args->n + 1 + 3) / 4 * 16 + queries;
  return launch(*where, score_plain_kernel, grid(*view, *args), kScoreThreads, shared, *view, *args);
}
