// y = x W^T: packed weights and the microkernels that multiply them.
//
// A weight [n, k] is cut into panels of NR output columns.  Within a panel the input features follow each other, by
// format:
//     F32   [k][NR]
//     BF16  [k / 2][NR][2]     a 32-bit lane holds two features of one column
//     I8    [k / 4][NR][4]     and behind all panels: scales [n] float32, 128 x column sums [n] int32
//     I4, U4                   nibbles.h
//     W4, W8, E2M1, E4M3       coded.h
//
// A microkernel holds MR rows times NC vectors of columns in registers and walks along the features.  Each result is
// one chain of fused multiply-adds in order of features, whatever MR and NC are: that makes rows independent of each
// other, bit for bit, and float32 and bfloat16 panels of the same values give the same bits.
#pragma once
#include "linears/ahead.h"
#include "linears/coded.h"
#include "linears/f8.h"
#include "linears/nibbles.h"
#include "linears/row_pointers.h"
#include "team/team.h"
#include "linears/tiles.h"

constexpr int MAX_ROWS = W == 16 ? 12 : 4;  // of a microkernel: what the register file holds

// Two features' columns from a panel of `width` columns, F32 or BF16 or (for the KV cache) octets [k][width].
struct Pair {
    F even, odd;
};
template <int FORMAT>
PG_INLINE Pair load_pair(const uint8_t *base, int64_t k, int64_t width, int64_t column) {
    if constexpr (FORMAT == PG_F32) {
        const float *p = (const float *)base + k * width + column;
        return {load<F>(p), load<F>(p + width)};
    } else if constexpr (FORMAT == PG_BF16) {
        const U both = load<U>((const uint32_t *)base + k / 2 * width + column);
        return {(F)(both << 16), (F)(both & 0xffff0000u)};
    } else if constexpr (is_f8(FORMAT)) {
        const uint8_t *p = base + k * width + column;
        return {from_f8<FORMAT>(p), from_f8<FORMAT>(p + width)};
    } else {
        const int8_t *p = (const int8_t *)base + k * width + column;
        return {__builtin_convertvector(load<I8>(p), F), __builtin_convertvector(load<I8>(p + width), F)};
    }
}

// Memory asked for while a microkernel works on what came before: every round two lines `gap` apart, into the second-level
// cache, or the `nearest` one.
struct Fetch {
    const char *at;
    int64_t gap, advance;
    bool nearest = false;

    template <int ROWS>
    PG_INLINE void next() {
        if (ROWS > FEW && nearest) {
            _mm_prefetch(at, _MM_HINT_T0);
            _mm_prefetch(at + gap, _MM_HINT_T0);
        } else {
            _mm_prefetch(at, _MM_HINT_T1);
            _mm_prefetch(at + gap, _MM_HINT_T1);
        }
        at += advance;
    }
    static constexpr int FEW = 4;
};

// acc[i][c] += sum over k of x[i][k] * column(c)[k], for k even.  `column(c)` gives base pointers.
template <int FORMAT, int MR, int NC, class Column, class Next>
PG_INLINE void accumulate(F (&acc)[MR][NC], const float *x, int64_t ldx, int64_t k, int64_t width, Column &&column,
                          Next &&next) {
    RowPointers<MR> rows(x, ldx * 4);
    for (int64_t j = 0; j < k; j += 2, rows.advance(8)) {
        next();
        Pair w[NC];
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) w[c] = load_pair<FORMAT>(column(c), j, width, 0);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const F even = splat(rows.template get<float>(i)), odd = splat(rows.template get<float>(i, 4));
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) acc[i][c] = fma(odd, w[c].odd, fma(even, w[c].even, acc[i][c]));
        }
    }
}

// Rows as the microkernels of a format read them: float32, bfloat16 pairs, unsigned bytes (value + 128), or bytes in
// groups (nibbles.h).
struct Rows {
    const void *data;
    int64_t stride;       // elements; bytes of groups
    const float *scales;  // of the bytes, by row
    int64_t tiled = 0;    // how many rows there are in groups for tiles, see RowLayout; 0: one behind the other
};

