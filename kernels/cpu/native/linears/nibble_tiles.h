// Products of 16 rows at a time where the processor has tiles (AMX): integers, so that no bit shows which way they came.
#pragma once
#include "linears/nibbles.h"
#include "linears/tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512F__) && !defined(PG_EMULATE_BF16)
constexpr int64_t TILE_HEIGHT = 16;  // rows

// How far groups go in tiles: as many features as one tile takes at a time.
inline int64_t tile_features(const Nibbles &w) { return w.group < TILE_BYTES ? w.group : TILE_BYTES; }

// This thread's tiles while it lives: 0 to 3 sums, 4 and 5 activations of 16 rows each, 6 and 7 weights.
class NibbleTiles {
  public:
    explicit NibbleTiles(int64_t features) {
        struct alignas(64) {
            uint8_t palette, first, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } shape{};
        const auto set = [&](int tile, int64_t rows, int64_t bytes) {
            shape.rows[tile] = (uint8_t)rows, shape.bytes[tile] = (uint16_t)bytes;
        };
        shape.palette = 1;
        for (int tile : {0, 1, 2, 3}) set(tile, TILE_HEIGHT, TILE_BYTES);
        for (int tile : {4, 5}) set(tile, TILE_HEIGHT, features);
        for (int tile : {6, 7}) set(tile, features / 4, TILE_BYTES);
        _tile_loadconfig(&shape);
    }
    ~NibbleTiles() { _tile_release(); }
    NibbleTiles(const NibbleTiles &) = delete;
    NibbleTiles &operator=(const NibbleTiles &) = delete;
};

// Sums [2 * 16][NR] of n features, for 16 rows and for 16 others; the weights' bytes have a sign unless `wide`.
inline void multiply_group(const uint8_t *rows, const uint8_t *others, int64_t stride, const uint32_t *bytes, int64_t n,
                           int64_t features, bool wide, int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < n; i += features, bytes += features / 4 * NR) {
        _tile_loadd(6, bytes, NR * 4);
        _tile_loadd(4, rows + i, stride);
        _tile_loadd(7, bytes + W, NR * 4);
        _tile_loadd(5, others + i, stride);
        if (wide) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, NR * 4);
    _tile_stored(1, sums + W, NR * 4);
    _tile_stored(2, sums + TILE_HEIGHT * NR, NR * 4);
    _tile_stored(3, sums + TILE_HEIGHT * NR + W, NR * 4);
}
#endif
