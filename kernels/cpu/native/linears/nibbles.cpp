// Products of 4-bit weights with 8-bit activations: integers within a group, floats from group to group in their order.
#include "linears/nibbles.h"

#include <vector>

#include "linears/nibble_tiles.h"
#include "linears/row_pointers.h"

namespace {

constexpr int TALLEST = W == 16 ? 12 : 4;  // rows of a tile

// Four products of bytes per lane, of weights without and activations with a sign.  Two products of at most 255 * 127
// fit 16 bits for codes of up to 7 bits.
#if defined(__AVX512VNNI__)
PG_INLINE I dot_codes(I acc, U codes, U x) { return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x); }
#elif defined(__AVX512F__)
PG_INLINE I dot_codes(I acc, U codes, U x) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
    return acc + (I)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVXVNNI__)
PG_INLINE I dot_codes(I acc, U codes, U x) {
    return (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)x);
}
#else
PG_INLINE I dot_codes(I acc, U codes, U x) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif

#if defined(__AVX512F__)
PG_INLINE F from_half(const void *p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#else
PG_INLINE F from_half(const void *p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#endif

PG_INLINE U low_half(U codes) { return codes & 0x0f0f0f0fu; }
PG_INLINE U high_half(U codes) { return (codes >> 4) & 0x0f0f0f0fu; }

PG_INLINE F scales_of(bool wide, const uint8_t *at, int64_t column) {
    return wide ? load<F>((const float *)at + column) : from_half(at + column * 2);
}

// What sums begin with: zeros times minus the sum of the activations.
PG_INLINE I begin_of(bool wide, const uint8_t *at, int64_t column, int32_t given) {
    const I all = given - I{};
    return wide ? __builtin_convertvector(load<U16>((const uint16_t *)(at + NR * 4) + column), I) * all : all;
}

PG_INLINE uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}
PG_INLINE float float_at(const uint8_t *p) {
    float value;
    memcpy(&value, p, 4);
    return value;
}

// One tile of MR rows and NC vectors of columns, NC / 2 panels, into results [NC / 2][MR][NR].
template <int MR, int NC>
PG_INLINE void tile(const uint8_t *rows, int64_t stride, const Nibbles &w, const uint8_t *panel, float *results) {
    constexpr bool HELD = MR * NC <= (W == 16 ? 12 : 4);  // the sums of floats in registers, as those of integers are
    constexpr int64_t AHEAD = 16384 / NC;  // bytes of each stream: what memory brings while it answers the first line
    const int64_t next = w.panel_bytes(), head = w.head_bytes(), groups = w.groups();
    F sums[MR][NC] = {};
    for (int64_t g = 0; g < groups; g++, rows += w.group + ROW_HEAD, panel += w.group_bytes()) {
        const int64_t n = w.features(g);
        I acc[MR][NC];
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++)
                acc[i][c] = begin_of(w.wide, panel + c / 2 * next, c % 2 * W,
                                     (int32_t)word_at(rows + i * stride + n + 4));
        const uint8_t *codes = panel + head;
        RowPointers<MR> given(rows, stride);
        for (int64_t j = 0; j < n; j += 8, codes += NR * 4, given.advance(8)) {
            U low[NC], high[NC];
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) {
                const uint8_t *at = codes + c / 2 * next + c % 2 * W * 4;
                if (W == 16 || c % 2 == 0) _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
                const U both = load<U>(at);
                low[c] = low_half(both), high[c] = high_half(both);
            }
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const U first = splat_u(given.template get<uint32_t>(i)), second = splat_u(given.template get<uint32_t>(i, 4));
#pragma GCC unroll 8
                for (int c = 0; c < NC; c++) acc[i][c] = dot_codes(acc[i][c], low[c], first);
#pragma GCC unroll 8
                for (int c = 0; c < NC; c++) acc[i][c] = dot_codes(acc[i][c], high[c], second);
            }
        }
        F scales[NC];
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) scales[c] = scales_of(w.wide, panel + c / 2 * next, c % 2 * W);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const float scale = float_at(rows + i * stride + n);
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) {
                const F sum = __builtin_convertvector(acc[i][c], F), factor = scales[c] * scale;
                float *out = results + (c / 2 * MR + i) * NR + c % 2 * W;
                if (HELD) sums[i][c] = fma(sum, factor, sums[i][c]);
                else store(out, fma(sum, factor, g ? load<F>(out) : F{}));
            }
        }
    }
    if (!HELD) return;
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) store(results + (c / 2 * MR + i) * NR + c % 2 * W, sums[i][c]);
}

// Vectors of columns: one panel, which memory reads best, unless a vector is less than a cache line.
constexpr int columns_of(int rows) { return W < 16 && rows == 1 ? 4 : 2; }

template <int MR>
__attribute__((noinline)) int tile_of(const uint8_t *rows, int64_t stride, const Nibbles &w, int64_t panel, int64_t end,
                                      float *results) {
    constexpr int NC = columns_of(MR);
    const uint8_t *base = w.packed + panel * w.panel_bytes();
    if constexpr (NC > 2)
        if (panel + NC / 2 <= end) {
            tile<MR, NC>(rows, stride, w, base, results);
            return NC / 2;
        }
    tile<MR, 2>(rows, stride, w, base, results);
    return 1;
}

