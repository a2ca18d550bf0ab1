// A prefill's prefix from slots and host into a staging slot.
#include "mover.cuh"

namespace skv {

constexpr int kResidentThreads = 256;
constexpr unsigned kResidentBlocks = 128;
// A piece of a prefix takes them a twentieth of the time that the next one takes to land, and other kernels run beside.
constexpr unsigned kLandedBlocks = 32;

// Units that were not resident, from the host into the planes of a staging slot, and into the slot that they were given,
// if they were given one: it stays theirs until the layer's chunk is refreshed. Unit i is head i % heads of page i / heads;
// rows are page, head, place in the staging slot, and slot + 1 and tokens together.
struct StagedRows {
  static constexpr bool kTwice = true;
  static constexpr int kTokens = 64;  // more than a page has
  const SkvView& view;
  const SkvStage& args;
  int first;
  int stride;
  int count;
  __device__ __forceinline__ int4 load(int i) const {
    int heads = static_cast<int>(view.heads);
    int unit = __ldcg(args.list + first + i * stride), place = unit / heads, head = unit % heads;
    int64_t page = get(args.pages, place);
    bool known = page >= 0 && page < view.pages;
    int slot = known ? __ldcg(view.slot_of + head * view.pages + page) : kNone;
    int tokens = args.tokens.data ? static_cast<int>(get(args.tokens, place)) : static_cast<int>(view.page_size);
    return make_int4(static_cast<int>(page), head, place, (max(slot, kNone) + 1) * kTokens + tokens);
  }
  __device__ __forceinline__ Unit unit(const SkvView&, int4 row) const {
    Unit found = locate(view, make_int4(row.x, row.y, 0, row.w % kTokens));
    found.to = staged(view, args, row.y, row.z);
    found.to_values = found.to + args.stride_values * element_bytes(view.dtype);
    return found;
  }
  __device__ __forceinline__ char* second(const SkvView&, int4 row) const {
    int64_t slot = row.w / kTokens - 1;
    return slot < 0 ? nullptr : static_cast<char*>(view.kv) + (row.y * view.slots + slot) * unit_bytes(view);
  }
  // Where the keys of page number `place` go.
  static __device__ __forceinline__ char* staged(const SkvView& view, const SkvStage& args, int head, int place) {
    int64_t element = head * args.stride_head + place * view.page_size * view.head_dim;
    return static_cast<char*>(args.target) + element * element_bytes(view.dtype);
  }
};

// Where each unit of a prefix is, now: the slot that it will be read from, or none and a place in the movers' list.
__global__ void __launch_bounds__(kResidentThreads)
    look_up_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvStage args) {
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads), total = static_cast<int>(args.count) * heads;
  auto* counters = reinterpret_cast<Counter64*>(view.counters);
  int warps = static_cast<int>(gridDim.x * blockDim.x) >> 5;
  int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  for (int start = warp * 32; start < total; start += warps * 32) {
    int mine = start + lane_id(), slot = kNone;
    bool lands = false;
    if (mine < total) {
      int64_t page = get(args.pages, mine / heads);
      if (page >= 0 && page < view.pages) slot = __ldcg(view.slot_of + mine % heads * view.pages + page);
      args.slots[mine] = slot;
      lands = args.due && args.due[mine / heads];
    }
    uint32_t resident = __ballot_sync(kAll, slot >= 0), missing = __ballot_sync(kAll, mine < total && slot < 0);
    uint32_t listed = __ballot_sync(kAll, mine < total && slot < 0 && !lands);
    int place = 0;
    if (lane_id() == 0) {
      if (listed) place = atomicAdd(args.missing, __popc(listed));
      if (resident) atomicAdd(counters + kPrefixCache, static_cast<Counter64>(__popc(resident)));
      if (missing) atomicAdd(counters + kPrefixHost, static_cast<Counter64>(__popc(missing)));
    }
    place = __shfl_sync(kAll, place, 0);
    if (listed >> lane_id() & 1) args.list[place + __popc(listed & ((1u << lane_id()) - 1))] = mine;
  }
}

