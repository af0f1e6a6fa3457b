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
    bool added;        // to the sums that are there
    bool many;         // other rows come after these: the columns are read again, and these rows later if at all
    const void *rows;  // [steps][count][TILE_BYTES]
    int64_t count;     // 1 ... TILE_ROWS
    const void *panel;
    const void *next;  // what to fetch meanwhile
    int64_t lines;     // of it with each step
    int64_t steps;     // of TILE_BYTES of features
};

// Sums [count][NR], 32-bit integers of bytes and float32 of bfloat16.
void multiply_tiles(const Tiles &t, float *results);

// Attention over a cache of bfloat16 (kv.h), for `count` rows.  Scores of 32 keys, 16 at each of `columns`, whose pairs of
// features are `width` bytes apart; queries [steps][count][TILE_BYTES]; from a row's scores to the next: `stride` floats.
void score_tiles(const void *queries, int64_t count, int64_t steps, const uint8_t *const columns[2], int64_t width,
                 float *scores, int64_t stride);

// mixed [count][dims] += probabilities [chunks][count][32] times values [chunks][16][dims][2] of pairs of tokens.
void mix_tiles(const uint16_t *probabilities, int64_t count, const uint16_t *values, int64_t chunks, int64_t dims,
               float *mixed);

// Products of tiles in registers, so many rounds of them; returns the operations.
int64_t spin_tiles(bool bytes, int64_t rounds);

// To be called by a thread that has multiplied, before it does something else.
void release_tiles();