// One group of a panel, its codes as bytes [features / 4][NR][4]: MR rows are added to results [MR][NR].
template <int MR>
__attribute__((noinline)) void add_group(const uint8_t *rows, int64_t stride, const Nibbles &w, const uint8_t *head,
                                         int64_t n, const uint32_t *bytes, bool first, float *results) {
    I acc[MR][2];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++)
            acc[i][c] = begin_of(w.wide, head, c * W, (int32_t)word_at(rows + i * stride + n + 4));
    RowPointers<MR> at(rows, stride);
    for (int64_t j = 0; j < n; j += 4, bytes += NR, at.advance(4)) {
        const U low = load<U>(bytes), high = load<U>(bytes + W);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const U given = splat_u(at.template get<uint32_t>(i));
            acc[i][0] = dot_codes(acc[i][0], low, given);
            acc[i][1] = dot_codes(acc[i][1], high, given);
        }
    }
    const F scales[2] = {scales_of(w.wide, head, 0), scales_of(w.wide, head, W)};
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
        const float scale = float_at(rows + i * stride + n);
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
            float *out = results + i * NR + c * W;
            const F sum = __builtin_convertvector(acc[i][c], F), factor = scales[c] * scale;
            store(out, fma(sum, factor, first ? F{} : load<F>(out)));
        }
    }
}

using TileOf = int (*)(const uint8_t *, int64_t, const Nibbles &, int64_t, int64_t, float *);
using AddGroup = void (*)(const uint8_t *, int64_t, const Nibbles &, const uint8_t *, int64_t, const uint32_t *, bool,
                          float *);

template <int MR = TALLEST>
TileOf tile_of_rows(int64_t rows) {
    if (rows == MR) return tile_of<MR>;
    if constexpr (MR > 1) return tile_of_rows<MR - 1>(rows);
    return nullptr;
}

template <int MR = TALLEST>
AddGroup add_group_of_rows(int64_t rows) {
    if (rows == MR) return add_group<MR>;
    if constexpr (MR > TALLEST / 2) return add_group_of_rows<MR - 1>(rows);
    return nullptr;
}

// As bytes; with `zero` taken off each.
void unpack(const uint8_t *codes, int64_t n, int zero, uint32_t *bytes) {
    const U taken = splat_u((uint32_t)zero * 0x01010101u), sign = splat_u(zero ? 0x80808080u : 0);
    const auto signed_bytes = [&](U v) { return ((v | sign) - taken) ^ sign; };  // no byte borrows from the next
    for (int64_t j = 0; j < n; j += 8, codes += NR * 4, bytes += 2 * NR)
        for (int64_t c = 0; c < NR; c += W) {
            if (W == 16 || c == 0) _mm_prefetch((const char *)codes + c * 4 + 4096, _MM_HINT_T1);
            const U both = load<U>((const uint32_t *)codes + c);
            store(bytes + c, signed_bytes(low_half(both)));
            store(bytes + NR + c, signed_bytes(high_half(both)));
        }
}

// Where one group of a panel is unpacked to.
uint32_t *group_memory(const Nibbles &w) {
    thread_local std::vector<uint32_t> memory;
    memory.resize(w.group * NR / 4 + 16);
    return (uint32_t *)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512F__) && !defined(PG_EMULATE_BF16)
// As add_group, of any number of rows; n a multiple of `features`.
void add_group_by_tiles(const uint8_t *rows, int64_t stride, int64_t count, const Nibbles &w, const uint8_t *head,
                        int64_t n, int64_t features, const uint32_t *bytes, bool first, float *results) {
    const F scales[2] = {scales_of(w.wide, head, 0), scales_of(w.wide, head, W)};
    alignas(64) int32_t sums[2 * TILE_HEIGHT * NR];
    const auto add = [&](int64_t row, int64_t end, const int32_t *from) {
        for (; row < end; row++, from += NR) {
            const uint8_t *behind = rows + row * stride + n;
            const F scale = splat(float_at(behind));
            float *out = results + row * NR;
            for (int c = 0; c < 2; c++) {
                I sum = load<I>(from + c * W);
                if (w.wide) sum = sum + begin_of(true, head, c * W, (int32_t)word_at(behind + 4));
                const F before = first ? F{} : load<F>(out + c * W);
                store(out + c * W, fma(__builtin_convertvector(sum, F), scales[c] * scale, before));
            }
        }
    };
    // The last sixteen rows may be some of those before, whose sums are left alone.
    for (int64_t row = 0; row < count; row += 2 * TILE_HEIGHT) {
        const int64_t one = row + TILE_HEIGHT < count ? row : count - TILE_HEIGHT, middle = one + TILE_HEIGHT;
        const int64_t other = middle + TILE_HEIGHT < count ? middle : count - TILE_HEIGHT;
        multiply_group(rows + one * stride, rows + other * stride, stride, bytes, n, features, w.wide, sums);
        add(row, middle, sums + (row - one) * NR);
        add(middle, other + TILE_HEIGHT, sums + (TILE_HEIGHT + middle - other) * NR);
    }
}

