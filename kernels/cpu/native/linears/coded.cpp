// Products of weights that are decoded while they are multiplied: one walk along a panel for every format of codes.
#include "linears/coded.h"

#include "linears/gemm.h"

namespace {

constexpr int64_t PIECE_BYTES = 16384;  // of decoded weights: a third of the nearest cache
constexpr int64_t AHEAD = 2048;         // bytes of codes that memory brings meanwhile

// What decodes a group's codes of W columns.
struct Group {
    F scale, zero;
    F first, second;  // the scales twice each: of the lower half of the columns and of the upper
    F values[16 / W];  // of codes of 4 bits
};

#if defined(__AVX512F__)
PG_INLINE F from_halves(const void *p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
PG_INLINE F lower_halves(U v) { return (F)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)v)); }
PG_INLINE F upper_halves(U v) { return (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)v, 1)); }
PG_INLINE F value_of(const Group &g, U codes) {  // the lowest four bits
    return (F)_mm512_permutexvar_ps((__m512i)codes, (__m512)g.values[0]);
}
#else
PG_INLINE F from_halves(const void *p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
PG_INLINE F lower_halves(U v) { return (F)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)v)); }
PG_INLINE F upper_halves(U v) { return (F)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)v, 1)); }
PG_INLINE F value_of(const Group &g, U codes) {
    const __m256 low = _mm256_permutevar8x32_ps((__m256)g.values[0], (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)g.values[1], (__m256i)codes);
    return (F)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
}
#endif

// Lanes of two vectors: every second of both from `odd` on; each of one twice.
PG_INLINE F every_second(F low, F high, int odd) { return __builtin_shuffle(low, high, lanes() * 2 + odd); }
PG_INLINE F twice(F v, bool upper) { return __builtin_shuffle(v, (lanes() + (upper ? W : 0)) / 2); }

