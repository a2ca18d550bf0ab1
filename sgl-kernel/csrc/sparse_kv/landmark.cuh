// What stands for a closed page when queries are scored: a mean of the keys of each of its quarters in which those that
// stand out weigh more, four bits a value. ops/landmarks.py says why; this makes the same bits: the same operations in the
// same order, each rounded once.
#pragma once
#include "common.cuh"

namespace skv {

constexpr int kParts = 4;  // vectors of a landmark
constexpr float kMostCode = 7;
constexpr float kLeastScale = 1e-30f;  // below it a vector counts as zero

constexpr int kRun = 8;  // values that a lane takes at once: a word of codes; head_dim is a multiple, at most 256

template <typename T>
struct alignas(16) Run {
  T x[kRun];
};

// Never contracted into one operation with one rounding.
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }

// The mean of a part's keys in each lane's dimensions, which begin with `first`; zeros beyond the last. Keys are read three
// times: registers are few where prefill and append make landmarks, and the cache is near. row(t): the key of token t.
template <typename T, typename Row>
__device__ __forceinline__ void weighted_mean(Row row, int tokens, int first, int dim, float (&mean)[kRun]) {
  auto load = [&](int t) {
    Run<T> run{};
    if (first < dim) run = *reinterpret_cast<const Run<T>*>(row(t) + first);
    return run;
  };
  const float share = 1.0f / static_cast<float>(tokens);
  float sum[kRun], distances = 0, average = 0, total = 0;  // lane t has the distance of token t
#pragma unroll 4
  for (int t = 0; t < tokens; ++t) {
    Run<T> key = load(t);
#pragma unroll
    for (int j = 0; j < kRun; ++j) sum[j] = t == 0 ? to_float(key.x[j]) : plus(sum[j], to_float(key.x[j]));
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) mean[j] = times(sum[j], share);
#pragma unroll 4
  for (int t = 0; t < tokens; ++t) {
    Run<T> key = load(t);
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      float offset = plus(to_float(key.x[j]), -mean[j]);
      bool slow = (first + j) % (dim / 2) >= dim / 4;
      squares = plus(squares, slow ? times(offset, offset) : 0.0f);
    }
    for (int bits = 16; bits > 0; bits >>= 1) squares = plus(squares, __shfl_xor_sync(kAll, squares, bits));
    if (lane_id() == t) distances = squares;
    average = t == 0 ? squares : plus(average, squares);
  }
  average = times(average, share);
  bool alike = average < kLeastScale;
  float weights = plus(times((alike ? 0.0f : distances) / (alike ? kLeastScale : average), 0.1f), 1.0f);
  for (int power = 0; power < 3; ++power) weights = times(weights, weights);
#pragma unroll 4
  for (int t = 0; t < tokens; ++t) {
    Run<T> key = load(t);
    float weight = __shfl_sync(kAll, weights, t);
    total = t == 0 ? weight : plus(total, weight);
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      float part = times(weight, to_float(key.x[j]));
      mean[j] = t == 0 ? part : plus(mean[j], part);
    }
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) mean[j] = mean[j] / total;
}

// One part's mean in four bits: a word of codes in each lane, the scale the same in all. Magnitudes are ordered as their
// bits are, NaN above all.
__device__ __forceinline__ uint32_t encode(const float (&mean)[kRun], __nv_bfloat16& scale) {
  unsigned top = 0;
#pragma unroll
  for (int j = 0; j < kRun; ++j) top = max(top, __float_as_uint(fabsf(mean[j])));
  scale = __float2bfloat16(times(__uint_as_float(__reduce_max_sync(kAll, top)), 1.0f / kMostCode));
  if (to_float(scale) < kLeastScale) scale = __float2bfloat16(0.0f);
  float inverse = to_float(scale) == 0.0f ? 0.0f : 1.0f / to_float(scale);
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    float code = fminf(fmaxf(rintf(times(mean[j], inverse)), -kMostCode), kMostCode);
    word |= static_cast<uint32_t>(static_cast<int>(code) + 8) << (4 * j);
  }
  return word;
}

// One warp makes the landmark of a unit. row(t): the key of the page's token t.
template <typename T, typename Row>
__device__ __forceinline__ void make_landmark(const SkvView& view, int64_t unit, Row row) {
  int dim = static_cast<int>(view.head_dim), runs = dim / kRun, tokens = static_cast<int>(view.page_size) / kParts;
  auto* codes = static_cast<uint32_t*>(view.landmarks) + unit * kParts * runs;
  auto* scales = static_cast<__nv_bfloat16*>(view.scales) + unit * kParts;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    float mean[kRun];
    weighted_mean<T>([&](int t) { return row(part * tokens + t); }, tokens, lane_id() * kRun, dim, mean);
    __nv_bfloat16 scale;
    uint32_t word = encode(mean, scale);
    if (lane_id() < runs) codes[part * runs + lane_id()] = word;
    if (lane_id() == 0) scales[part] = scale;
  }
}

// Calls f with a value of the type that a code names: its loads are of that type and need not wait for one another.
template <typename F>
__device__ __forceinline__ void with_type(int64_t dtype, F f) {
  if (dtype == SKV_BF16) {
    f(__nv_bfloat16{});
  } else if (dtype == SKV_FP16) {
    f(__half{});
  } else {
    f(float{});
  }
}

}  // namespace skv
