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

thread_local int64_t configured = 0;  // rows, or minus the rows for half as many features at a time

// Tiles 0 ... 3 are sums, 4 and 5 rows, 6 and 7 columns.
void configure(int64_t rows, bool halved = false) {
    const int64_t wanted = halved ? -rows : rows;
    if (configured == wanted) return;
    Configuration c;
    const uint8_t low = rows < 16 ? rows : 16, high = rows - low, lanes = halved ? 8 : 16;
    const uint8_t each[8] = {low, low, high, high, low, high, lanes, lanes};
    for (int i = 0; i < 8; i++)
        if (each[i]) c.rows[i] = each[i], c.bytes[i] = halved && (i == 4 || i == 5) ? TILE_BYTES / 2 : TILE_BYTES;
    asm volatile("" : : "r"(&c) : "memory");  // the compiler thinks that the first bytes alone are read
    _tile_loadconfig(&c);
    configured = wanted;
}

PG_INLINE void fetch(const char *at) {
#pragma GCC unroll 32
    for (int64_t i = 0; i < STEP; i += 64) _mm_prefetch(at + i, _MM_HINT_T1);
}

template <bool BYTES, bool HIGH>
void multiply(const Tiles &t, float *results) {
    const char *low = (const char *)t.rows, *high = low + 16 * TILE_BYTES, *panel = (const char *)t.panel;
    const char *ahead = (const char *)t.next;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HIGH) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const int64_t given = t.count * TILE_BYTES;
    for (int64_t i = 0; i < t.steps; i++, panel += STEP, low += given, high += given) {
        if (ahead) fetch(ahead), ahead += STEP;
        _tile_loadd(4, low, TILE_BYTES);
        _tile_loadd(6, panel, WIDTH);
        _tile_loadd(7, panel + TILE_BYTES, WIDTH);
        if constexpr (HIGH) _tile_loadd(5, high, TILE_BYTES);
        if constexpr (BYTES) {
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (HIGH && BYTES) {
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        } else if constexpr (HIGH) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, results, WIDTH);
    _tile_stored(1, results + 16, WIDTH);
    if constexpr (HIGH) {
        _tile_stored(2, results + 16 * NR, WIDTH);
        _tile_stored(3, results + 16 * NR + 16, WIDTH);
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

template <bool HIGH>
void score(const char *low, int64_t count, int64_t steps, const uint8_t *const columns[2], int64_t width, float *scores,
           int64_t stride) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HIGH) {
        _tile_zero(2);
        _tile_zero(3);
    }
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
void mix(const uint16_t *p, int64_t stride, const uint8_t *const *values, int64_t sixteens, int64_t dims, float *mixed) {
    for (int64_t d = 0; d < dims; d += 32) {
        float *low = mixed + d, *high = low + 16 * dims;
        _tile_loadd(0, low, 4 * dims);
        _tile_loadd(1, low + 16, 4 * dims);
        if constexpr (HIGH) {
            _tile_loadd(2, high, 4 * dims);
            _tile_loadd(3, high + 16, 4 * dims);
        }
        for (int64_t i = 0; i < sixteens; i++) {
            _tile_loadd(4, p + 16 * i, 2 * stride);
            if constexpr (HIGH) _tile_loadd(5, p + 16 * stride + 16 * i, 2 * stride);
            _tile_loadd(6, values[i] + 4 * d, 4 * dims);
            _tile_loadd(7, values[i] + 4 * d + 64, 4 * dims);
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
    if (t.bytes) return t.count > 16 ? multiply<true, true>(t, results) : multiply<true, false>(t, results);
    t.count > 16 ? multiply<false, true>(t, results) : multiply<false, false>(t, results);
}

void score_tiles(const void *queries, int64_t count, int64_t steps, const uint8_t *const columns[2], int64_t width,
                 float *scores, int64_t stride) {
    configure(count);
    const auto function = count > 16 ? score<true> : score<false>;
    function((const char *)queries, count, steps, columns, width, scores, stride);
}

void mix_tiles(const uint16_t *probabilities, int64_t stride, int64_t count, const uint8_t *const *values,
               int64_t sixteens, int64_t dims, float *mixed) {
    configure(count, true);
    const auto function = count > 16 ? mix<true> : mix<false>;
    function(probabilities, stride, values, sixteens, dims, mixed);
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
void mix_tiles(const uint16_t *, int64_t, int64_t, const uint8_t *const *, int64_t, int64_t, float *) {}
void release_tiles() {}

#endif
