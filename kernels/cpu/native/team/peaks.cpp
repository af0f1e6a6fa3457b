// What this processor can do at most: loops of one instruction on registers, and a stretch of memory that is read.
#include "linears/gemm.h"
#include "team/profile.h"

namespace {

constexpr int CHAINS = 12;  // as many as hide an instruction's latency

// `step` on CHAINS sums, `rounds` times.
template <class V, class Step>
PG_INLINE void chains(int64_t rounds, V start, Step &&step) {
    V sums[CHAINS];
    for (V &sum : sums) sum = start;
    for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 12
        for (V &sum : sums) {
            sum = step(sum);
            asm volatile("" : "+v"(sum));
        }
}

int64_t operations(int32_t kind, int64_t rounds) {
    const F one = splat(1.0f);
    const U bytes = splat_u(0x01010101u), pairs = splat_u(0x3f803f80u);
    if (kind == PG_PEAK_F32) chains(rounds, one, [&](F sum) { return fma(one, one, sum); });
    if (kind == PG_PEAK_BF16 && HAS_BF16_DOT) chains(rounds, one, [&](F sum) { return dot(sum, pairs, pairs); });
    if (kind == PG_PEAK_I8) chains(rounds, I{}, [&](I sum) { return dot(sum, bytes, bytes); });
    const int64_t products = kind == PG_PEAK_F32 ? 1 : kind == PG_PEAK_BF16 ? (HAS_BF16_DOT ? 2 : 0) : 4;
    return rounds * CHAINS * W * products * 2;
}

}  // namespace

extern "C" int64_t pg_peak(int32_t kind, int64_t rounds) {
    const bool tiles = kind == PG_PEAK_TILES_BF16 || kind == PG_PEAK_TILES_I8;
    if (tiles && !(HAS_TILES && tiles_allowed())) return 0;
    std::atomic<int64_t> total{0};
    parallel([&](Member &) { total += tiles ? spin_tiles(kind == PG_PEAK_TILES_I8, rounds) : operations(kind, rounds); });
    return total;
}

// Each piece as four stretches side by side, of which more lines are on their way than of one.
extern "C" int64_t pg_read(const void *memory, int64_t bytes) {
    constexpr int64_t PIECE = 1 << 18, STRETCH = PIECE / 4, AHEAD = 1024;
    std::atomic<int64_t> sum{0};
    parallel([&](Member &member) {
        I found[4] = {};
        member.for_each(bytes / PIECE, 1, [&](int64_t at, int64_t) {
            const char *p = (const char *)memory + at * PIECE;
            for (int64_t i = 0; i < STRETCH; i += sizeof(I))
#pragma GCC unroll 4
                for (int64_t j = 0; j < 4; j++) {
                    if (i % 64 == 0) _mm_prefetch(p + j * STRETCH + i + AHEAD, _MM_HINT_T1);
                    found[j] += load<I>(p + j * STRETCH + i);
                }
        });
        sum += ((found[0] + found[1]) + (found[2] + found[3]))[0];
    });
    return sum;
}