// bf16 dot products: the processor's own where it has them.
#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOT = true;
PG_INLINE F dot(F acc, U x, U w) { return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w); }
#elif defined(PG_EMULATE_BF16)
constexpr bool HAS_BF16_DOT = true;
PG_INLINE F dot(F acc, U x, U w) {
    acc = fma((F)(x & 0xffff0000u), (F)(w & 0xffff0000u), acc);
    return fma((F)(x << 16), (F)(w << 16), acc);
}
#else
constexpr bool HAS_BF16_DOT = false;
PG_INLINE F dot(F acc, U, U) { return acc; }
#endif

// Four products of unsigned and signed bytes per lane.
#if defined(__AVX512VNNI__)
PG_INLINE I dot(I acc, U x, U w) { return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, (__m512i)w); }
#else
PG_INLINE I dot(I acc, U x, U w) {
    for (int shift = 0; shift < 32; shift += 8) acc += (I)((x >> shift) & 0xffu) * ((I)(w << (24 - shift)) >> 24);
    return acc;
}
#endif

// acc[i][c] += products of `num` words of each row, `stride` bytes from one row to the next, and of each column: pairs of
// bfloat16, or four bytes.  From a column's vector to its next one are `width` bytes.
template <class Sum, int MR, int NC, class Next>
PG_INLINE void accumulate_dots(Sum (&acc)[MR][NC], const void *x, int64_t stride, int64_t num,
                               const uint8_t *const (&columns)[NC], int64_t width, Next &&next) {
    RowPointers<MR> rows(x, stride);
    for (int64_t j = 0; j < num; j++, rows.advance(4)) {
        next();
        U words[NC];
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) words[c] = load<U>(columns[c] + j * width);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const U given = splat_u(rows.template get<uint32_t>(i));
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) acc[i][c] = dot(acc[i][c], given, words[c]);
        }
    }
}

enum Kernel { FLOAT_F32, FLOAT_BF16, DOT_BF16, DOT_I8, DOT_I4 };

inline Kernel kernel_of(const PgLinear &w, bool round) {
    if (w.format == PG_I8) return DOT_I8;
    if (is_nibbles(w.format)) return DOT_I4;
    if ((is_coded(w.format) ? w.coding.decoded : w.format) == PG_F32) return FLOAT_F32;
    return HAS_BF16_DOT && round ? DOT_BF16 : FLOAT_BF16;
}

// Whether tiles multiply: where sums depend on that, all rows of a weight or none.
inline bool by_tiles(Kernel kernel, const PgLinear &w, int64_t rows) {
    constexpr int64_t FEW = 4;  // rows of bytes that vectors multiply as fast
    if (!HAS_TILES || !tiles_allowed()) return false;
    if (kernel == DOT_I8) return w.k % TILE_BYTES == 0 && rows > FEW;
    return kernel == DOT_BF16 && w.k % (TILE_BYTES / 2) == 0;
}

// How converted rows lie: one behind the other, an odd number of cache lines apart, none of which belongs to two rows; or
// for tiles in groups of TILE_ROWS, in each the first 64 bytes of all rows, then the next ones, so that tiles read one
// long stretch.
struct RowLayout {
    int64_t bytes, count;  // of a row; rows
    bool tiled;

