// What every kernel shares: constants, element types, sums over warps and blocks, launching.
#pragma once
#ifdef SPARSE_KV_EMULATE
#include "cuda_emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif
#include <cstdint>

#include "abi.h"

// Dynamic shared memory, and the launch of a kernel, have no spelling that both compilers read.
#ifdef SPARSE_KV_EMULATE
#define SKV_DYNAMIC_SHARED(name) \
  char* name =                   \
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(emulator::state.dynamic_shared.data()) + 127) & ~uintptr_t(127))
#else
#define SKV_DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
#endif

namespace skv {

constexpr int kNone = -1;
constexpr int kNever = -1;                // stamp of a free slot
constexpr int kReserved = INT32_MAX;      // stamp of a slot that must not be used
constexpr int kClaim = INT32_MIN;         // slot_of holds kClaim + entry while missing units look for a winner
constexpr int kErrorCapacity = 1;
constexpr unsigned kAll = 0xffffffffu;
constexpr float kInf = __builtin_huge_valf();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Columns of a counter row; table operations keep those before kCounters.
enum Counter {
  kSelected, kHit, kMissed, kPrefetched, kUseful, kWasted, kEvicted, kTokensIn, kCounters,
  kPrefixHost = kCounters, kPrefixCache
};

using Counter64 = unsigned long long;

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

__device__ __forceinline__ int64_t get(const SkvInts& ints, int64_t i) {
  return ints.wide ? static_cast<const int64_t*>(ints.data)[i] : static_cast<const int32_t*>(ints.data)[i];
}

__device__ __forceinline__ int element_bytes(int64_t dtype) { return dtype == SKV_FP32 ? 4 : 2; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16(x); }

// Element i of an array whose type is known at run time only; for code where that costs nothing: each such load is waited
// for before the next begins.
__device__ __forceinline__ float load_element(const void* p, int64_t i, int64_t dtype) {
  if (dtype == SKV_BF16) return to_float(static_cast<const __nv_bfloat16*>(p)[i]);
  if (dtype == SKV_FP16) return to_float(static_cast<const __half*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

// Sixteen bytes past the first-level cache: what another thread of the block, or the host, wrote.
__device__ __forceinline__ int4 load16(const void* p) { return __ldcg(static_cast<const int4*>(p)); }

// Copies rows of 16-byte pieces with threads first, first + stride, ...
__device__ __forceinline__ void copy16(void* to, const void* from, int bytes, int first, int stride) {
  auto* target = static_cast<int4*>(to);
  auto* source = static_cast<const int4*>(from);
  int pieces = bytes >> 4;
  int i = first;
  for (; i + 3 * stride < pieces; i += 4 * stride) {
    int4 a = __ldcg(source + i), b = __ldcg(source + i + stride);
    int4 c = __ldcg(source + i + 2 * stride), d = __ldcg(source + i + 3 * stride);
    target[i] = a;
    target[i + stride] = b;
    target[i + 2 * stride] = c;
    target[i + 3 * stride] = d;
  }
  for (; i < pieces; i += stride) target[i] = __ldcg(source + i);
}

struct BlockScratch {
  int warp[2][32];
};

// Sum over the block, the same in every thread. Calls alternate `turn` 0 and 1, so that one barrier is enough: a thread
// can be one call ahead of another, never two.
__device__ __forceinline__ int block_sum(int value, BlockScratch& scratch, int turn) {
  int sum = __reduce_add_sync(kAll, value);
  if (lane_id() == 0) scratch.warp[turn][warp_id()] = sum;
  __syncthreads();
  int warps = blockDim.x >> 5;
  return __reduce_add_sync(kAll, lane_id() < warps ? scratch.warp[turn][lane_id()] : 0);
}

// Exclusive prefix sum over the block in thread order, and the total. Ends with a barrier: scratch is free again.
__device__ __forceinline__ int block_scan(int value, BlockScratch& scratch, int& total) {
  int inclusive = value;
  for (int d = 1; d < 32; d <<= 1) {
    int other = __shfl_up_sync(kAll, inclusive, d);
    if (lane_id() >= d) inclusive += other;
  }
  if (lane_id() == 31) scratch.warp[0][warp_id()] = inclusive;
  __syncthreads();
  int sum = lane_id() < static_cast<int>(blockDim.x >> 5) ? scratch.warp[0][lane_id()] : 0;
  total = __reduce_add_sync(kAll, sum);
  int before = __reduce_add_sync(kAll, lane_id() < warp_id() ? sum : 0) + inclusive - value;
  __syncthreads();
  return before;
}

// Runs the rest of a kernel only when the one before it in the stream has finished. Launched without the attribute that
// lets kernels overlap, both do nothing.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if !defined(SPARSE_KV_EMULATE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Launch {
  cudaStream_t stream;
  int device;
  int overlap;  // let the kernel's launch overlap the end of the one before it
};

// While it lives, blocks start by number, as hardware has it: for kernels whose later blocks wait for earlier ones.
struct InOrder {
#ifdef SPARSE_KV_EMULATE
  InOrder() { emulator::state.in_order = true; }
  ~InOrder() { emulator::state.in_order = false; }
#endif
};

#ifdef SPARSE_KV_EMULATE
template <typename... Params, typename... Args>
int launch(const Launch&, void (*kernel)(Params...), dim3 grid, int threads, size_t shared, Args... args) {
  if (grid.x * grid.y * grid.z == 0) return 0;
  emulator::launch(grid, dim3(threads), shared, [=] { kernel(args...); });
  return 0;
}
inline int major_version(int) { return SPARSE_KV_EMULATE; }
inline int shared_limit(int) { return 227 * 1024; }
#else
template <typename... Params, typename... Args>
int launch(const Launch& where, void (*kernel)(Params...), dim3 grid, int threads, size_t shared, Args... args) {
  if (grid.x * grid.y * grid.z == 0) return 0;
  cudaError_t status = cudaSetDevice(where.device);
  // A block has 48 KB without asking, of which a kernel's own variables may take nearly all.
  if (status == cudaSuccess && shared > 0)
    status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = where.stream;
  config.attrs = &attribute;
  config.numAttrs = where.overlap ? 1 : 0;
  status = cudaLaunchKernelEx(&config, kernel, Params(args)...);
  return status == cudaSuccess ? cudaGetLastError() : status;
}
inline int major_version(int device) {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major;
}
inline int shared_limit(int device) {
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}
#endif

}  // namespace skv

#define SKV_EXPORT extern "C" __attribute__((visibility("default")))
