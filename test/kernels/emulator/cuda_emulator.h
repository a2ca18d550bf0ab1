// Runs CUDA kernels on the CPU, so that their logic is tested where there is no GPU.
//
// Every thread of a block is a fiber; blocks run one after another. Between two points of synchronisation the threads
// of a block, and the blocks of a grid, run in an order drawn from a seed, and warps run ahead of each other, so a missing
// barrier shows as a wrong result under some seed. A barrier that not every thread reaches is reported as a deadlock. What this does not model: memory
// ordering between blocks that run at once, time, and the memory system's alignment rules.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <sys/mman.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__ static
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulator {

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  bool done = false;
  uint3 thread{};
};

constexpr size_t kStackBytes = 128 << 10;

struct Warp {
  uint64_t value[32];
  unsigned arrived = 0;
  unsigned generation = 0;
};

struct State {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  void* scheduler = nullptr;
  int current = 0;
  int alive = 0;
  int arrived = 0;
  unsigned generation = 0;
  int reduction[2] = {0, 0};
  long progress = 0;
  uint3 block{};
  dim3 grid, dim;
  std::vector<char> dynamic_shared;
  std::function<void()> body;
  bool in_order = false;  // blocks run by number: for kernels whose later blocks wait for earlier ones
  std::mt19937 random{1};
};
inline State state;

// Saves the callee-saved registers of one context and restores those of the other.
extern "C" void emulator_switch(void** save, void* restore);
#if defined(__x86_64__)
asm(R"(
.text
.weak emulator_switch
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#else
#error "the CUDA emulator switches fibers with x86-64 code"
#endif

inline unsigned long long nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void yield() { emulator_switch(&state.fibers[state.current].stack_pointer, state.scheduler); }

inline void fiber_main() {
  state.body();
  state.fibers[state.current].done = true;
  --state.alive;
  ++state.progress;
  yield();
}

inline void start(Fiber& fiber) {
  if (fiber.stack == nullptr)
    fiber.stack = static_cast<char*>(
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  auto** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;  // keeps the stack 16-byte aligned as if fiber_main had been called
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.done = false;
}

inline void run_block(unsigned threads) {
  state.alive = threads;
  state.arrived = 0;
  for (auto& warp : state.warps) warp = Warp{};
  std::vector<int> order(threads);
  std::iota(order.begin(), order.end(), 0);
  // Some warps are held back until the others can go no further, so that those run as far ahead as barriers allow.
  std::vector<char> held(state.warps.size());
  bool everyone = true, stuck = true;
  while (state.alive > 0) {
    if (stuck || state.random() % 32 == 0) {
      everyone = state.random() % 4 == 0;
      for (auto& warp : held) warp = !everyone && state.random() % 2;
    }
    long before = state.progress;
    std::shuffle(order.begin(), order.end(), state.random);
    for (int i : order) {
      if (state.fibers[i].done || held[i / 32]) continue;
      state.current = i;
      emulator_switch(&state.scheduler, state.fibers[i].stack_pointer);
    }
    if (everyone && state.progress == before) {
      std::fprintf(stderr, "emulator: deadlock, %d of %u threads wait\n", state.alive, threads);
      std::abort();
    }
    stuck = state.progress == before;
  }
}

template <typename Body>
void launch(dim3 grid, dim3 dim, size_t shared, Body body) {
  unsigned threads = dim.x * dim.y * dim.z;
  if (state.fibers.size() < threads) state.fibers.resize(threads);
  state.warps.assign((threads + 31) / 32, Warp{});
  state.grid = grid;
  state.dim = dim;
  state.dynamic_shared.assign(shared + 1024, char(0xcd));
  state.body = body;
  unsigned blocks = grid.x * grid.y * grid.z;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (!state.in_order) std::shuffle(order.begin(), order.end(), state.random);
  for (unsigned b : order) {
    state.block = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    for (unsigned t = 0; t < threads; ++t) {
      state.fibers[t].thread = {t % dim.x, t / dim.x % dim.y, t / dim.x / dim.y};
      start(state.fibers[t]);
    }
    run_block(threads);
  }
}

inline int block_barrier(int value = 0) {
  unsigned mine = state.generation;
  state.reduction[mine & 1] += value;
  ++state.arrived;
  ++state.progress;
  while (state.generation == mine) {
    if (state.arrived == state.alive) {
      state.arrived = 0;
      ++state.generation;
      state.reduction[state.generation & 1] = 0;
      ++state.progress;
      break;
    }
    yield();
  }
  return state.reduction[mine & 1];
}

inline Warp& warp() { return state.warps[state.current / 32]; }
inline unsigned lane() { return state.current % 32; }

inline void warp_barrier() {
  Warp& w = warp();
  unsigned mine = w.generation;
  unsigned all = 0xffffffffu;
  w.arrived |= 1u << lane();
  ++state.progress;
  while (w.generation == mine) {
    if (w.arrived == all) {
      w.arrived = 0;
      ++w.generation;
      ++state.progress;
      break;
    }
    yield();
  }
}

template <typename T>
T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= 8);
  Warp& w = warp();
  std::memcpy(&w.value[lane()], &value, sizeof(T));
  warp_barrier();
  T result;
  std::memcpy(&result, &w.value[from & 31], sizeof(T));
  warp_barrier();
  return result;
}