    static int64_t stride(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }
    int64_t at(int64_t row) const { return tiled ? (row - row % TILE_ROWS) * bytes + row % TILE_ROWS * 64 : row * stride(bytes); }
    int64_t gap(int64_t row) const {  // from 64 bytes of a row to its next ones
        const int64_t rest = count - (row - row % TILE_ROWS);
        return !tiled ? 64 : rest < TILE_ROWS ? rest * 64 : TILE_ROWS * 64;
    }
    // Where a row's features of bfloat16 from `feature` on are, up to the next multiple of 32.
    uint16_t *pair(uint16_t *data, int64_t row, int64_t feature) const {
        return data + (at(row) + feature / 32 * gap(row)) / 2 + feature % 32;
    }
    Rows rows(Kernel kernel, const void *data, const float *scales) const {
        const int64_t width = kernel == DOT_I8 || kernel == DOT_I4 ? 1 : kernel == DOT_BF16 ? 2 : 4;
        return {data, stride(bytes) / width, scales, tiled ? count : 0};
    }
};
inline RowLayout layout_of(Kernel kernel, const PgLinear &w, int64_t rows) {
    const int64_t bytes = kernel == DOT_I4 ? w.k + nibbles_of(w).groups() * ROW_HEAD
                                           : w.k * (kernel == DOT_I8 ? 1 : kernel == DOT_BF16 ? 2 : 4);
    return {bytes, rows, by_tiles(kernel, w, rows)};
}

// Few rows leave registers for more columns at a time, which hides the latency of their chains and of memory.
constexpr int wide_columns(int rows) { return rows == 1 ? 8 : W == 16 && rows <= 4 ? 4 : 2; }
constexpr int MAX_TILE = W == 16 ? MAX_ROWS * NR : MAX_ROWS * NR * 2;  // results of one tile at most

// As many panels as a tile of `rows` rows takes, at most end - panel, into results [panels][rows][NR]; returns how many.
using TileFunction = int (*)(const Rows &x, int64_t row, const PgLinear &w, int64_t panel, int64_t end,
                             const Fetch &fetch, float *results);
TileFunction tile_function(Kernel kernel, int64_t rows);  // 1 ... MAX_ROWS

// Integer sums into floats: the scales of column and row, and the 128 that the rows' bytes were shifted by.
PG_INLINE F rescale(const PgLinear &w, int64_t column, F sum, float row_scale) {
    const int64_t columns = (w.n + NR - 1) / NR * NR;
    const float *scales = (const float *)((const int8_t *)w.packed + columns * w.k);
    const I shift = load<I>((const int32_t *)(scales + columns) + column);
    return __builtin_convertvector((I)sum - shift, F) * load<F>(scales + column) * row_scale;
}

// What to fetch during tile i of a panel.  One tile alone reads each panel once: it fetches a little ahead of itself.
// Of several, the first two fetch half of the next panel each.  What they and the others have left goes to `beside`.
PG_INLINE Fetch ahead(Kernel kernel, const PgLinear &w, int64_t panel, int64_t i, int64_t tiles, Beside &beside) {
    constexpr int64_t DISTANCE = 2048;
    const int64_t bytes = NR * w.k * (kernel == DOT_I8 ? 1 : kernel == FLOAT_F32 ? 4 : 2);
    const char *base = (const char *)w.packed + panel * bytes;
    const int64_t per_round = NR * (kernel == FLOAT_F32 ? 8 : 4);
    if (tiles == 1) return {base + DISTANCE, per_round / 2, per_round, true};
    const auto gap_to = [&](const char *at, int64_t count) {
        const char *other = beside.take(count);
        return other ? other - at : 0;
    };
    if (i < 2) {
        const char *at = base + bytes + i * bytes / 2;
        return {at, per_round > 128 ? 64 : gap_to(at, bytes / 2), per_round / 2};
    }
    const int64_t lines = bytes / per_round * 64;  // one in each round
    const char *at = beside.take(lines);
    if (!at) return {base, 0, 0};
    return {at, gap_to(at, lines), 64};
}

constexpr int64_t TILED_ROWS = 512;  // whose sums wait together

