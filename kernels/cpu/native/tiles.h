// Products by the processor's tiles (AMX): 16 rows by 16 columns of sums at once, 64 bytes of features at a time.
//
// The panels of gemm.h in BF16 and I8 are what tiles read: 64 bytes of a column's features are 16 lanes below each other.
// Sums of bytes are exact.  Those of bfloat16 are rounded once for every 32 features, in another order than the vectors'
// products: where there are tiles, they multiply every number of rows, so that a row never depends on the others.
#pragma once
#include "pageant.h"
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(PG_EMULATE_BF16)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

constexpr int64_t TILE_ROWS = 32;   // of one product: two tiles below each other
constexpr int64_t TILE_BYTES = 64;  // of features

// Whether the system lets this process use tiles; asked once.
bool tiles_allowed();

struct Tiles {
    bool bytes;        // unsigned times signed ones, else pairs of bfloat16
    const void *rows;  // [steps][count][TILE_BYTES]
    int64_t count;     // 1 ... TILE_ROWS
    const void *panel;
    const void *next;  // what to fetch meanwhile, as much as the panel has; or NULL
    int64_t steps;     // of TILE_BYTES of features
};

// Sums [count][NR], 32-bit integers of bytes and float32 of bfloat16.
void multiply_tiles(const Tiles &t, float *results);

// Attention over a cache of bfloat16 (kv.h), for `count` rows.  Scores of 32 keys, 16 at each of `columns`, whose pairs of
// features are `width` bytes apart; queries [steps][count][TILE_BYTES]; from a row's scores to the next: `stride` floats.
void score_tiles(const void *queries, int64_t count, int64_t steps, const uint8_t *const columns[2], int64_t width,
                 float *scores, int64_t stride);

// mixed [count][dims] += probabilities [count][stride] times values: of each sixteen tokens 8 pairs [8][dims][2].
void mix_tiles(const uint16_t *probabilities, int64_t stride, int64_t count, const uint8_t *const *values,
               int64_t sixteens, int64_t dims, float *mixed);

// To be called by a thread that has multiplied, before it does something else.
void release_tiles();
