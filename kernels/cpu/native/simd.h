// Vectors of W floats, and the few functions that the kernels need of them.
//
// Compiled with -ffp-contract=off: a multiplication and an addition are fused exactly where fma() is written, so that
// the same sum has the same bits wherever it is inlined.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define PG_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
constexpr int W = 16;  // floats per vector
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
#else
#error "these kernels need AVX-512 or AVX2 with FMA"
#endif
constexpr int NR = 2 * W;  // columns of a packed panel

using F = float __attribute__((vector_size(4 * W)));
using I = int32_t __attribute__((vector_size(4 * W)));
using U = uint32_t __attribute__((vector_size(4 * W)));
using U16 = uint16_t __attribute__((vector_size(2 * W)));
using I8 = int8_t __attribute__((vector_size(W)));

template <class V, class T>
PG_INLINE V load(const T *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class T>
PG_INLINE void store(T *p, V v) {
    memcpy(p, &v, sizeof v);
}

PG_INLINE F splat(float x) { return x - F{}; }
PG_INLINE U splat_u(uint32_t x) { return x - U{}; }

#if defined(__AVX512F__)
PG_INLINE F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
PG_INLINE F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif

PG_INLINE F select(I mask, F yes, F no) { return mask ? yes : no; }
PG_INLINE F max(F a, F b) { return a > b ? a : b; }
PG_INLINE F abs(F a) { return (F)((U)a & 0x7fffffffu); }

PG_INLINE I lanes() {  // 0, 1, 2 ...
    I v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

// Sums and maxima over the lanes, halves folded in a fixed order.
#if defined(__AVX512F__)
PG_INLINE __m256 fold(F v, bool add) {
    const __m256 low = _mm512_castps512_ps256((__m512)v), high = _mm512_extractf32x8_ps((__m512)v, 1);
    return add ? _mm256_add_ps(low, high) : _mm256_max_ps(low, high);
}
#else
PG_INLINE __m256 fold(F v, bool) { return (__m256)v; }
#endif
PG_INLINE float reduce_add(F v) {
    const __m256 a = fold(v, true);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
PG_INLINE float reduce_max(F v) {
    const __m256 a = fold(v, false);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

// bfloat16 is the upper half of a float32; rounded to nearest, ties to even.
PG_INLINE U bf16_bits(F v) {
    U u = (U)v;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
PG_INLINE F round_bf16(F v) { return (F)(bf16_bits(v) << 16); }
PG_INLINE U16 to_bf16(F v) { return __builtin_convertvector(bf16_bits(v), U16); }
PG_INLINE uint16_t to_bf16(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
PG_INLINE float from_bf16(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
PG_INLINE F from_bf16(const uint16_t *p) { return (F)(__builtin_convertvector(load<U16>(p), U) << 16); }

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to an integer, ties to even
PG_INLINE F round_even(F v) { return (v + MAGIC) - MAGIC; }  // |v| < 2**22

// exp(x), relative error about 1e-7 (Cephes' polynomial), for x up to 88; zero below -87.
PG_INLINE F exp(F x) {
    const F low = splat(-87.0f), shifted = fma(max(x, low), splat(1.44269504f), splat(MAGIC));
    const F n = shifted - MAGIC;
    F r = fma(n, splat(-0.693359375f), max(x, low));
    r = fma(n, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(r * r, p, r + 1.0f);
    const I scaled = (I)p + ((I)shifted << 23);  // n sits in the lowest bits, and moves the exponent by itself
    return (F)(scaled & (x > low));
}

// 2 to the power of x, relative error 1e-4: a twentieth of what rounding to bfloat16 adds, for what is rounded to it.
// And 1 / x for the same, error 1e-4.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
PG_INLINE F short_exp2(F x) {
    const F rest = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    F p = fma(splat(0.07802428f), rest, splat(0.22606727f));
    p = fma(p, rest, splat(0.69583363f));
    p = fma(p, rest, splat(0.99992519f));
    return (F)_mm512_scalef_ps((__m512)p, (__m512)x);
}
PG_INLINE F short_reciprocal(F x) { return (F)_mm512_rcp14_ps((__m512)x); }
#else
PG_INLINE F short_exp2(F x) { return exp(x * 0.69314718f); }
PG_INLINE F short_reciprocal(F x) { return 1.0f / x; }
#endif
constexpr float LOG2_E = 1.44269504f;

// Stores W values as bfloat16, or twice as many; numbers too small for a normal one may become zeros.
#if defined(__AVX512BF16__)
PG_INLINE void store_bf16(uint16_t *p, F v) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &rounded, sizeof rounded);
}
PG_INLINE void store_bf16(uint16_t *p, F low, F high) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    memcpy(p, &rounded, sizeof rounded);
}
#else
PG_INLINE void store_bf16(uint16_t *p, F v) { store(p, to_bf16(v)); }
PG_INLINE void store_bf16(uint16_t *p, F low, F high) { store(p, to_bf16(low)), store(p + W, to_bf16(high)); }
#endif

// What a sigmoid divides by; capped, since exp's bits make no sense above 88.
PG_INLINE F one_plus_exp(F x) { return exp(select(x > 88.0f, splat(88.0f), x)) + 1.0f; }

// tanh(x), relative error about 2e-7 (Cephes' polynomial near zero); of what is no number, the same.
PG_INLINE F tanh(F x) {
    const F size = abs(x), square = x * x;
    F p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    const F near = fma(p * square, x, x), far = 1.0f - 2.0f / one_plus_exp(size * 2.0f);
    return select(size >= 0.625f, (F)((U)far | ((U)x & 0x80000000u)), near);
}

PG_INLINE F softcap(F x, float limit) { return tanh(x / limit) * limit; }

// log(x) for normal x > 0, absolute error about 1e-6.
PG_INLINE F log(F x) {
    U bits = (U)x;
    F e = __builtin_convertvector((I)(bits >> 23) - 126, F);
    F m = (F)((bits & 0x007fffffu) | 0x3f000000u);  // [0.5, 1)
    I small = m < splat(0.70710678f);
    e = e - select(small, splat(1.0f), splat(0.0f));
    m = m + select(small, m, splat(0.0f)) - 1.0f;
    F p = splat(7.0376836292e-2f);
    p = fma(p, m, splat(-1.1514610310e-1f));
    p = fma(p, m, splat(1.1676998740e-1f));
    p = fma(p, m, splat(-1.2420140846e-1f));
    p = fma(p, m, splat(1.4249322787e-1f));
    p = fma(p, m, splat(-1.6668057665e-1f));
    p = fma(p, m, splat(2.0000714765e-1f));
    p = fma(p, m, splat(-2.4999993993e-1f));
    p = fma(p, m, splat(3.3333331174e-1f));
    F m2 = m * m;
    F y = fma(m * m2, p, m2 * -0.5f) + m;
    return fma(e, splat(0.69314718f), y);
}
