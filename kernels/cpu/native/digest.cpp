// What tells one content of memory from another, at the speed of memory (kernels/ops/digest.py says what is summed).
#include "digest.h"

#include <algorithm>

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

const uint32_t *key_words() {
    static const Keys keys;
    return keys.words;
}

using U64 = uint64_t __attribute__((vector_size(4 * W)));

#if defined(__AVX512F__)
PG_INLINE U64 times(U64 a, U64 b) { return (U64)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
#else
PG_INLINE U64 times(U64 a, U64 b) { return (U64)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
#endif

// The lower words of the lanes times the upper ones.
PG_INLINE U64 products(U words, U key) {
    const U64 sum = (U64)(words + key);
    return times(sum, sum >> 32);
}

constexpr int64_t AHEAD = 2048;  // bytes that are fetched before they are summed; processors stop at the end of a page

template <int N>
void sum_chunks(const uint8_t *const *chunks, uint64_t *const *sums) {
    const uint32_t *key = key_words();
    U64 first[N] = {}, second[N] = {};
    for (int64_t i = 0; i < WORDS; i += W) {
        const U one = load<U>(key + i), other = load<U>(key + i + SHIFT);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            __builtin_prefetch(chunks[n] + 4 * i + AHEAD);
            const U words = load<U>(chunks[n] + 4 * i);
            first[n] += products(words, one);
            second[n] += products(words, other);
        }
    }
    for (int n = 0; n < N; n++) {
        sums[n][0] = sums[n][1] = 0;
        for (int lane = 0; lane < W / 2; lane++) sums[n][0] += first[n][lane], sums[n][1] += second[n][lane];
    }
}

}  // namespace

void ChunkSums::add(const void *data, int64_t bytes, int64_t begin, int64_t end, uint64_t *sums) {
    if (!sums) return;
    end = std::min(end, bytes);
    int64_t chunk = begin / PG_DIGEST_CHUNK;
    for (; (chunk + 1) * PG_DIGEST_CHUNK <= end; chunk++) {
        chunks_[count_] = (const uint8_t *)data + chunk * PG_DIGEST_CHUNK, sums_[count_] = sums + 2 * chunk;
        if (++count_ == AT_ONCE) flush();
    }
    const int64_t left = bytes - chunk * PG_DIGEST_CHUNK;
    if (begin < end && end == bytes && left) sum_last((const uint8_t *)data + bytes - left, left, sums + 2 * chunk);
}

void ChunkSums::sum_last(const uint8_t *data, int64_t bytes, uint64_t *sums) {
    alignas(64) uint8_t padded[PG_DIGEST_CHUNK];
    memcpy(padded, data, bytes);
    memset(padded + bytes, 0, PG_DIGEST_CHUNK - bytes);
    const uint8_t *chunk = padded;
    sum_chunks<1>(&chunk, &sums);
}

void ChunkSums::flush() {
    if (count_ == 4) sum_chunks<4>(chunks_, sums_);
    if (count_ == 3) sum_chunks<3>(chunks_, sums_);
    if (count_ == 2) sum_chunks<2>(chunks_, sums_);
    if (count_ == 1) sum_chunks<1>(chunks_, sums_);
    count_ = 0;
}

extern "C" void pg_digest(const void *data, int64_t bytes, uint64_t *sums) {
    if (bytes <= PG_DIGEST_CHUNK) return ChunkSums().add(data, bytes, 0, bytes, sums);  // takes less than to wake a team
    parallel([&](Member &member) {
        member.for_each(bytes, ChunkSums::AT_ONCE * PG_DIGEST_CHUNK,
                        [&](int64_t begin, int64_t end) { ChunkSums().add(data, bytes, begin, end, sums); });
    });
}
