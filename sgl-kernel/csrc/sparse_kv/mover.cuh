// Moves units from host memory into slots. With the bulk copy engine one warp keeps a ring of stages in flight, host to
// shared memory to slot, and three blocks fill a PCIe 5 link; without it, whole blocks load and store.
#pragma once
#include "ptx.cuh"

namespace skv {

constexpr int kMoverStages = 24;        // at most
constexpr int kStoresInFlight = 2;      // stores that may still read their stage when the next load is issued
// Bytes of stages. Four blocks then keep 200 KB in flight, twice what the link's latency asks for; every further byte
// would only lengthen the queue before a miss.
constexpr int kMoverShared = 64 * 1024;
constexpr int kFewestStages = 4;          // of large units
constexpr int kMoverReserve = 44 * 1024;  // shared memory of a block beside the stages
constexpr int kRingBlocks = 4;          // of 32 descriptors: two in use, one arriving, one free

struct Unit {
  const char* from;  // keys, then values
  char* to;          // of the keys
  char* to_values;
  int half;    // bytes between the keys and the values at `from`
  int bytes;   // of each half
};

__device__ __forceinline__ int unit_bytes(const SkvView& view) {
  return static_cast<int>(2 * view.page_size * view.head_dim) * element_bytes(view.dtype);
}

__device__ __forceinline__ Unit locate(const SkvView& view, int4 row) {
  int64_t unit = unit_bytes(view);
  int page = row.x, head = row.y, slot = row.z, tokens = min(max(row.w, 0), static_cast<int>(view.page_size));
  if (page < 0 || page >= view.pages || slot < 0) tokens = 0;
  char* to = static_cast<char*>(view.kv) + (head * view.slots + slot) * unit;
  return Unit{static_cast<const char*>(view.host) + (page * view.heads + head) * unit, to, to + unit / 2,
              static_cast<int>(unit / 2), tokens * static_cast<int>(view.head_dim) * element_bytes(view.dtype)};
}

// Rows of (page, head, slot, tokens): item i of this mover is row first + i * stride.
struct UnitRows {
  static constexpr bool kTwice = false;  // whether units also go to a second place, second(view, row), unless that is null
  const int4* rows;
  int first;
  int stride;
  int count;
  __device__ __forceinline__ int4 load(int i) const { return __ldcg(rows + first + static_cast<int64_t>(i) * stride); }
  __device__ __forceinline__ Unit unit(const SkvView& view, int4 row) const { return locate(view, row); }
};

// Rows of two lists, one behind the other; item i of this mover is row first + i * stride of both.
struct JoinedRows {
  static constexpr bool kTwice = false;
  const int4* own;
  int own_count;
  const int4* more;
  int first;
  int stride;
  int count;
  __device__ __forceinline__ int4 load(int i) const {
    int row = first + i * stride;
    return row < own_count ? __ldcg(own + row) : __ldcg(more + row - own_count);
  }
  __device__ __forceinline__ Unit unit(const SkvView& view, int4 row) const { return locate(view, row); }
};

// Waits while blocks on the critical path move misses, but never for long: a flag left behind must not hang the GPU.
__device__ __forceinline__ bool stand_back(const int32_t* urgent) {
  for (int i = 0; i < 4096; ++i) {
    if (*static_cast<const volatile int32_t*>(urgent) <= 0) return true;
    __nanosleep(256);
  }
  return false;
}

// What blocks that move misses say at their begin and end, one thread each: prefetches stand back in between, and the time
// from the first begin to the last end, in which nothing else of the step runs, is added to the layer's. The begin is kept
// inverted, so that the earliest is the largest and zero is none; nobody waits for an answer before the end.
__device__ __forceinline__ Counter64* urgent_since(const SkvWork& work) {
  return reinterpret_cast<Counter64*>(work.urgent + 2);
}

__device__ __forceinline__ void begin_urgent(const SkvWork& work) {
  atomicMax(urgent_since(work), ~nanoseconds());
  atomicAdd(work.urgent, 1);
}

__device__ __forceinline__ void end_urgent(const SkvView& view, const SkvWork& work) {
  Counter64 since = ~*static_cast<volatile Counter64*>(urgent_since(work)), now = nanoseconds();
  if (atomicAdd(work.urgent, -1) != 1) return;
  *urgent_since(work) = 0;
  if (since < now) atomicAdd(reinterpret_cast<Counter64*>(view.stalled), now - since);
}

struct MoverScratch {
  CopyBarrier full[kMoverStages];
  int4 ring[kRingBlocks][32];
};

// One whole warp calls it. stages: shared memory of num_stages units, 128-byte aligned, which no other thread uses
// meanwhile; num_stages > kStoresInFlight. urgent: null for a mover that waits for nobody.
template <typename Rows>
__device__ __forceinline__ void move_bulk(const SkvView& view, const Rows& rows, char* stages, int num_stages,
                                          MoverScratch& scratch, const int32_t* urgent) {
  int stage_bytes = unit_bytes(view);
  auto arriving = [&](int block) {
    int i = block * 32 + lane_id();
    return i < rows.count ? rows.load(i) : make_int4(0, 0, 0, 0);
  };
  if (lane_id() == 0)
    for (int s = 0; s < num_stages; ++s) barrier_init(&scratch.full[s]);
  barrier_fence();
  scratch.ring[0][lane_id()] = arriving(0);
  scratch.ring[1][lane_id()] = arriving(1);
  __syncwarp();

  int issued = 0;
  int busy = 0;  // the flag as read one issue ago: its latency hides behind a copy
  for (int block = 0; block * 32 < rows.count; ++block) {
    int4 next = arriving(block + 2);
    if (lane_id() == 0) {
      for (int i = block * 32; i < min(block * 32 + 32, rows.count); ++i) {
        // Stores 0..i-1 are committed, so those up to i-1-kStoresInFlight have left their stages.
        bulk_wait_read<kStoresInFlight>();
        for (; issued < rows.count && issued < i + num_stages - kStoresInFlight; ++issued) {
          if (urgent) {
            if (busy > 0 && !stand_back(urgent)) urgent = nullptr;
            busy = urgent ? *static_cast<const volatile int32_t*>(urgent) : 0;
          }
          Unit unit = rows.unit(view, scratch.ring[issued / 32 % kRingBlocks][issued % 32]);
          char* stage = stages + issued % num_stages * stage_bytes;
          CopyBarrier* full = &scratch.full[issued % num_stages];
          barrier_expect(full, 2 * unit.bytes);
          if (unit.bytes == unit.half) {
            bulk_load(stage, unit.from, 2 * unit.half, full);
          } else if (unit.bytes > 0) {
            bulk_load(stage, unit.from, unit.bytes, full);
            bulk_load(stage + unit.half, unit.from + unit.half, unit.bytes, full);
          }
        }
        int4 row = scratch.ring[i / 32 % kRingBlocks][i % 32];
        Unit unit = rows.unit(view, row);
        const char* stage = stages + i % num_stages * stage_bytes;
        barrier_wait(&scratch.full[i % num_stages], i / num_stages & 1);
        if (unit.bytes == unit.half && unit.to_values == unit.to + unit.half) {
          bulk_store(unit.to, stage, 2 * unit.half);
        } else if (unit.bytes > 0) {
          bulk_store(unit.to, stage, unit.bytes);
          bulk_store(unit.to_values, stage + unit.half, unit.bytes);
        }
        if constexpr (Rows::kTwice) {
          char* second = rows.second(view, row);
          if (second && unit.bytes == unit.half) {
            bulk_store(second, stage, 2 * unit.half);
          } else if (second && unit.bytes > 0) {
            bulk_store(second, stage, unit.bytes);
            bulk_store(second + unit.half, stage + unit.half, unit.bytes);
          }
        }
        bulk_commit();
      }
    }
    __syncwarp();
    scratch.ring[(block + 2) % kRingBlocks][lane_id()] = next;
    __syncwarp();
  }
  if (lane_id() == 0) bulk_wait_all();
  __syncwarp();
}

// The whole block calls it; each warp takes units of its own.
template <typename Rows>
__device__ __forceinline__ void move_plain(const SkvView& view, const Rows& rows, const int32_t* urgent) {
  for (int i = warp_id(); i < rows.count; i += blockDim.x >> 5) {
    if (urgent && !stand_back(urgent)) urgent = nullptr;
    int4 row = rows.load(i);
    Unit unit = rows.unit(view, row);
    copy16(unit.to, unit.from, unit.bytes, lane_id(), 32);
    copy16(unit.to_values, unit.from + unit.half, unit.bytes, lane_id(), 32);
    if constexpr (Rows::kTwice) {
      char* second = rows.second(view, row);
      if (!second) continue;
      __syncwarp();
      copy16(second, unit.to, unit.bytes, lane_id(), 32);  // what has crossed the link
      copy16(second + unit.half, unit.to_values, unit.bytes, lane_id(), 32);
    }
  }
}

// Stages of a launch. Fewer than kStoresInFlight + 1 cannot run: the caller falls back to move_plain.
inline int mover_stages(const SkvView& view, int device) {
  int bytes = static_cast<int>(2 * view.page_size * view.head_dim) * (view.dtype == SKV_FP32 ? 4 : 2);
  int room = shared_limit(device) - kMoverReserve;
  int wanted = kMoverShared / bytes;
  if (wanted < kFewestStages) wanted = kFewestStages;
  int fit = room / bytes < wanted ? room / bytes : wanted;
  return fit < kMoverStages ? fit : kMoverStages;
}

inline bool use_bulk(const SkvView& view, int device) {
  return major_version(device) >= 9 && mover_stages(view, device) > kStoresInFlight;
}

inline size_t shared_bytes(const SkvView& view, int stages) {
  return static_cast<size_t>(stages) * 2 * view.page_size * view.head_dim * (view.dtype == SKV_FP32 ? 4 : 2);
}

constexpr int kPlainThreads = 512;

template <bool kBulk, typename Rows>
__device__ __forceinline__ void move(const SkvView& view, const Rows& rows, char* stages, int num_stages,
                                     MoverScratch& scratch, const int32_t* urgent) {
  if (kBulk) {
    move_bulk(view, rows, stages, num_stages, scratch, urgent);
  } else {
    move_plain(view, rows, urgent);
  }
}

__device__ __forceinline__ int share(int total) {
  int mine = total - static_cast<int>(blockIdx.x);
  return mine > 0 ? (mine - 1) / static_cast<int>(gridDim.x) + 1 : 0;
}

}  // namespace skv