// False where a group does not go into tiles.
bool multiply_by_tiles(const uint8_t *rows, int64_t stride, int64_t count, const Nibbles &w, int64_t panel,
                       float *results) {
    const int64_t groups = w.groups(), features = tile_features(w);
    if (count < TILE_HEIGHT || w.group % features || w.features(groups - 1) % features || !tiles_allowed()) return false;
    uint32_t *bytes = group_memory(w);
    const uint8_t *head = w.packed + panel * w.panel_bytes();
    const NibbleTiles tiles(features);
    for (int64_t g = 0; g < groups; g++, head += w.group_bytes(), rows += w.group + ROW_HEAD) {
        const int64_t n = w.features(g);
        unpack(head + w.head_bytes(), n, w.wide ? 0 : (int)ZERO, bytes);
        add_group_by_tiles(rows, stride, count, w, head, n, features, bytes, g == 0, results);
    }
    return true;
}
#else
bool multiply_by_tiles(const uint8_t *, int64_t, int64_t, const Nibbles &, int64_t, float *) { return false; }
#endif

// Of more rows than a tile has: a group of weights is unpacked once for all of them, and stays in the nearest cache.
void multiply_many(const uint8_t *rows, int64_t stride, int64_t count, const Nibbles &w, int64_t panel,
                   float *results) {
    if (multiply_by_tiles(rows, stride, count, w, panel, results)) return;
    uint32_t *bytes = group_memory(w);
    const uint8_t *head = w.packed + panel * w.panel_bytes();
    const int64_t tiles = (count + TALLEST - 1) / TALLEST, groups = w.groups();
    for (int64_t g = 0; g < groups; g++, head += w.group_bytes(), rows += w.group + ROW_HEAD) {
        const int64_t n = w.features(g);
        unpack(head + w.head_bytes(), n, 0, bytes);
        for (int64_t i = 0, row = 0; i < tiles; i++) {
            const int64_t next = count * (i + 1) / tiles;
            add_group_of_rows(next - row)(rows + row * stride, stride, w, head, n, bytes, g == 0, results + row * NR);
            row = next;
        }
    }
}

}  // namespace

void quantize_groups(const float *x, const Nibbles &w, uint8_t *out) {
    const int64_t groups = w.groups();
    for (int64_t g = 0; g < groups; g++, x += w.group) {
        const int64_t n = w.features(g);
        F largest{}, sums{};
        for (int64_t i = 0; i < n; i += W) largest = max(largest, abs(load<F>(x + i)));
        const float peak = reduce_max(largest), factor = peak > 0 ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
        for (int64_t i = 0; i < n; i += W, out += W) {
            const F q = round_even(load<F>(x + i) * factor);
            sums = sums + q;
            store(out, __builtin_convertvector(__builtin_convertvector(q, I), I8));
        }
        const int32_t minus = -(int32_t)reduce_add(sums) * (w.wide ? 1 : (int32_t)ZERO);
        memcpy(out, &scale, 4);
        memcpy(out + 4, &minus, 4);
        out += ROW_HEAD;
    }
}

void quantize_groups(const float *x, const PgLinear &w, uint8_t *out) {
    if (!w.gather) return quantize_groups(x, nibbles_of(w), out);
    thread_local std::vector<float> ordered;
    ordered.resize(w.k);
    for (int64_t i = 0; i < w.k; i++) ordered[i] = x[w.gather[i]];
    quantize_groups(ordered.data(), nibbles_of(w), out);
}

void read_nibbles(const Nibbles &w, int64_t row, float *out) {
    const uint8_t *panel = w.packed + row / NR * w.panel_bytes();
    const int64_t column = row % NR, first = column / W * W;
    for (int64_t g = 0; g < w.groups(); g++, panel += w.group_bytes()) {
        const float scale = scales_of(w.wide, panel, first)[column - first];
        const int32_t zero = w.wide ? begin_of(true, panel, first, 1)[column - first] : (int32_t)ZERO;
        const uint8_t *codes = panel + w.head_bytes() + column * 4;
        for (int64_t i = 0; i < w.features(g); i++) {
            const int32_t both = codes[i / 8 * NR * 4 + i % 4], code = i % 8 < 4 ? both & 15 : both >> 4;
            *out++ = (float)(code - zero) * scale;
        }
    }
}

int multiply_nibbles(const uint8_t *rows, int64_t stride, int64_t first, int64_t last, const Nibbles &w, int64_t panel,
                     int64_t end, float *results) {
    const int64_t count = last - first;
    if (!count) return 1;
    rows += first * stride;
    if (count <= TALLEST) return tile_of_rows(count)(rows, stride, w, panel, end, results);
    multiply_many(rows, stride, count, w, panel, results);
    return 1;
}
