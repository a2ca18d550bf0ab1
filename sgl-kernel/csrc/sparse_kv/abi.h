// Arguments of the library's functions, mirrored by ops/abi.py. Every field is eight bytes wide, so that the layout needs
// no agreement beyond names and order; a test compares both files.
//
// Sizes: n requests, rows of each (row 0 real, row 1 guide), heads kv heads, group query heads per kv head. Strides count
// elements. A null pointer means that the argument is absent where the comment says it may be.
#pragma once
#include <cstdint>

// Element types, as codes in *_dtype fields.
enum SkvDtype : int64_t { SKV_BF16 = 0, SKV_FP16 = 1, SKV_FP32 = 2 };

// A device array of integers, 32 or 64 bits each.
struct SkvInts {
  const void* data;
  int64_t wide;  // 1 for int64
};

// One layer of the page cache; a unit is (page, kv head), [2][page_size][head_dim] elements.
struct SkvView {
  void* kv;           // [heads][slots] units
  int32_t* slot_of;   // [heads][pages]
  int32_t* page_of;   // [heads][slots]
  int32_t* stamp;     // [heads][slots]
  uint8_t* ahead;     // [heads][slots]
  void* host;         // [pages][heads] units, pinned host memory
  void* landmarks;    // [pages][heads][4][head_dim / 2] codes: value + 8 in four bits, lower half first
  void* scales;       // [pages][heads][4] bfloat16, what a code of 1 stands for
  int64_t* counters;  // [10]
  int64_t* stalled;   // [1] nanoseconds that steps waited for missing units
  int64_t heads;
  int64_t slots;
  int64_t pages;
  int64_t page_size;
  int64_t head_dim;
  int64_t dtype;
};

// Tables that may be edited at a time: that of an append, then of a resolve, and of two prefetches beside them.
constexpr int64_t SKV_JOBS = 3;
// Heads whose misses are moved by several blocks each.
constexpr int64_t SKV_MOST_HEADS = 64;

// Scratch and flags that outlive a call. Functions that take it must follow each other in one stream's order, but for
// gather, and plan_prefetches, which uses the jobs behind the first alone and follows others of its kind.
struct SkvWork {
  int32_t* error;   // [8] first failure: code, kv head, slots needed, slots usable
  int32_t* cursor;  // [SKV_JOBS][2] zero between calls: units handed out, blocks that are done with that
  int32_t* urgent;  // [4] zero between calls: blocks that move misses at this moment, while movers of prefetches stand
                    // back; one word unused; ~(nanosecond at which the first of them began)
  int32_t* tasks;   // [SKV_MOST_HEADS][8] zero between calls: what blocks that help to move a head's misses are told
  int32_t* list;    // [SKV_JOBS][heads][list_width] entries that won their unit, where shared memory is too small
  int32_t* rows;    // [heads][list_width][4] units that append fetches, or that resolve brings again
  const int32_t* skip;  // [1] nonzero: copy no unit (the measurement of what transfers cost)
  const int32_t* miss_rate;  // [1] for measurements: resolve with `move` brings this share of hits again, in millionths
  int64_t list_width;
};

struct SkvResolve {
  SkvInts pages;    // [n][heads][width] physical, or logical when `table` is given
  SkvInts tokens;   // same shape and strides; null data: every page is full
  SkvInts index;    // [n] row of `pages` for each request; null data: row i
  int64_t stride_n;
  int64_t stride_head;
  const int32_t* table;  // [n][table_width], or null
  int64_t table_width;
  SkvInts closed;       // [n] with `table`: logical pages at or beyond it are skipped; null data: none
  const uint8_t* active;  // [n] or null
  int32_t* slots;         // [n][heads][width] result, or null
  int32_t* units;         // [capacity][4] result: page, head, slot, tokens
  int32_t* count;         // [1] result
  const int32_t* step;    // [1]
  const int32_t* cap;     // [1] prefetch: units per request and head, negative for none at all
  int32_t* fetched;       // [request slots][2] missing units of resolve and of prefetch are added up, or null
  SkvInts owner;          // [n] the request slot of each
  SkvInts num_pages;      // [n] for open_tokens and the page table below
  SkvInts last_tokens;    // [n] likewise
  SkvInts open_tokens;    // [n] committed tokens of the last of `num_pages`, the open page; null data: not told apart
  int32_t* indptr;        // [n * heads + 1] the page table of attention, as in SkvAttend, or null
  int32_t* indices;       // [n * heads * width]
  int32_t* last_page;     // [n * heads]
  int64_t n;
  int64_t width;
  int64_t mode;   // 0 resolve, 1 prefetch, 2 install
  int64_t tally;  // resolve: count selected and hit
  int64_t move;   // resolve: copy the missing units before returning
  int64_t waited;  // with `move`: the step waits for it, so more blocks help
};

struct SkvAppend {
  const void* k;  // [n][heads][head_dim]
  const void* v;
  int64_t stride_k;
  int64_t stride_v;
  SkvInts page;           // [n] physical page of the token
  SkvInts offset;         // [n] its place in the page
  const uint8_t* active;  // [n]
  int32_t* slots;         // [n][heads] result; input of write_token, or null: where the tables have the page
  const int32_t* step;    // [1]
  const void* q;  // write_token only: [n][heads][group][head_dim]
  void* q_out;    // [n * heads][group][head_dim] the queries in attention's order, or null
  int64_t stride_q;
  int64_t group;
  int64_t n;
  int64_t through;
};

