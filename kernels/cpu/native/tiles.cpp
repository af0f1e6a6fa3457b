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
    _tile_loadconfig(&c);
    configured = rows;
}

PG_INLINE void fetch(const char *at) {
#pragma GCC unroll 32
    for (int64_t i = 0; i < STEP; i += 64) _mm_prefetch(at + i, _MM_HINT_T1);
}

template <bool BYTES, bool HIGH>
void multiply(const Tiles &t, float *results) {
    const char *low = (const char *)t.rows, *high = low + 16 * t.stride, *panel = (const char *)t.panel;
    const char *ahead = (const char *)t.next;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (HIGH) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < t.steps; i++, panel += STEP, low += TILE_BYTES, high += TILE_BYTES) {
        if (ahead) fetch(ahead), ahead += STEP;
        _tile_loadd(4, low, t.stride);
        _tile_loadd(6, panel, WIDTH);
        _tile_loadd(7, panel + TILE_BYTES, WIDTH);
        if constexpr (HIGH) _tile_loadd(5, high, t.stride);
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

void release_tiles() {
    if (!configured) return;
    _tile_release();
    configured = 0;
}

#else

bool tiles_allowed() { return false; }
void multiply_tiles(const Tiles &, float *) {}
void release_tiles() {}

#endif