// Blocks of more than MOST_NIBBLE_ROWS are those of experts, whose rows are cut for the linear behind this one.
template <class Out>
PG_INLINE void block_of_nibbles(const Rows &x, int64_t first, int64_t last, const PgLinear &w, int64_t begin,
                                int64_t end, Out &&out) {
    alignas(64) float results[NIBBLE_RESULTS];
    const Nibbles nibbles = nibbles_of(w);
    for (int64_t panel = begin, taken = 1; panel < end; panel += taken)
        for (int64_t row = first; row < last; row += MOST_NIBBLE_ROWS) {
            const int64_t rows = last - row < MOST_NIBBLE_ROWS ? last - row : MOST_NIBBLE_ROWS;
            const int64_t most = last - first > MOST_NIBBLE_ROWS ? panel + 1 : end;
            taken = multiply_nibbles((const uint8_t *)x.data, x.stride, row, row + rows, nibbles, panel, most, results);
            for (int64_t p = 0; p < taken; p++)
                for (int64_t r = 0; r < rows; r++) {
                    const float *at = results + (p * rows + r) * NR;
                    out(row + r, (panel + p) * NR, load<F>(at), load<F>(at + W));
                }
        }
}

// What is far from the processor is asked for before it is needed: where results go, if that is known, and what is read
// behind some linear.
struct Target {
    const float *rows = nullptr;
    int64_t stride = 0;
    const Ahead *ahead = nullptr;
    int64_t linear = 0;  // its place in ahead's shares

    PG_INLINE void fetch(int64_t row, int64_t column) const {
        const char *at = (const char *)(rows + row * stride + column);
        _mm_prefetch(at, _MM_HINT_T1);
        _mm_prefetch(at + 64, _MM_HINT_T1);
    }
};

// One panel's sums of rows [row, end), [rows][NR], to out.
template <class Out>
PG_INLINE void hand_out(Kernel kernel, const Rows &x, int64_t row, int64_t end, const PgLinear &w, int64_t panel,
                        const float *sums, Out &&out) {
    const int64_t column = panel * NR;
    for (; row < end; row++, sums += NR) {
        F low = load<F>(sums), high = load<F>(sums + W);
        if (kernel == DOT_I8) {
            low = rescale(w, column, low, x.scales[row]);
            high = rescale(w, column + W, high, x.scales[row]);
        }
        out(row, column, low, high);
    }
}

// One group of rows alone reads each panel once, and fetches a little ahead of itself.
template <class Out>
PG_INLINE void rows_by_tiles(Kernel kernel, const Rows &x, int64_t first, int64_t last, const PgLinear &w,
                             int64_t begin, int64_t end, Out &&out) {
    constexpr int64_t DISTANCE = 8192;
    alignas(64) float results[TILE_ROWS * NR];
    const bool bytes = kernel == DOT_I8;
    const int64_t row_bytes = w.k * (bytes ? 1 : 2), panel_bytes = NR * row_bytes;
    const char *rows = (const char *)x.data + first * row_bytes;
    for (int64_t panel = begin; panel < end; panel++) {
        const char *columns = (const char *)w.packed + panel * panel_bytes;
        const Tiles t{bytes, false, false, rows, last - first, columns, columns + DISTANCE, NR, row_bytes / TILE_BYTES};
        multiply_tiles(t, results);
        hand_out(kernel, x, first, last, w, panel, results, out);
    }
}

