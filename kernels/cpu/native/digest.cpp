// What tells one content of memory from another, at the speed of memory (kernels/ops/digest.py says what is summed).
#include "pageant.h"
#include "simd.h"
#include "team.h"

namespace {

constexpr int64_t WORDS = PG_DIGEST_CHUNK / 4, SHIFT = 4;  // 32-bit words of a chunk; how far apart the two keys lie

struct Keys {
    alignas(64) uint32_t words[WORDS + SHIFT];

    Keys() {
        for (int64_t i = 0; i < WORDS + SHIFT; i++) {
            uint64_t x = (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u;
            x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
            x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
            words[i] = (uint32_t)(x ^ (x >> 31));
        }
    }
};

using U64 = uint64_t __attribute__((vector_size(4 * W)));

#if defined(__AVX512F__)
PG_INLINE U64 times(U64 a, U64 b) { return (U64)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
#else
PG_INLINE U64 times(U64 a, U64 b) { return (U64)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
#endif

// The lower words of the lanes times the upper ones.
PG_INLINE U64 products(U words, const uint32_t *key) {
    const U64 sum = (U64)(words + load<U>(key));
    return times(sum, sum >> 32);
}

void digest_chunk(const uint8_t *data, const uint32_t *key, uint64_t *sums) {
    U64 first = {}, second = {};
    for (int64_t i = 0; i < WORDS; i += W) {
        const U words = load<U>(data + 4 * i);
        first += products(words, key + i);
        second += products(words, key + i + SHIFT);
    }
    sums[0] = sums[1] = 0;
    for (int lane = 0; lane < W / 2; lane++) sums[0] += first[lane], sums[1] += second[lane];
}

}  // namespace

extern "C" void pg_digest(const void *data, int64_t bytes, uint64_t *sums) {
    static const Keys keys;
    const int64_t chunks = (bytes + PG_DIGEST_CHUNK - 1) / PG_DIGEST_CHUNK;
    parallel([&](Member &member) {
        member.for_each(chunks, 4, [&](int64_t begin, int64_t end) {
            for (int64_t chunk = begin; chunk < end; chunk++) {
                const uint8_t *at = (const uint8_t *)data + chunk * PG_DIGEST_CHUNK;
                const int64_t left = bytes - chunk * PG_DIGEST_CHUNK;
                if (left >= PG_DIGEST_CHUNK) {
                    digest_chunk(at, keys.words, sums + 2 * chunk);
                    continue;
                }
                alignas(64) uint8_t padded[PG_DIGEST_CHUNK] = {};
                memcpy(padded, at, left);
                digest_chunk(padded, keys.words, sums + 2 * chunk);
            }
        });
        member.barrier();
    });
}