#if defined(__AVX512BF16__)
PG_INLINE U rounded(F low, F high) {  // 2 W numbers
    const __m512bh v = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return load<U>(&v);
}
alignas(64) constexpr uint16_t PLACES[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
PG_INLINE U pairs(F even, F odd) {
    return (U)_mm512_permutexvar_epi16(_mm512_load_si512(PLACES), (__m512i)rounded(even, odd));
}
#else
PG_INLINE U pairs(F even, F odd) { return bf16_bits(odd) << 16 | bf16_bits(even); }
#endif

// Of a word of codes: pair i of its features, as floats or as bfloat16.
template <bool SUBTRACTS>
struct Nibble {
    static constexpr int64_t FEATURES = 8;
    static PG_INLINE Pair floats(const Group &g, U word, int i) {
        F even = value_of(g, word >> 8 * i), odd = value_of(g, word >> (8 * i + 4));
        if (SUBTRACTS) even = even - g.zero, odd = odd - g.zero;
        return {even * g.scale, odd * g.scale};
    }
    static PG_INLINE U halves(const Group &g, U word, int i) {
        const Pair p = floats(g, word, i);
        return pairs(p.even, p.odd);
    }
};

struct Octet {
    static constexpr int64_t FEATURES = 4;
    static PG_INLINE F number(const Group &g, U code) {
        return (__builtin_convertvector((I)(code & 0xffu), F) - g.zero) * g.scale;
    }
    static PG_INLINE Pair floats(const Group &g, U word, int i) {
        return {number(g, word >> 16 * i), number(g, word >> (16 * i + 8))};
    }
    static PG_INLINE U halves(const Group &g, U word, int i) {
        const Pair p = floats(g, word, i);
        return pairs(p.even, p.odd);
    }
};

// float16 has the same bits at other places, and 256 times the bias: scales make up for that.
struct Float8 {
    static constexpr int64_t FEATURES = 4;
    static PG_INLINE U widened(U word, int i) {
        if (i) return (word & 0x80008000u) | (word & 0x7f007f00u) >> 1;
        return (word & 0x00800080u) << 8 | (word & 0x007f007fu) << 7;
    }
    static PG_INLINE Pair floats(const Group &g, U word, int i) {
        const U both = widened(word, i);
        const F low = lower_halves(both) * g.first, high = upper_halves(both) * g.second;
        return {every_second(low, high, 0), every_second(low, high, 1)};
    }
    static PG_INLINE U halves(const Group &g, U word, int i) {
#if defined(__AVX512BF16__)
        const U both = widened(word, i);
        return rounded(lower_halves(both) * g.first, upper_halves(both) * g.second);
#else
        const Pair p = floats(g, word, i);
        return pairs(p.even, p.odd);
#endif
    }
};

// `words` of a group's rows of NR words, to [features][NR] floats or [features / 2][NR] pairs of bfloat16.
template <class Code, bool FLOATS>
void decode_words(const Group (&groups)[2], const uint32_t *codes, int64_t words, uint32_t *out) {
    const Group g[2] = {groups[0], groups[1]};
    for (int64_t j = 0; j < words; j++, codes += NR) {
        for (int64_t line = 0; line < NR * 4; line += 64) _mm_prefetch((const char *)codes + AHEAD + line, _MM_HINT_T0);
        const U word[2] = {load<U>(codes), load<U>(codes + W)};
#pragma GCC unroll 4
        for (int i = 0; i < Code::FEATURES / 2; i++) {
#pragma GCC unroll 2
            for (int c = 0; c < 2; c++) {
                if constexpr (FLOATS) {
                    const Pair p = Code::floats(g[c], word[c], i);
                    store(out + c * W, p.even), store(out + NR + c * W, p.odd);
                } else {
                    store(out + c * W, Code::halves(g[c], word[c], i));
                }
            }
            out += FLOATS ? 2 * NR : NR;
        }
    }
}

using DecodeWords = void (*)(const Group (&)[2], const uint32_t *, int64_t, uint32_t *);

template <bool FLOATS>
DecodeWords decoder_of(const Coded &w) {
    if (w.format == PG_W8) return decode_words<Octet, FLOATS>;
    if (w.format == PG_E4M3) return decode_words<Float8, FLOATS>;
    return w.zeros ? decode_words<Nibble<true>, FLOATS> : decode_words<Nibble<false>, FLOATS>;
}

constexpr float E2M1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
constexpr float PLAIN[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float AROUND[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

void read_head(const Coded &w, const uint8_t *head, Group (&groups)[2]) {
    const float *values = w.format == PG_E2M1 ? E2M1 : w.zeros ? PLAIN : AROUND;
    for (int c = 0; c < 2; c++) {
        const uint8_t *at = head + c * W * w.scale_bytes();
        Group &g = groups[c];
        g.scale = w.scales == PG_F32    ? load<F>((const float *)at)
                  : w.scales == PG_BF16 ? from_bf16((const uint16_t *)at)
                                        : from_halves(at);
        g.zero = w.zeros ? __builtin_convertvector(load<U8>(head + NR * w.scale_bytes() + c * W), F) : splat(128.0f);
        const F unit = g.scale * f8_unit(PG_E4M3);
        g.first = twice(unit, false), g.second = twice(unit, true);
        for (int i = 0; i < 16 / W; i++) g.values[i] = load<F>(values + i * W);
    }
}

// Features [first, last) of a panel, multiples of a word.
void decode(const Coded &w, int64_t panel, int64_t first, int64_t last, bool floats, uint32_t *out) {
    const DecodeWords decode_part = floats ? decoder_of<true>(w) : decoder_of<false>(w);
    const uint8_t *base = w.packed + panel * w.panel_bytes();
    while (first < last) {
        const int64_t index = first / w.group, begin = index * w.group, end = begin + w.features(index);
        const int64_t next = end < last ? end : last;
        const uint8_t *head = base + index * w.group_bytes();
        Group groups[2];
        read_head(w, head, groups);
        const uint8_t *codes = head + w.head_bytes() + w.code_bytes(first - begin);
        decode_part(groups, (const uint32_t *)codes, (next - first) / w.word(), out);
        out += (next - first) * NR / (floats ? 1 : 2);
        first = next;
    }
}

// A piece of the features: MR rows and NC vectors of columns, whose sums so far are in results [NC / 2][rows][NR].
template <Kernel KERNEL, int MR, int NC>
__attribute__((noinline)) void add_piece(const Rows &x, int64_t row, int64_t feature, int64_t n, const uint32_t *decoded,
                                         int64_t next, bool added, float *results, int64_t panel_results) {
    F acc[MR][NC];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++)
            acc[i][c] = added ? load<F>(results + c / 2 * panel_results + i * NR + c % 2 * W) : F{};
    if constexpr (KERNEL == DOT_BF16) {
        const int64_t stride = x.stride / 2;
        const uint32_t *rows = (const uint32_t *)x.data + row * stride + feature / 2;
        for (int64_t j = 0; j < n / 2; j++) {
            U columns[NC];
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) columns[c] = load<U>(decoded + c / 2 * next + j * NR + c % 2 * W);
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const U given = splat_u(rows[i * stride + j]);
#pragma GCC unroll 8
                for (int c = 0; c < NC; c++) acc[i][c] = dot(acc[i][c], given, columns[c]);
            }
        }
    } else {
        constexpr int FORMAT = KERNEL == FLOAT_F32 ? PG_F32 : PG_BF16;
        const float *rows = (const float *)x.data + row * x.stride + feature;
        accumulate<FORMAT>(acc, rows, x.stride, n, NR,
                           [&](int c) { return (const uint8_t *)(decoded + c / 2 * next + c % 2 * W); }, [] {});
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) store(results + c / 2 * panel_results + i * NR + c % 2 * W, acc[i][c]);
}