// Of more groups, each fetches a part of the next panel.  Where features are many they are taken in parts, of which a
// panel's stays in the nearest cache for all rows; sums wait meanwhile, and go on where they were.  Complete ones are
// handed out a few rows at a time, beside the next group's products.  `first` begins a group of rows.
template <class Out>
PG_INLINE void block_by_tiles(Kernel kernel, const Rows &x, int64_t first, int64_t last, const PgLinear &w,
                              int64_t begin, int64_t end, const Target &target, Out &&out) {
    constexpr int64_t PART = 18;  // steps
    alignas(64) static thread_local float results[TILED_ROWS * NR];
    const bool bytes = kernel == DOT_I8;
    const int64_t row_bytes = w.k * (bytes ? 1 : 2), panel_bytes = NR * row_bytes, steps = row_bytes / TILE_BYTES;
    const int64_t groups = (last - first + TILE_ROWS - 1) / TILE_ROWS, parts = (steps + PART - 1) / PART;
    const int64_t lines = (NR + groups - 1) / groups;                     // of the next panel, with each step
    const int64_t waiting_rows = parts > 1 ? TILED_ROWS : 2 * TILE_ROWS;  // complete sums wait for one group
    if (groups == 1) return rows_by_tiles(kernel, x, first, last, w, begin, end, out);
    struct {
        const float *sums;
        int64_t row, end, panel;
    } complete{nullptr, 0, 0, 0};
    const auto hand_out_some = [&](int64_t most) __attribute__((always_inline)) {
        const int64_t row = complete.row, rest = complete.end - row, rows = rest < most ? rest : most;
        complete.row += rows;
        hand_out(kernel, x, row, row + rows, w, complete.panel, complete.sums, out);
        complete.sums += rows * NR;
    };
    const auto hand_out_rest = [&]() __attribute__((noinline)) { hand_out_some(TILE_ROWS); };
    for (int64_t panel = begin; panel < end; panel++) {
        const char *columns = (const char *)w.packed + panel * panel_bytes;
        for (int64_t top = first; top < last; top += TILED_ROWS)
            for (int64_t part = 0; part < parts; part++) {
                const int64_t step = steps * part / parts, next = steps * (part + 1) / parts;
                const int64_t at_once = (TILE_ROWS + next - step - 1) / (next - step);
                const int64_t bottom = last < top + TILED_ROWS ? last : top + TILED_ROWS;
                for (int64_t row = top; row < bottom; row += TILE_ROWS) {
                    const int64_t rows = x.tiled - row < TILE_ROWS ? x.tiled - row : TILE_ROWS;
                    const char *at = columns + step * NR * TILE_BYTES;
                    const char *given = (const char *)x.data + row * row_bytes + step * rows * TILE_BYTES;
                    const char *ahead = at + panel_bytes + (row - first) / TILE_ROWS * (next - step) * lines * 64;
                    const bool fetches = part + 1 == parts && target.rows;
                    const Tiles t{bytes, part > 0, true, given, rows, at, ahead, lines, next - step};
                    float *sums = results + (row - top) % waiting_rows * NR;
                    if (!bytes && rows == TILE_ROWS) {
                        multiply_tiles(t, sums, [&](int64_t i) __attribute__((always_inline)) {
                            for (int64_t r = i * at_once; fetches && r < (i + 1) * at_once && r < rows; r++)
                                target.fetch(row + r, panel * NR);
                            hand_out_some(at_once);
                        });
                    } else {
                        hand_out_rest();  // first: the next panel's sums may take the same place
                        multiply_tiles(t, sums);
                    }
                    if (part + 1 == parts) complete = {sums, row, row + rows, panel};
                }
            }
    }
    hand_out_rest();
}

// As coded.h says, of at most CODED_ROWS rows.
int multiply_coded(Kernel kernel, const Rows &x, int64_t first, int64_t rows, const PgLinear &w, int64_t panel,
                   int64_t end, float *results);

template <class Out>
PG_INLINE void block_of_codes(Kernel kernel, const Rows &x, int64_t first, int64_t last, const PgLinear &w,
                              int64_t begin, int64_t end, Out &&out) {
    alignas(64) static thread_local float results[CODED_RESULTS];
    for (int64_t panel = begin, taken = 1; panel < end; panel += taken)
        for (int64_t row = first; row < last; row += CODED_ROWS) {
            const int64_t rows = last - row < CODED_ROWS ? last - row : CODED_ROWS;
            const int64_t most = last - first > CODED_ROWS ? panel + 1 : end;
            taken = multiply_coded(kernel, x, row, rows, w, panel, most, results);
            for (int64_t p = 0; p < taken; p++)
                hand_out(kernel, x, row, row + rows, w, panel + p, results + p * rows * NR, out);
        }
}

