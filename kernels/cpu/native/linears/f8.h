// Floats of eight bits, E4M3 and E5M2 (kernels/ops/linears/quantise.py), of the KV pool.
//
// Both widen by float16: E5M2 is its upper byte, and E4M3 has its bits at other places, and then a 256th of its value.
#pragma once
#include "pageant.h"
#include "simd.h"

using U8 = uint8_t __attribute__((vector_size(W)));

constexpr bool is_f8(int32_t format) { return format == PG_E4M3 || format == PG_E5M2; }
constexpr float f8_unit(int32_t format) { return format == PG_E4M3 ? 256.0f : 1.0f; }  // of what from_f8 gives

template <int FORMAT>
PG_INLINE F from_f8(const uint8_t *p) {
    const U16 octets = __builtin_convertvector(load<U8>(p), U16);
    const U16 halves = FORMAT == PG_E5M2 ? octets << 8 : (octets & 0x80) << 8 | (octets & 0x7f) << 7;
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps((__m256i)halves);
#else
    return (F)_mm256_cvtph_ps((__m128i)halves);
#endif
}

// x / scale to the nearest, ties to even, and never beyond the largest: n a multiple of W.
inline void to_f8(int32_t format, const float *x, float scale, int64_t n, uint8_t *out) {
    const bool wide = format == PG_E4M3;
    const int mantissa = wide ? 3 : 2, bias = wide ? 7 : 15;
    const F most = splat(wide ? 448.0f : 57344.0f), steps = splat(wide ? 0x1p9f : 0x1p16f);
    const F normal = splat(wide ? 0x1p-6f : 0x1p-14f);
    const uint32_t dropped = 23 - mantissa, below = (1u << (dropped - 1)) - 1;
    for (int64_t i = 0; i < n; i += W, out += W) {
        const F v = load<F>(x + i) / scale;
        const F size = select(abs(v) > most, most, abs(v));
        const U bits = (U)size, rounded = (bits + below + ((bits >> dropped) & 1u)) >> dropped;
        const I large = (I)(rounded - ((127u - bias) << mantissa));
        const I small = __builtin_convertvector(round_even(select(size < normal, size, F{}) * steps), I);
        const I code = size < normal ? small : large;
        store(out, __builtin_convertvector((U)code | ((U)v >> 31 << 7), U8));
    }
}
