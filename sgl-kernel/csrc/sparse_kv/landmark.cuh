// What stands for a closed page when queries are scored: a mean of its keys in which those that stand out weigh more.
// ops/landmarks.py says why; this must equal it.
#pragma once
#include "common.cuh"

namespace skv {

constexpr float kOutlierWeight = 0.7f;
constexpr int kMostLaneElements = 8;  // head_dim at most 256

__device__ __forceinline__ float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits >>= 1) x += __shfl_xor_sync(kAll, x, bits);
  return x;
}

// One warp makes one unit's landmark. key(token, d): a value of the page's keys in float32. At most 32 tokens a page.
template <typename Key>
__device__ __forceinline__ void make_landmark(const SkvView& view, int64_t landmark, Key key) {
  int dim = static_cast<int>(view.head_dim), tokens = static_cast<int>(view.page_size);
  float mean[kMostLaneElements] = {}, sum[kMostLaneElements] = {};
#pragma unroll 8
  for (int t = 0; t < tokens; ++t) {
#pragma unroll
    for (int i = 0; i < kMostLaneElements; ++i)
      if (i * 32 + lane_id() < dim) mean[i] += key(t, i * 32 + lane_id());
  }
  float distance = 0;  // of the token whose number is the lane's
#pragma unroll 8
  for (int t = 0; t < tokens; ++t) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kMostLaneElements; ++i) {
      int d = i * 32 + lane_id();
      if (d >= dim || d % (dim / 2) < dim / 4) continue;
      float offset = key(t, d) - mean[i] / static_cast<float>(tokens);
      squares += offset * offset;
    }
    squares = warp_sum(squares);
    if (lane_id() == t) distance = squares;
  }
  float average = warp_sum(distance) / static_cast<float>(tokens);
  // No distance is more than `tokens` times their average: the exponential needs no maximum taken off.
  float share = kOutlierWeight * distance / fmaxf(average, 1e-30f);
  float weight = lane_id() < tokens ? exp2f(share * kLog2e) : 0.0f;
  float total = warp_sum(weight);
#pragma unroll 8
  for (int t = 0; t < tokens; ++t) {
    float mine = __shfl_sync(kAll, weight, t);
#pragma unroll
    for (int i = 0; i < kMostLaneElements; ++i)
      if (i * 32 + lane_id() < dim) sum[i] += mine * key(t, i * 32 + lane_id());
  }
#pragma unroll
  for (int i = 0; i < kMostLaneElements; ++i)
    if (i * 32 + lane_id() < dim)
      store_element(view.landmarks, landmark + i * 32 + lane_id(), view.landmark_dtype, sum[i] / total);
}

}  // namespace skv