// Units that were resident at the look-up, by wide copies within device memory.
__global__ void __launch_bounds__(kResidentThreads)
    stage_resident_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvStage args) {
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads), total = static_cast<int>(args.count) * heads;
  if (__ldcg(args.missing) == total) return;  // all of them are listed
  int64_t unit = unit_bytes(view);
  int warps = static_cast<int>(gridDim.x * blockDim.x) >> 5;
  int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  for (int start = warp * 32; start < total; start += warps * 32) {
    int mine = start + lane_id(), slot = mine < total ? __ldcg(args.slots + mine) : kNone;
    for (uint32_t left = __ballot_sync(kAll, slot >= 0); left; left &= left - 1) {
      int lane = __ffs(left) - 1, item = start + lane, head = item % heads;
      int from_slot = __shfl_sync(kAll, slot, lane);
      const char* from = static_cast<const char*>(view.kv) + (head * view.slots + from_slot) * unit;
      char* to = StagedRows::staged(view, args, head, item / heads);
      copy16(to, from, static_cast<int>(unit / 2), lane_id(), 32);
      copy16(to + args.stride_values * element_bytes(view.dtype), from + unit / 2, static_cast<int>(unit / 2), lane_id(), 32);
    }
  }
}

// Where all units should be resident: looks them up on the way. One that is not comes from the host, and gets no slot.
__global__ void __launch_bounds__(kResidentThreads)
    stage_cached_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvStage args) {
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads), total = static_cast<int>(args.count) * heads;
  auto* counters = reinterpret_cast<Counter64*>(view.counters);
  int64_t unit = unit_bytes(view);
  int half = static_cast<int>(unit / 2), warps = static_cast<int>(gridDim.x * blockDim.x) >> 5;
  int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  for (int start = warp * 32; start < total; start += warps * 32) {
    int mine = start + lane_id(), head = mine % heads, page = kNone, slot = kNone;
    if (mine < total) {
      int64_t named = get(args.pages, mine / heads);
      if (named >= 0 && named < view.pages) page = static_cast<int>(named);
      if (page >= 0) slot = __ldcg(view.slot_of + head * view.pages + page);
    }
    uint32_t resident = __ballot_sync(kAll, slot >= 0), missing = __ballot_sync(kAll, mine < total && slot < 0);
    if (lane_id() == 0) {
      if (resident) atomicAdd(counters + kPrefixCache, static_cast<Counter64>(__popc(resident)));
      if (missing) atomicAdd(counters + kPrefixHost, static_cast<Counter64>(__popc(missing)));
    }
    for (uint32_t left = __ballot_sync(kAll, page >= 0); left; left &= left - 1) {
      int lane = __ffs(left) - 1, item = start + lane;
      int from_slot = __shfl_sync(kAll, slot, lane), from_page = __shfl_sync(kAll, page, lane);
      const char* cached = static_cast<const char*>(view.kv) + (item % heads * view.slots + from_slot) * unit;
      const char* truth = static_cast<const char*>(view.host) + (static_cast<int64_t>(from_page) * heads + item % heads) * unit;
      const char* from = from_slot >= 0 ? cached : truth;
      char* to = StagedRows::staged(view, args, item % heads, item / heads);
      copy16(to, from, half, lane_id(), 32);
      copy16(to + args.stride_values * element_bytes(view.dtype), from + half, half, lane_id(), 32);
    }
  }
}

// Units of pages that have landed: a warp takes one, for the staging slot and for the slot that it was given.
__global__ void __launch_bounds__(kResidentThreads)
    stage_landed_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvStage args) {
  wait_for_previous_kernel();
  int heads = static_cast<int>(view.heads), total = static_cast<int>(args.places) * heads;
  int64_t unit = unit_bytes(view);
  int warps = static_cast<int>(gridDim.x * blockDim.x) >> 5;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >> 5; i < total; i += warps) {
    int place = static_cast<int>(args.first) + i / heads, head = i % heads;
    if (!args.due[place] || __ldcg(args.slots + place * heads + head) >= 0) continue;
    int64_t page = get(args.pages, place);
    if (page < 0 || page >= view.pages) continue;
    int slot = __ldcg(view.slot_of + head * view.pages + page);
    int tokens = args.tokens.data ? static_cast<int>(get(args.tokens, place)) : static_cast<int>(view.page_size);
    int half = static_cast<int>(unit / 2), bytes = half / static_cast<int>(view.page_size) * tokens;
    const char* from = static_cast<const char*>(args.landing) + i * unit;
    char* to = StagedRows::staged(view, args, head, place);
    copy16(to, from, bytes, lane_id(), 32);
    copy16(to + args.stride_values * element_bytes(view.dtype), from + half, bytes, lane_id(), 32);
    if (slot < 0) continue;
    char* kept = static_cast<char*>(view.kv) + (head * view.slots + slot) * unit;
    copy16(kept, from, bytes, lane_id(), 32);
    copy16(kept + half, from + half, bytes, lane_id(), 32);
  }
}