// Decoded panels come from the nearest cache: only the chains' latency is to be hidden.
constexpr int decoded_columns(int rows) { return rows == 1 ? W / 2 : wide_columns(rows); }

using AddPiece = void (*)(const Rows &, int64_t, int64_t, int64_t, const uint32_t *, int64_t, bool, float *, int64_t);

// One panel, or as many as few rows take.
template <Kernel KERNEL, int MR = MAX_ROWS>
AddPiece add_piece_of(int64_t rows, bool wide) {
    if (rows == MR) return wide ? add_piece<KERNEL, MR, decoded_columns(MR)> : add_piece<KERNEL, MR, 2>;
    if constexpr (MR > 1) return add_piece_of<KERNEL, MR - 1>(rows, wide);
    return nullptr;
}

AddPiece add_piece_of(Kernel kernel, int64_t rows, bool wide) {
    if (kernel == FLOAT_F32) return add_piece_of<FLOAT_F32>(rows, wide);
    return kernel == FLOAT_BF16 ? add_piece_of<FLOAT_BF16>(rows, wide) : add_piece_of<DOT_BF16>(rows, wide);
}

alignas(64) thread_local uint32_t decoded[PIECE_BYTES / 4];

void multiply_by_tiles(const Rows &x, int64_t first, int64_t rows, const Coded &w, int64_t panel, float *results) {
    constexpr int64_t STEP = TILE_BYTES / 2, MOST = PIECE_BYTES / (2 * NR);  // features
    for (int64_t feature = 0; feature < w.k; feature += MOST) {
        const int64_t last = w.k < feature + MOST ? w.k : feature + MOST, steps = (last - feature) / STEP;
        decode(w, panel, feature, last, false, decoded);
        for (int64_t row = first; row < first + rows; row += TILE_ROWS) {
            const int64_t count = x.tiled - row < TILE_ROWS ? x.tiled - row : TILE_ROWS;
            const char *given = (const char *)x.data + row * w.k * 2 + feature / STEP * count * TILE_BYTES;
            float *sums = results + (row - first) * NR;
            const bool many = row + TILE_ROWS < first + rows;
            multiply_tiles({false, feature > 0, many, given, count, decoded, decoded, 0, steps}, sums);
        }
    }
}

}  // namespace

int multiply_coded(Kernel kernel, const Rows &x, int64_t first, int64_t rows, const PgLinear &linear, int64_t panel,
                   int64_t end, float *results) {
    const Coded w = coded_of(linear.packed, linear.k, linear.group, linear.coding);
    if (!rows) return 1;
    if (x.tiled) {
        multiply_by_tiles(x, first, rows, w, panel, results);
        return 1;
    }
    const bool floats = kernel == FLOAT_F32;
    const int64_t most = rows <= MAX_ROWS ? decoded_columns((int)rows) / 2 : 1;
    const bool wide = most > 1 && panel + most <= end;
    const int64_t panels = wide ? most : 1, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t words = PIECE_BYTES / 4 / panels, piece = words / NR * (floats ? 1 : 2);  // features
    for (int64_t feature = 0; feature < w.k; feature += piece) {
        const int64_t last = w.k < feature + piece ? w.k : feature + piece;
        for (int64_t p = 0; p < panels; p++) decode(w, panel + p, feature, last, floats, decoded + p * words);
        for (int64_t i = 0, row = 0; i < tiles; i++) {
            const int64_t next = rows * (i + 1) / tiles;
            add_piece_of(kernel, next - row, wide)(x, first + row, feature, last - feature, decoded, words, feature > 0,
                                                   results + row * NR, rows * NR);
            row = next;
        }
    }
    return (int)panels;
}
