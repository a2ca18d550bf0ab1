// Instructions without a CUDA C++ spelling: the tensor cores' multiply and the bulk copy engine (sm_90 and later).
#pragma once
#include "common.cuh"

namespace skv {

#ifdef SPARSE_KV_EMULATE
constexpr bool kHasBulkCopy = SPARSE_KV_EMULATE >= 9;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasBulkCopy = false;
#else
constexpr bool kHasBulkCopy = true;
#endif

// c[16x8] += a[16x16] * b[16x8], fragments as in PTX mma.m16n8k16.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// A clock that all multiprocessors share, in nanoseconds; it may tick once a microsecond.
__device__ __forceinline__ Counter64 nanoseconds() {
#ifdef SPARSE_KV_EMULATE
  return emulator::nanoseconds();
#else
  Counter64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#endif
}

// Pair i of the eight codes in a word: numbers i and i + 4, each less 8, as two elements. With a constant in front, a code
// is the low end of a mantissa, so taking off constant and bias is exact.
template <typename T>
__device__ __forceinline__ uint32_t code_pair(uint32_t word, int i);

#ifdef SPARSE_KV_EMULATE

template <typename T>
inline uint32_t code_pair(uint32_t word, int i) {
  T pair[2] = {from_float<T>(static_cast<float>(word >> 4 * i & 15) - 8), from_float<T>(static_cast<float>(word >> (4 * i + 16) & 15) - 8)};
  uint32_t bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}

inline float power_of_two(float x) { return exp2f(x); }
inline float log_of_two(float x) { return log2f(x); }

template <typename T>
inline void multiply_emulated(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  int lane = emulator::lane();
  uint32_t regs[6] = {a[0], a[1], a[2], a[3], b0, b1};
  uint32_t all[6][32];
  for (int r = 0; r < 6; ++r)
    for (int i = 0; i < 32; ++i) all[r][i] = __shfl_sync(kAll, regs[r], i);
  auto element = [&](int r, int from, int half) {
    T pair[2];
    std::memcpy(pair, &all[r][from], 4);
    return to_float(pair[half]);
  };
  for (int j = 0; j < 4; ++j) {
    int row = lane / 4 + (j / 2) * 8, col = (lane % 4) * 2 + j % 2;
    for (int k = 0; k < 16; ++k) {
      float x = element((row >= 8) + (k >= 8) * 2, (row % 8) * 4 + (k % 8) / 2, k % 2);
      float y = element(4 + (k >= 8), col * 4 + (k % 8) / 2, k % 2);
      c[j] += x * y;
    }
  }
}
template <>
inline void multiply<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_emulated<__half>(c, a, b0, b1);
}
template <>
inline void multiply<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_emulated<__nv_bfloat16>(c, a, b0, b1);
}

// A barrier of the copy engine: `finished` phases, bytes still expected.
struct CopyBarrier {
  unsigned finished;
  int pending;
};
inline void barrier_init(CopyBarrier* barrier) { *barrier = CopyBarrier{0, 0}; }
inline void barrier_fence() {}
inline void barrier_expect(CopyBarrier* barrier, int bytes) {
  barrier->pending = bytes;
  if (bytes == 0) ++barrier->finished;
}
inline void barrier_wait(CopyBarrier* barrier, unsigned parity) {
  while ((barrier->finished & 1) == parity) emulator::yield();  // no progress: a copy that never comes is a deadlock
}
inline void bulk_load(void* shared, const void* global, int bytes, CopyBarrier* barrier) {
  std::memcpy(shared, global, bytes);
  barrier->pending -= bytes;
  if (barrier->pending == 0) ++barrier->finished;
}
inline void bulk_store(void* global, const void* shared, int bytes) { std::memcpy(global, shared, bytes); }
inline void bulk_commit() {}
template <int kPending>
inline void bulk_wait_read() {}
inline void bulk_wait_all() {}

#else

// (a & b) | c, as one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  asm("lop3.b32 %0, %0, %1, %2, 0xea;" : "+r"(a) : "r"(b), "r"(c));
  return a;
}

// Powers and logarithms of two, without what it takes to see numbers below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ __forceinline__ float log_of_two(float x) {
  asm("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

template <>
__device__ __forceinline__ uint32_t code_pair<__half>(uint32_t word, int i) {
  uint32_t bits = word >> i / 2 * 8;  // the code is the low or the high half of a byte: 1024 + code, or 1024 + 16 code
  if (i % 2 == 0) {
    bits = and_or(bits, 0x000f000fu, 0x64006400u);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(bits) : "r"(0x64086408u));
  } else {
    bits = and_or(bits, 0x00f000f0u, 0x64006400u);
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(bits) : "r"(0x2c002c00u), "r"(0xd480d480u));  // a sixteenth, less 72
  }
  return bits;
}
template <>
__device__ __forceinline__ uint32_t code_pair<__nv_bfloat16>(uint32_t word, int i) {
  uint32_t bits = and_or(word >> 4 * i, 0x000f000fu, 0x43004300u);  // 128 + code
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(bits) : "r"(0x3f803f80u), "r"(0xc308c308u));  // times 1, less 136
  return bits;
}

template <>
__device__ __forceinline__ void multiply<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

using CopyBarrier = uint64_t;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(CopyBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Makes initialised barriers, and shared memory that ordinary instructions touched, safe to hand to the copy engine.
__device__ __forceinline__ void barrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(CopyBarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(CopyBarrier* barrier, unsigned parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, CopyBarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last kPending groups of stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#else

// Never called: movers for these devices load and store.
__device__ __forceinline__ void barrier_init(CopyBarrier*) {}
__device__ __forceinline__ void barrier_fence() {}
__device__ __forceinline__ void barrier_expect(CopyBarrier*, int) {}
__device__ __forceinline__ void barrier_wait(CopyBarrier*, unsigned) {}
__device__ __forceinline__ void bulk_load(void*, const void*, int, CopyBarrier*) {}
__device__ __forceinline__ void bulk_store(void*, const void*, int) {}
__device__ __forceinline__ void bulk_commit() {}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {}
__device__ __forceinline__ void bulk_wait_all() {}

#endif
#endif

}  // namespace skv
