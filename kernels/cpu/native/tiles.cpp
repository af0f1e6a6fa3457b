#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

namespace {

constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
constexpr int64_t WIDTH = 4 * NR;                            // bytes of a lane of all columns of a panel
constexpr int64_t STEP = 16 * WIDTH;                         // bytes of a panel for one step

struct alignas(64) Configuration {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

thread_local int64_t configured = 0;  // rows

// Tiles 0 ... 3 are sums, 4 and 5 rows, 6 and 7 columns.
void configure(int64_t rows) {
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
PG_INLINE void store_sums(float *low, float *high, int64_t bytes) {
    _tile_stored(0, low, bytes);
    _tile_stored(1, low + 16, bytes);
    if constexpr (HIGH) {
        _tile_stored(2, high, bytes);
        _tile_stored(3, high + 16, bytes);
    }
}

// The macro takes a number for a tile.
#define LOAD_TILE(TILE, STREAM, FROM, STRIDE)                    \
    do {                                                         \
        if constexpr (STREAM) _tile_stream_loadd(TILE, FROM, STRIDE); \
        else _tile_loadd(TILE, FROM, STRIDE);                    \
    } while (false)

// What is loaded once goes past the nearest cache: rows, where there are many, or else columns.
template <bool BYTES, bool HIGH, bool MANY>
void multiply(const Tiles &t, float *results) {
    const char *low = (const char *)t.rows, *high = low + 16 * TILE_BYTES, *panel = (const char *)t.panel;
    const char *ahead = (const char *)t.next;
    if (t.added) load_sums<HIGH>(results, results + 16 * NR, WIDTH);
    else zero_sums<HIGH>();
    const int64_t given = t.count * TILE_BYTES;
    for (int64_t i = 0; i < t.steps; i++, panel += STEP, low += given, high += given) {
        for (int64_t line = 0; line < t.lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        LOAD_TILE(6, !MANY, panel, WIDTH);
        LOAD_TILE(4, MANY, low, TILE_BYTES);
        LOAD_TILE(7, !MANY, panel + TILE_BYTES, WIDTH);
        if constexpr (HIGH) LOAD_TILE(5, MANY, high, TILE_BYTES);
        if constexpr (BYTES) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if constexpr (HIGH) {
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        } else {
            multiply_columns<HIGH>();
        }
    }
    store_sums<HIGH>(results, results + 16 * NR, WIDTH);
}

template <bool HIGH>
void score(const char *low, int64_t count, int64_t steps, const uint8_t *const columns[2], int64_t width, float *scores,
           int64_t stride) {
    zero_sums<HIGH>();
    for (int64_t i = 0; i < steps; i++, low += count * TILE_BYTES) {
        _tile_loadd(4, low, TILE_BYTES);
        if constexpr (HIGH) _tile_loadd(5, low + 16 * TILE_BYTES, TILE_BYTES);
        _tile_loadd(6, columns[0] + i * 16 * width, width);
        _tile_loadd(7, columns[1] + i * 16 * width, width);
        multiply_columns<HIGH>();
    }
    store_sums<HIGH>(scores, scores + 16 * stride, 4 * stride);
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

bool tiles_allowed() {
    static const bool allowed = HAS_TILES && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
    return allowed;
}

void multiply_tiles(const Tiles &t, float *results) {
    configure(t.count);
    const bool high = t.count > 16;
    if (t.bytes && t.many) return high ? multiply<true, true, true>(t, results) : multiply<true, false, true>(t, results);
    if (t.bytes) return high ? multiply<true, true, false>(t, results) : multiply<true, false, false>(t, results);
    if (t.many) return high ? multiply<false, true, true>(t, results) : multiply<false, false, true>(t, results);
    high ? multiply<false, true, false>(t, results) : multiply<false, false, false>(t, results);
}

void score_tiles(const void *queries, int64_t count, int64_t steps, const uint8_t *const columns[2], int64_t width,
                 float *scores, int64_t stride) {
    configure(count);
    const auto function = count > 16 ? score<true> : score<false>;
    function((const char *)queries, count, steps, columns, width, scores, stride);
}

void mix_tiles(const uint16_t *probabilities, int64_t count, const uint16_t *values, int64_t chunks, int64_t dims,
               float *mixed) {
    configure(count);
    const auto function = count > 16 ? mix<true> : mix<false>;
    function((const char *)probabilities, count, (const char *)values, chunks, dims, mixed);
}

int64_t spin_tiles(bool bytes, int64_t rounds) {
    configure(TILE_ROWS);
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
void score_tiles(const void *, int64_t, int64_t, const uint8_t *const *, int64_t, float *, int64_t) {}
void mix_tiles(const uint16_t *, int64_t, const uint16_t *, int64_t, int64_t, float *) {}
int64_t spin_tiles(bool, int64_t) { return 0; }
void release_tiles() {}

#endif
