// The sums of a digest (kernels/ops/digest.py says what is summed), for functions that read rows anyway.
//
// The sum of a piece does not depend on the order of its words, so a caller takes them as it has them: along a row just
// before it reads it, or turned, with a row in each lane.
#pragma once
#include "pageant.h"
#include "simd.h"

// splitmix64, of Steele, Lea and Flood: "Fast Splittable Pseudorandom Number Generators"
constexpr uint64_t splitmix(uint64_t index) {
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// What each word of a piece is multiplied with, for either of its sums.
struct DigestKeys {
    static constexpr int64_t WORDS = 2048;
    alignas(64) uint16_t keys[2][WORDS] = {};

    constexpr DigestKeys() {
        for (int64_t i = 0; i < 2 * WORDS; i++) keys[i / WORDS][i % WORDS] = splitmix(i) >> 48 | 1;
    }
};
inline constexpr DigestKeys DIGEST_KEYS;

// Either sum of one piece, in parts that lanes hold: those of even and of odd vectors, so that two are added at a time.
struct PieceSums {
    I lanes[2][2] = {};

    PG_INLINE void take(int set, int parity, I words, I keys) {
        I &sum = lanes[set][parity];
#if defined(__AVX512VNNI__)
        sum = (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)words, (__m512i)keys);
#elif defined(__AVX512F__)
        sum += (I)_mm512_madd_epi16((__m512i)words, (__m512i)keys);
#else
        sum += (I)_mm256_madd_epi16((__m256i)words, (__m256i)keys);
#endif
    }
    // N vectors of words that follow each other from word `at` of a piece.
    template <int N>
    PG_INLINE void take_row(const uint8_t *words, int64_t at) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++)
            for (int set = 0; set < 2; set++)
                take(set, i % 2, load<I>(words + 4 * W * i), load<I>(DIGEST_KEYS.keys[set] + at + 2 * W * i));
    }
    // Lane r of block[c] holds the words of a piece of row r at `at` + 2c and the next.
    PG_INLINE void take_pairs(const U *block, int64_t at) {
#pragma GCC unroll 16
        for (int c = 0; c < W; c++)
            for (int set = 0; set < 2; set++) {
                uint32_t keys;
                memcpy(&keys, DIGEST_KEYS.keys[set] + at + 2 * c, sizeof keys);
                take(set, c % 2, (I)block[c], (I)splat_u(keys));
            }
    }
    // Lane r of block[c] holds the word of a piece of row r at `at` + c, in its upper half.
    PG_INLINE void take_uppers(const U *block, int64_t at) {
#pragma GCC unroll 16
        for (int c = 0; c < W; c++)
            for (int set = 0; set < 2; set++)
                take(set, c % 2, (I)block[c], (I)splat_u((uint32_t)DIGEST_KEYS.keys[set][at + c] << 16));
    }
    I sums(int set) const { return lanes[set][0] + lanes[set][1]; }
    uint32_t whole(int set) const {
        uint32_t sum = 0;
        for (int lane = 0; lane < W; lane++) sum += sums(set)[lane];
        return sum;
    }
};

// Of the rows that one thread read; what the threads found is added up.
class RowSums {
  public:
    static constexpr int64_t PIECE = 2 * DigestKeys::WORDS, STRIPE = 256;  // bytes

    // Number of a row's piece at a byte.
    static int64_t number(int64_t row, int64_t bytes, int64_t at) {
        return row * ((bytes + PIECE - 1) / PIECE) + at / PIECE;
    }

    PG_INLINE void add(int64_t number, uint32_t first, uint32_t second) {
        const uint64_t factor = splitmix(number) | 1;
        words_[number % 4] += first * factor;
        words_[4 + number % 4] += second * factor;
    }

    // Calls body(begin, end) for stripes of the row's bytes.
    template <class Body>
    PG_INLINE void add(int64_t row, const void *bytes_of_row, int64_t bytes, Body &&body) {
        PieceSums piece;
        for (int64_t at = 0; at < bytes; at += STRIPE) {
            const int64_t end = at + STRIPE < bytes ? at + STRIPE : bytes;
            const uint8_t *stripe = (const uint8_t *)bytes_of_row + at;
            alignas(64) uint8_t padded[STRIPE];
            if (end - at < STRIPE) {
                memset(padded, 0, STRIPE);
                stripe = (const uint8_t *)memcpy(padded, stripe, end - at);
            }
            piece.take_row<STRIPE / (4 * W)>(stripe, at % PIECE / 2);
            body(at, end);
            if (end % PIECE && end < bytes) continue;
            add(number(row, bytes, at), piece.whole(0), piece.whole(1));
            piece = {};
        }
    }
    void add(int64_t row, const void *bytes_of_row, int64_t bytes) {
        add(row, bytes_of_row, bytes, [](int64_t, int64_t) {});
    }

    void add_to(uint64_t *sums) const {  // several threads at once
        for (int i = 0; i < PG_DIGEST_WORDS; i++) __atomic_fetch_add(sums + i, words_[i], __ATOMIC_RELAXED);
    }

  private:
    uint64_t words_[PG_DIGEST_WORDS] = {};
};