// Rows [first, last) times panels [begin, end): panels outside, so that each stays in the nearest cache.
template <class Out>
PG_INLINE void block(Kernel kernel, const Rows &x, int64_t first, int64_t last, const PgLinear &w, int64_t begin,
                     int64_t end, Out &&out, const Target &target = {}, Beside beside = {}) {
    if (kernel == DOT_I4) return block_of_nibbles(x, first, last, w, begin, end, out);
    if (is_coded(w.format)) return block_of_codes(kernel, x, first, last, w, begin, end, out);
    if (x.tiled) return block_by_tiles(kernel, x, first, last, w, begin, end, target, out);
    alignas(64) float results[MAX_TILE];
    const int64_t tiles = (last - first + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t panel = begin, taken = 1; panel < end; panel += taken)
        for (int64_t i = 0, row = first; i < tiles; i++) {
            const int64_t next = first + (last - first) * (i + 1) / tiles, rows = next - row;
            const TileFunction function = tile_function(kernel, rows);
            for (int64_t r = row; target.rows && tiles > 1 && r < next; r++) target.fetch(r, panel * NR);
            taken = function(x, row, w, panel, tiles == 1 ? end : panel + 1, ahead(kernel, w, panel, i, tiles, beside), results);
            for (int64_t p = 0; p < taken; p++)
                hand_out(kernel, x, row, row + rows, w, panel + p, results + p * rows * NR, out);
            row = next;
        }
}

// How many blocks m rows of k features are cut into, each of as many as stay in the second-level cache.
inline int64_t row_blocks(int64_t m, int64_t k) {
    constexpr int64_t CACHED = 400 << 10;  // bytes
    int64_t rows = CACHED / (4 * k) / MAX_ROWS * MAX_ROWS;
    rows = rows < 2 * MAX_ROWS ? 2 * MAX_ROWS : rows > 192 ? 192 : rows;  // at most MOST_NIBBLE_ROWS in a block
    return m <= rows + rows / 2 ? 1 : (m + rows - 1) / rows;
}

// The same for tiles, which want more work for each panel that comes from memory.
inline int64_t tiled_blocks(int64_t m, int64_t k) {
    constexpr int64_t CACHED = 768 << 10;  // bytes
    int64_t rows = CACHED / (2 * k) / TILE_ROWS * TILE_ROWS;
    rows = rows < 2 * TILE_ROWS ? 2 * TILE_ROWS : rows;
    return m <= rows + rows / 2 ? 1 : (m + rows - 1) / rows;
}

// Panels of one ticket, of so many in all: small enough that members end together.
inline int64_t panels_at_once(int64_t panels, int members) {
    const int64_t piece = panels / (members * 8);
    return piece < 1 ? 1 : piece > 32 ? 32 : piece;
}

// The members' share of y = x W^T for m rows; no barrier after it.
template <class Out>
void multiply(Member &member, Kernel kernel, const Rows &x, int64_t m, const PgLinear &w, Out &&out,
              const Target &target = {}) {
    Clock::enter(PG_LINEARS);
    const int64_t panels = (w.n + NR - 1) / NR, blocks = x.tiled ? tiled_blocks(m, w.k) : row_blocks(m, w.k);
    const int64_t piece = panels_at_once(panels, member.count), pieces = (panels + piece - 1) / piece;
    const auto cut = [&](int64_t b) {
        const int64_t row = m * b / blocks;
        return x.tiled && b < blocks ? row - row % TILE_ROWS : row;
    };
    member.for_each(blocks * pieces, 1, [&](int64_t item, int64_t) {
        const int64_t b = item / pieces, begin = item % pieces * piece;
        const int64_t end = begin + piece < panels ? begin + piece : panels;
        const Beside beside = target.ahead ? target.ahead->share_of(target.linear, item, blocks * pieces) : Beside();
        block(kernel, x, cut(b), cut(b + 1), w, begin, end, out, target, beside);
    });
    release_tiles();
}
