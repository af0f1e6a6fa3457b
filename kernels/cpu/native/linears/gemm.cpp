// The microkernels, one for every format and number of rows.
#include "linears/gemm.h"

#include <type_traits>

namespace {

// One tile of MR rows and NC vectors of columns, NC / 2 panels, into results [NC / 2][MR][NR].
template <Kernel KERNEL, int MR, int NC>
PG_INLINE void tile(const Rows &x, int64_t row, const PgLinear &w, int64_t panel, Fetch fetch, float *results) {
    using Sum = std::conditional_t<KERNEL == DOT_I8, I, F>;
    const int64_t k = w.k;
    Sum acc[MR][NC] = {};
    if constexpr (KERNEL == FLOAT_F32 || KERNEL == FLOAT_BF16) {
        constexpr int FORMAT = KERNEL == FLOAT_F32 ? PG_F32 : PG_BF16;
        const int64_t next = NR * k * (KERNEL == FLOAT_F32 ? 4 : 2);
        const uint8_t *base = (const uint8_t *)w.packed + panel * next;
        accumulate<FORMAT>(acc, (const float *)x.data + row * x.stride, x.stride, k, NR,
                           [&](int c) { return base + c / 2 * next + c % 2 * W * 4; }, [&] { fetch.next<MR>(); });
    } else {
        constexpr int WIDTH = KERNEL == DOT_BF16 ? 2 : 1;  // bytes of a feature
        const int64_t next = NR * k * WIDTH, stride = x.stride * WIDTH;
        const uint8_t *base = (const uint8_t *)w.packed + panel * next, *columns[NC];
        for (int c = 0; c < NC; c++) columns[c] = base + c / 2 * next + c % 2 * W * 4;
        const char *rows = (const char *)x.data + row * stride;
        accumulate_dots(acc, rows, stride, k * WIDTH / 4, columns, NR * 4, [&] { fetch.next<MR>(); });
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) store(results + (c / 2 * MR + i) * NR + c % 2 * W, acc[i][c]);
}

// As many panels at a time as there are, up to NC / 2.
template <Kernel KERNEL, int MR, int NC>
PG_INLINE int widest_tile(const Rows &x, int64_t row, const PgLinear &w, int64_t panel, int64_t end, const Fetch &fetch,
                          float *results) {
    if constexpr (NC > 2)
        if (panel + NC / 2 > end) return widest_tile<KERNEL, MR, NC / 2>(x, row, w, panel, end, fetch, results);
    tile<KERNEL, MR, NC>(x, row, w, panel, fetch, results);
    return NC / 2;
}

template <Kernel KERNEL, int MR>
__attribute__((noinline)) int tile_of(const Rows &x, int64_t row, const PgLinear &w, int64_t panel, int64_t end,
                                      const Fetch &fetch, float *results) {
    // One row of dot products waits for memory, which one stream reads best where a vector is a cache line.
    constexpr bool WAITS = W == 16 && MR == 1 && (KERNEL == DOT_BF16 || KERNEL == DOT_I8);
    return widest_tile<KERNEL, MR, WAITS ? 2 : wide_columns(MR)>(x, row, w, panel, end, fetch, results);
}

template <Kernel KERNEL, int MR = MAX_ROWS>
TileFunction of_rows(int64_t rows) {
    if (rows == MR) return tile_of<KERNEL, MR>;
    if constexpr (MR > 1) return of_rows<KERNEL, MR - 1>(rows);
    return nullptr;
}

}  // namespace

TileFunction tile_function(Kernel kernel, int64_t rows) {
    switch (kernel) {
        case FLOAT_F32: return of_rows<FLOAT_F32>(rows);
        case FLOAT_BF16: return of_rows<FLOAT_BF16>(rows);
        case DOT_BF16: return of_rows<DOT_BF16>(rows);
        default: return of_rows<DOT_I8>(rows);
    }
}
