// A square of 32-bit words, turned in registers.
#pragma once
#include "simd.h"

// Turns W vectors by 90 degrees: blocks of 1, 2, 4 ... beside the diagonal change places.
PG_INLINE void transpose(U *rows) {
#pragma GCC unroll 4
    for (int size = 1; size < W; size *= 2) {
        const I at = lanes(), upper = (at & size) != 0;
        const I to_first = at + (upper & (W - size)), to_second = at + (upper & W) + (~upper & size);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & size) continue;
            const U first = rows[i], second = rows[i + size];
            rows[i] = __builtin_shuffle(first, second, to_first);
            rows[i + size] = __builtin_shuffle(first, second, to_second);
        }
    }
}
