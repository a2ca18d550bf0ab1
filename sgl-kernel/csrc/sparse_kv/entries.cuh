// What one kv head is asked for, and where the answers go: slots of pages, and the page table that attention reads.
#pragma once
#include "common.cuh"

namespace skv {

// The pages that one head is asked for, numbered in order of preference.
struct Entries {
  const SkvResolve* request;
  int64_t heads;
  int head;
  int count;
  bool by_rank;  // entry = rank * n + request instead of request * width + rank
  bool reversed;

  __device__ __forceinline__ int request_of(int e) const {
    return by_rank ? e % static_cast<int>(request->n) : e / static_cast<int>(request->width);
  }
  __device__ __forceinline__ int rank_of(int e) const {
    return by_rank ? e / static_cast<int>(request->n) : e % static_cast<int>(request->width);
  }
  __device__ __forceinline__ int64_t offset(int n, int rank) const {
    int64_t row = request->index.data ? get(request->index, n) : n;
    if (reversed) rank = static_cast<int>(request->width) - 1 - rank;
    return row * request->stride_n + head * request->stride_head + rank;
  }
  // The pages of several entries, kNone for those that do not exist. Their loads overlap: none is looked at before the
  // others are on their way. f(j, n, rank) names the j-th and returns whether it exists.
  template <int kCount, typename F>
  __device__ __forceinline__ void read(const SkvView& view, int (&page)[kCount], F f) const {
    int64_t asked[kCount], closed[kCount];
    bool active[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      asked[j] = kNone;
      active[j] = true;
      closed[j] = request->table_width;
      int n, rank;
      if (!f(j, n, rank)) continue;
      asked[j] = get(request->pages, offset(n, rank));
      if (request->active) active[j] = request->active[n];
      if (request->closed.data) closed[j] = get(request->closed, n);
    }
    if (request->table) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        int n, rank;
        if (!f(j, n, rank)) continue;
        bool inside = asked[j] >= 0 && asked[j] < closed[j] && asked[j] < request->table_width;
        asked[j] = inside ? request->table[n * request->table_width + asked[j]] : kNone;
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      page[j] = active[j] && asked[j] >= 0 && asked[j] < view.pages ? static_cast<int>(asked[j]) : kNone;
  }
  __device__ __forceinline__ int page(int e, const SkvView& view) const {
    int page[1];
    read(view, page, [&](int, int& n, int& rank) {
      n = request_of(e);
      rank = rank_of(e);
      return true;
    });
    return page[0];
  }
  // Its place in a [n][heads][width] result.
  __device__ __forceinline__ int64_t result(int n, int rank) const {
    return (static_cast<int64_t>(n) * heads + head) * request->width + rank;
  }
  // Whether it is the page that its request is filling. Of misses alone, so that no hit pays for its registers.
  __device__ __noinline__ bool is_open(int e) const {
    return rank_of(e) == get(request->num_pages, request_of(e)) - 1;
  }
  __device__ __forceinline__ int tokens(int e, const SkvView& view) const {
    if (request->open_tokens.data && is_open(e)) return static_cast<int>(get(request->open_tokens, request_of(e)));
    if (!request->tokens.data) return static_cast<int>(view.page_size);
    return static_cast<int>(get(request->tokens, offset(request_of(e), rank_of(e))));
  }
};

// The page table that attention reads: of each (request, head) the slots of its pages. A padded row shows one page, so
// that no kernel downstream needs to know of empty sequences.
struct PageTable {
  const SkvResolve* request;
  int* starts;  // [n + 1] pages of one head before each request, in shared memory
  int heads, head, slots;

  // Each warp takes a request. A barrier must follow.
  __device__ __forceinline__ void begin() const {
    if (!request->indices) return;
    int n = static_cast<int>(request->n);
    for (int i = warp_id(); i <= n; i += blockDim.x >> 5) {
      int pages = static_cast<int>(get(request->num_pages, min(i, n - 1))), before = 0;
      int last = static_cast<int>(get(request->last_tokens, min(i, n - 1)));
#pragma unroll 1
      for (int j = lane_id(); j < i; j += 32) before += max(static_cast<int>(get(request->num_pages, j)), 1);
      before = __reduce_add_sync(kAll, before);
      if (lane_id() != 0) continue;
      starts[i] = before;
      if (i < n) {
        request->indptr[i * heads + head] = before * heads + head * max(pages, 1);
        request->last_page[i * heads + head] = pages > 0 ? last : 1;
      } else if (head == heads - 1) {
        request->indptr[n * heads] = before * heads;
      }
    }
  }
  // The page of rank `rank` of request n lies in this slot, or in none.
  __device__ __forceinline__ void put(int n, int rank, int slot) const {
    int start = starts[n], shown = starts[n + 1] - start;
    if (rank < shown) request->indices[start * heads + head * shown + rank] = head * slots + max(slot, 0);
  }
};

// Where an entry's page lies, for whoever asked.
__device__ __forceinline__ void tell(const Entries& entries, const PageTable& table, int e, int slot) {
  int* slots = entries.request->slots;
  if (!slots) return;
  int n = entries.request_of(e), rank = entries.rank_of(e);
  slots[entries.result(n, rank)] = max(slot, kNone);
  if (entries.request->indices) table.put(n, rank, slot);
}

}  // namespace skv