struct SkvScore {
  const void* q;  // [n * rows][heads][group][head_dim]
  int64_t stride_q;
  int64_t q_dtype;
  const int32_t* table;  // [n][table_width]
  int64_t table_width;
  SkvInts lo;  // [n][rows]
  SkvInts hi;
  float* logits;    // [n][rows][heads][group][table_width] base-2 logits, written inside the bounds
  float* partials;  // [n][rows][heads][group][chunks][2] maximum and sum of each chunk of pages
  void* q_out;      // [n * heads][rows * group][head_dim] the queries in attention's order, or null
  int32_t* tickets;  // [2] zero between calls: chunks handed out beyond the first of each warp, blocks finished
  double scale;
  int64_t n;
  int64_t rows;
  int64_t group;
  int64_t blocks;  // of the launch that score
};

struct SkvSelect {
  const float* logits;    // from score, or null
  const float* partials;  // likewise
  const float* scores;    // [n][rows][heads][table_width] when logits is null
  float* dense;           // score only: [n][rows][heads][table_width]
  SkvInts lo;             // [n][rows], of score
  SkvInts hi;
  const int32_t* table;  // [n][table_width]
  int64_t table_width;
  SkvInts length;          // [n]
  const uint8_t* active;   // [n]
  int32_t* pages;          // [n][heads][width]
  int32_t* num_pages;      // [n]
  int32_t* predicted;      // [n][heads][budget], or rows of a larger array by `keep`
  SkvInts keep;            // [n] row of `predicted` for each request; null data: row i
  int64_t keep_stride;     // of rows
  int64_t keep_stride_head;
  uint32_t* last;          // rows of [2][heads][last_words] by `owner`, or null: see ops/hysteresis.py
  SkvInts owner;           // [n]
  int64_t last_stride;     // of rows
  int64_t last_words;      // with a bit for each candidate
  const float* bonus;      // [1] nats
  float* rest;             // [n][rows][heads][table_width] scratch, or null: shared memory
  int64_t n;
  int64_t rows;  // of the scores
  int64_t row;   // the one that this launch is for: 0 selects, the last one predicts
  int64_t heads;
  int64_t group;
  int64_t page_size;
  int64_t sinks;   // pages
  int64_t window;  // tokens
  int64_t budget;  // pages
  int64_t whole;   // tokens: row 0 of a shorter request takes all candidates
  int64_t width;
};

struct SkvGather {
  const int32_t* units;  // [..][4]
  const int32_t* count;  // [1]
  int64_t blocks;
  int64_t ahead;  // a prefetch: stands back while misses move
};

struct SkvStage {
  SkvInts pages;   // [count]
  SkvInts tokens;  // [count] of each; null data: every page is full
  void* target;   // [2][heads][count * page_size][head_dim], keys and values
  int64_t stride_values;  // from the keys to the values
  int64_t stride_head;
  int32_t* slots;    // [count * heads] result of the look-up: where a unit is read from, negative: from the host
  int32_t* list;     // [count * heads] likewise: units that are not resident
  int32_t* missing;  // [1] likewise: how many they are
  const uint8_t* due;   // [count] nonzero: a page that lands, whose missing units are not listed; null: none does
  const void* landing;  // [places][heads] units, pages from place `first` on
  int64_t first;
  int64_t places;
  int64_t count;
  int64_t blocks;  // of the movers
  int64_t parts;   // SKV_RESIDENT, SKV_MISSING, or both
};
constexpr int64_t SKV_RESIDENT = 1, SKV_MISSING = 2;

// Pages of a layer on their way by the copy engine.
struct SkvLand {
  const int64_t* runs;  // [count][3] in host memory: first page, its place in the landing, pages
  void* landing;        // [places][heads] units
  int64_t count;
};

// How many heads of each page are not resident.
struct SkvAbsent {
  const int64_t* tables;  // [layers] addresses of slot_of, in device memory
  SkvInts pages;          // [count]
  uint8_t* absent;        // [layers][count]
  int64_t layers;
  int64_t heads;
  int64_t num_pages;
  int64_t count;
};

struct SkvChunk {
  const void* k;  // [tokens][heads][head_dim]
  const void* v;
  int64_t stride_k;
  int64_t stride_v;
  SkvInts loc;  // [tokens]
  int64_t tokens;
  int64_t through;
};

struct SkvStep {
  const int32_t* req_to_token;  // [slots][row_length]
  int64_t row_length;
  SkvInts req;      // [n] rows of it; 0 is the padding row
  SkvInts length;   // [n] committed tokens
  int32_t* table;   // [n][width] physical pages
  uint8_t* active;  // [n]
  int64_t* lengths;
  int32_t* open_page;
  int64_t* offset;
  int64_t* closed;
  int64_t* last_tokens;
  int64_t* lo;  // [n][rows]
  int64_t* hi;
  int64_t n;
  int64_t rows;
  int64_t width;
  int64_t page_size;
  int64_t sinks;   // pages
  int64_t window;  // tokens
};

struct SkvAttend {
  const void* q;       // [n * rows][heads][group][head_dim]
  void* q_out;         // [n * heads][rows * group][head_dim], or null when rows is 1
  const void* k_row1;  // [n][heads][head_dim], or null when rows is 1
  const void* v_row1;
  int64_t stride_q;
  int64_t stride_k;
  int64_t stride_v;
  const int32_t* slots;  // [n][heads][width]
  SkvInts num_pages;     // [n]
  SkvInts last_tokens;   // [n]
  int32_t* indptr;       // [n * heads + 1]
  int32_t* indices;      // [n * heads * width]
  int32_t* last_page;    // [n * heads]
  const void* partial;   // [n * heads][rows * group][head_dim] attention over the pages
  const float* lse;      // [n * heads][rows * group] base 2
  void* out;             // [n * rows][heads][group][head_dim]
  double scale;
  int64_t n;
  int64_t rows;
  int64_t group;
  int64_t width;
};
