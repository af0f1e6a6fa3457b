#include "linears/tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

namespace {

constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl

struct alignas(64) Configuration {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

thread_local int64_t configured = 0;  // rows

template <bool BYTES, bool HIGH, bool MANY>
void multiply(const Tiles &t, float *results) {
    multiply_steps<BYTES, HIGH, MANY>(t, results, [](int64_t) {});
}

// Sums of 16 keys: in tile LOW, and where there are more than 16 rows in tile HIGHER.
#define SCORE_COLUMN(LOW, HIGHER, COLUMN, FROM)                           \
    do {                                                                  \
        const char *rows = queries;                                       \
        _tile_zero(LOW);                                                  \
        if constexpr (HIGH) _tile_zero(HIGHER);                           \
        for (int64_t i = 0; i < steps; i++, rows += count * TILE_BYTES) { \
            _tile_loadd(COLUMN, FROM + i * 16 * width, width);            \
            _tile_loadd(4, rows, TILE_BYTES);                             \
            _tile_dpbf16ps(LOW, 4, COLUMN);                               \
            if constexpr (HIGH) {                                         \
                _tile_loadd(5, rows + 16 * TILE_BYTES, TILE_BYTES);       \
                _tile_dpbf16ps(HIGHER, 5, COLUMN);                        \
            }                                                             \
        }                                                                 \
    } while (false)

#define STORE_COLUMN(LOW, HIGHER, TO)                                             \
    do {                                                                          \
        _tile_stored(LOW, TO, 4 * stride);                                        \
        if constexpr (HIGH) _tile_stored(HIGHER, (TO) + 16 * stride, 4 * stride); \
    } while (false)

// A column's sums are stored while the next one's are made: a store waits for the last product.
template <bool HIGH>
void score(const char *queries, int64_t count, int64_t steps, const uint8_t *const *columns, int64_t num,
           int64_t width, float *scores, int64_t stride) {
    for (int64_t c = 0; c < num; c += 2, scores += 32) {
        SCORE_COLUMN(0, 2, 6, columns[c]);
        if (c) STORE_COLUMN(1, 3, scores - 16);
        if (c + 1 < num) SCORE_COLUMN(1, 3, 7, columns[c + 1]);
        STORE_COLUMN(0, 2, scores);
    }
    if (num % 2 == 0) STORE_COLUMN(1, 3, scores - 16);
}

template <bool HIGH>
void mix(const char *p, int64_t count, const char *values, int64_t chunks, int64_t dims, float *mixed) {
    for (int64_t d = 0; d < dims; d += 32) {
        float *low = mixed + d, *high = low + 16 * dims;
        load_sums<HIGH>(low, high, 4 * dims);
        const char *rows = p, *columns = values + 4 * d;
        for (int64_t i = 0; i < chunks; i++, rows += count * TILE_BYTES, columns += 64 * dims) {
            _tile_loadd(4, rows, TILE_BYTES);
            _tile_loadd(6, columns, 4 * dims);
            _tile_loadd(7, columns + 64, 4 * dims);
            if constexpr (HIGH) _tile_loadd(5, rows + 16 * TILE_BYTES, TILE_BYTES);
            multiply_columns<HIGH>();
        }
        store_sums<HIGH>(low, high, 4 * dims);
    }
}

}  // namespace

void shape_tiles(int64_t rows) {
    if (configured == rows) return;
    Configuration c;
    const uint8_t low = rows < 16 ? rows : 16, high = rows - low;
    const uint8_t each[8] = {low, low, high, high, low, high, 16, 16};
    for (int i = 0; i < 8; i++)
        if (each[i]) c.rows[i] = each[i], c.bytes[i] = TILE_BYTES;
    asm volatile("" : : "r"(&c) : "memory");  // the compiler thinks that the first bytes alone are read
    _tile_loadconfig(&c);
    configured = rows;
}

bool tiles_allowed() {
    static const bool allowed = HAS_TILES && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
    return allowed;
}

void multiply_tiles(const Tiles &t, float *results) {
    shape_tiles(t.count);
    const bool high = t.count > 16;
    if (t.bytes && t.many) return high ? multiply<true, true, true>(t, results) : multiply<true, false, true>(t, results);
    if (t.bytes) return high ? multiply<true, true, false>(t, results) : multiply<true, false, false>(t, results);
    if (t.many) return high ? multiply<false, true, true>(t, results) : multiply<false, false, true>(t, results);
    high ? multiply<false, true, false>(t, results) : multiply<false, false, false>(t, results);
}

void score_tiles(const void *queries, int64_t count, int64_t steps, const uint8_t *const *columns, int64_t num,
                 int64_t width, float *scores, int64_t stride) {
    shape_tiles(count);
    const auto function = count > 16 ? score<true> : score<false>;
    function((const char *)queries, count, steps, columns, num, width, scores, stride);
}

void mix_tiles(const uint16_t *probabilities, int64_t count, const uint16_t *values, int64_t chunks, int64_t dims,
               float *mixed) {
    shape_tiles(count);
    const auto function = count > 16 ? mix<true> : mix<false>;
    function((const char *)probabilities, count, (const char *)values, chunks, dims, mixed);
}

int64_t spin_tiles(bool bytes, int64_t rounds) {
    shape_tiles(TILE_ROWS);
    for (int64_t i = 0; i < rounds; i++)
        if (bytes) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        } else {
            multiply_columns<true>();
        }
    release_tiles();
    return rounds * 4 * 16 * 16 * TILE_BYTES * (bytes ? 2 : 1);
}

void release_tiles() {
    if (!configured) return;
    _tile_release();
    configured = 0;
}

#else

bool tiles_allowed() { return false; }
void multiply_tiles(const Tiles &, float *) {}
void score_tiles(const void *, int64_t, int64_t, const uint8_t *const *, int64_t, int64_t, float *, int64_t) {}
void mix_tiles(const uint16_t *, int64_t, const uint16_t *, int64_t, int64_t, float *) {}
int64_t spin_tiles(bool, int64_t) { return 0; }
void release_tiles() {}

#endif
