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

// The same of TILE_ROWS rows of bfloat16 that are `many`, and calls beside(step) with each step: vectors work while
// tiles do.
template <class Beside>
void multiply_tiles(const Tiles &t, float *results, Beside &&beside);

// Attention over a cache of bfloat16 (kv.h), for `count` rows.  Scores of 16 keys at each of `num` columns, whose pairs
// of features are `width` bytes apart; queries [steps][count][TILE_BYTES]; a row's scores are `stride` floats behind the
// last one's.
void score_tiles(const void *queries, int64_t count, int64_t steps, const uint8_t *const *columns, int64_t num,
                 int64_t width, float *scores, int64_t stride);

// mixed [count][dims] += probabilities [chunks][count][32] times values [chunks][16][dims][2] of pairs of tokens.
void mix_tiles(const uint16_t *probabilities, int64_t count, const uint16_t *values, int64_t chunks, int64_t dims,
               float *mixed);

// Products of tiles in registers, so many rounds of them; returns the operations.
int64_t spin_tiles(bool bytes, int64_t rounds);

// To be called by a thread that has multiplied, before it does something else.
void release_tiles();

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

// Tiles 0 ... 3 are sums, 4 and 5 so many rows, 6 and 7 columns.
void shape_tiles(int64_t rows);

template <bool HIGH>
PG_INLINE void load_sums(const float *low, const float *high, int64_t bytes) {
    _tile_loadd(0, low, bytes);
    _tile_loadd(1, low + 16, bytes);
    if constexpr (HIGH) {
        _tile_loadd(2, high, bytes);
        _tile_loadd(3, high + 16, bytes);
    }
}

template <bool HIGH>
PG_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HIGH) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <bool HIGH>
PG_INLINE void multiply_columns() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HIGH) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <bool HIGH>
PG_INLINE void multiply_bytes() {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if constexpr (HIGH) {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
}

template <bool HIGH>
PG_INLINE void store_sums(float *low, float *high, int64_t bytes) {
    _tile_stored(0, low, bytes);
    _tile_stored(1, low + 16, bytes);
    if constexpr (HIGH) {
        _tile_stored(2, high, bytes);
        _tile_stored(3, high + 16, bytes);
    }
}

// The macro takes a number for a tile.
#define PG_LOAD_TILE(TILE, STREAM, FROM, STRIDE)                      \
    do {                                                              \
        if constexpr (STREAM) _tile_stream_loadd(TILE, FROM, STRIDE); \
        else _tile_loadd(TILE, FROM, STRIDE);                         \
    } while (false)

// What is loaded once goes past the nearest cache: rows, where there are many, or else columns.
template <bool BYTES, bool HIGH, bool MANY, class Beside>
PG_INLINE void multiply_steps(const Tiles &t, float *results, Beside &&beside) {
    constexpr int64_t WIDTH = 4 * NR, STEP = 16 * WIDTH;  // bytes of a lane of all columns of a panel; of one step
    const char *low = (const char *)t.rows, *high = low + 16 * TILE_BYTES, *panel = (const char *)t.panel;
    const char *ahead = (const char *)t.next;
    if (t.added) load_sums<HIGH>(results, results + 16 * NR, WIDTH);
    else zero_sums<HIGH>();
    const int64_t given = t.count * TILE_BYTES;
    for (int64_t i = 0; i < t.steps; i++, panel += STEP, low += given, high += given) {
        for (int64_t line = 0; line < t.lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        PG_LOAD_TILE(6, !MANY, panel, WIDTH);
        PG_LOAD_TILE(4, MANY, low, TILE_BYTES);
        PG_LOAD_TILE(7, !MANY, panel + TILE_BYTES, WIDTH);
        if constexpr (HIGH) PG_LOAD_TILE(5, MANY, high, TILE_BYTES);
        if constexpr (BYTES) multiply_bytes<HIGH>();
        else multiply_columns<HIGH>();
        beside(i);
    }
    store_sums<HIGH>(results, results + 16 * NR, WIDTH);
}

#undef PG_LOAD_TILE

template <class Beside>
void multiply_tiles(const Tiles &t, float *results, Beside &&beside) {
    shape_tiles(t.count);
    multiply_steps<false, true, true>(t, results, beside);
}

#else

template <class Beside>
void multiply_tiles(const Tiles &, float *, Beside &&) {}

#endif