template <bool kBulk>
__global__ void stage_missing_kernel(const __grid_constant__ SkvView view, const __grid_constant__ SkvStage args,
                                     int num_stages) {
  SKV_DYNAMIC_SHARED(stages);
  __shared__ MoverScratch scratch;
  wait_for_previous_kernel();
  StagedRows rows{view, args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), share(__ldcg(args.missing))};
  if (rows.count > 0) move<kBulk>(view, rows, stages, num_stages, scratch, nullptr);
}

}  // namespace skv

using namespace skv;

static int set_to_zero(int32_t* word, [[maybe_unused]] const Launch& where) {
#ifdef SPARSE_KV_EMULATE
  *word = 0;
  return 0;
#else
  return cudaMemsetAsync(word, 0, sizeof(*word), where.stream);
#endif
}

extern "C" int skv_resolve(const SkvView*, const SkvWork*, const SkvResolve*, const Launch*);

static dim3 warps_for(const SkvView& view, const SkvStage& args) {
  unsigned warps = static_cast<unsigned>((args.count * view.heads + 31) / 32);
  unsigned wide = (warps * 32 + kResidentThreads - 1) / kResidentThreads;
  return dim3(wide < kResidentBlocks ? wide : kResidentBlocks);
}

// Looks up where the units are, and then gives slots to those that are not resident, if there is an install.
SKV_EXPORT int skv_plan_stage(const SkvView* view, const SkvWork* work, const SkvResolve* install, const SkvStage* args,
                              const Launch* where) {
  if (int status = set_to_zero(args->missing, *where)) return status;
  int status = launch(*where, look_up_kernel, warps_for(*view, *args), kResidentThreads, 0, *view, *args);
  return status || !install ? status : skv_resolve(view, work, install, where);
}

// Resident units first: an install may have given their slots to others.
SKV_EXPORT int skv_stage(const SkvView* view, const SkvStage* args, const Launch* where) {
  Launch alone = *where;
  alone.overlap = 0;  // its many blocks would wait, and keep others out, while the movers before it run
  if (args->parts & SKV_RESIDENT) {
    int status = launch(alone, stage_resident_kernel, warps_for(*view, *args), kResidentThreads, 0, *view, *args);
    if (status) return status;
  }
  if (!(args->parts & SKV_MISSING)) return 0;
  bool bulk = use_bulk(*view, where->device);
  int stages = bulk ? mover_stages(*view, where->device) : 0;
  return launch(*where, bulk ? stage_missing_kernel<true> : stage_missing_kernel<false>, dim3(args->blocks),
                bulk ? 32 : kPlainThreads, shared_bytes(*view, stages), *view, *args, stages);
}

SKV_EXPORT int skv_stage_cached(const SkvView* view, const SkvStage* args, const Launch* where) {
  Launch alone = *where;
  alone.overlap = 0;  // as the resident part of a stage
  return launch(alone, stage_cached_kernel, warps_for(*view, *args), kResidentThreads, 0, *view, *args);
}

SKV_EXPORT int skv_stage_landed(const SkvView* view, const SkvStage* args, const Launch* where) {
  Launch alone = *where;
  alone.overlap = 0;  // it waits for a copy, which is no kernel
  return launch(alone, stage_landed_kernel, dim3(kLandedBlocks), kResidentThreads, 0, *view, *args);
}
