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
    const void *rows;  // the first of them
    int64_t stride;    // bytes
    int64_t count;     // 1 ... TILE_ROWS
    const void *panel;
    const void *next;  // what to fetch meanwhile, as much as the panel has; or NULL
    int64_t steps;     // of TILE_BYTES of features
};

// Sums [count][NR], 32-bit integers of bytes and float32 of bfloat16.
void multiply_tiles(const Tiles &t, float *results);

// To be called by a thread that has multiplied, before it does something else.
void release_tiles();