template <typename T, typename F>
T fold(T value, F f) {
  Warp& w = warp();
  std::memcpy(&w.value[lane()], &value, sizeof(T));
  warp_barrier();
  T result, other;
  std::memcpy(&result, &w.value[0], sizeof(T));
  for (int i = 1; i < 32; ++i) {
    std::memcpy(&other, &w.value[i], sizeof(T));
    result = f(result, other);
  }
  warp_barrier();
  return result;
}

}  // namespace emulator

#define threadIdx (emulator::state.fibers[emulator::state.current].thread)
#define blockIdx (emulator::state.block)
#define gridDim (emulator::state.grid)
#define blockDim (emulator::state.dim)

inline void __syncthreads() { emulator::block_barrier(); }
inline int __syncthreads_or(int v) { return emulator::block_barrier(v != 0) != 0; }
inline int __syncthreads_count(int v) { return emulator::block_barrier(v != 0); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulator::warp_barrier(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { ++emulator::state.progress, emulator::yield(); }
inline long long clock64() { return emulator::state.progress; }
#define FULL_ONLY(mask) \
  if ((mask) != 0xffffffffu) std::abort()
template <typename T>
T __shfl_sync(unsigned mask, T v, int from) {
  FULL_ONLY(mask);
  return emulator::exchange(v, from);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int bits) {
  FULL_ONLY(mask);
  return emulator::exchange(v, emulator::lane() ^ bits);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T v, unsigned d) {
  FULL_ONLY(mask);
  unsigned lane = emulator::lane();
  return emulator::exchange(v, lane >= d ? lane - d : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T v, unsigned d) {
  FULL_ONLY(mask);
  unsigned lane = emulator::lane();
  return emulator::exchange(v, lane + d < 32 ? lane + d : lane);
}
inline unsigned __ballot_sync(unsigned mask, int v) {
  FULL_ONLY(mask);
  return emulator::fold<unsigned>(v ? 1u << emulator::lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __reduce_add_sync(unsigned, int v) {
  return emulator::fold<int>(v, [](int a, int b) { return a + b; });
}
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
  return emulator::fold<unsigned>(v, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return emulator::fold<unsigned>(v, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}

template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T, typename U>
T atomicAdd(T* p, U v) {
  T old = *p;
  *p = old + T(v);
  return old;
}
template <typename T>
T atomicMin(T* p, T v) {
  T old = *p;
  *p = std::min(old, v);
  return old;
}
template <typename T>
T atomicMax(T* p, T v) {
  T old = *p;
  *p = std::max(old, v);
  return old;
}
template <typename T>
T atomicExch(T* p, T v) {
  T old = *p;
  *p = v;
  return old;
}
template <typename T>
T atomicCAS(T* p, T expected, T v) {
  T old = *p;
  if (old == expected) *p = v;
  return old;
}
inline unsigned atomicAnd(unsigned* p, unsigned v) {
  unsigned old = *p;
  *p = old & v;
  return old;
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
  unsigned old = *p;
  *p = old | v;
  return old;
}
inline unsigned __float_as_uint(float v) {
  unsigned r;
  std::memcpy(&r, &v, 4);
  return r;
}
inline float __uint_as_float(unsigned v) {
  float r;
  std::memcpy(&r, &v, 4);
  return r;
}
using std::max;
using std::min;
