// The sums of a digest (kernels/ops/digest.py says what is summed), for functions that read rows anyway.
//
// The sum of a piece does not depend on the order of its words, so a caller takes them as it has them: along some rows
// just before it reads them, or turned, with a row in each lane.
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

// What each word of a piece is multiplied with: odd, and no two the same.
struct DigestKeys {
    static constexpr int64_t WORDS = 2048;
    alignas(64) uint16_t keys[WORDS] = {};

    constexpr DigestKeys() {
        for (uint32_t i = 0; i < WORDS; i++) {
            uint32_t x = (i * 23167 + 9377) % (1 << 15);
            x = (x ^ x >> 7) * 19391 % (1 << 15);
            keys[i] = 2 * (x ^ x >> 8) + 1;
        }
    }
};
inline constexpr DigestKeys DIGEST_KEYS;

PG_INLINE I add_products(I sum, I words, I keys) {
#if defined(__AVX512VNNI__)
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)words, (__m512i)keys);
#elif defined(__AVX512F__)
    return sum + (I)_mm512_madd_epi16((__m512i)words, (__m512i)keys);
#else
    return sum + (I)_mm256_madd_epi16((__m256i)words, (__m256i)keys);
#endif
}

// The sums of one piece of each of W rows, which lie turned, a row in each lane: those of even and of odd vectors, so
// that two are added at a time.
struct PieceSums {
    I lanes[2] = {};

    // Lane r of block[c] holds the words of a piece of row r at `at` + 2c and the next.
    PG_INLINE void take_pairs(const U *block, int64_t at) {
#pragma GCC unroll 16
        for (int c = 0; c < W; c++) {
            uint32_t keys;
            memcpy(&keys, DIGEST_KEYS.keys + at + 2 * c, sizeof keys);
            lanes[c % 2] = add_products(lanes[c % 2], (I)block[c], (I)splat_u(keys));
        }
    }
    // Lane r of block[c] holds the word of a piece of row r at `at` + c, in its upper half.
    PG_INLINE void take_uppers(const U *block, int64_t at) {
#pragma GCC unroll 16
        for (int c = 0; c < W; c++)
            lanes[c % 2] = add_products(lanes[c % 2], (I)block[c], (I)splat_u((uint32_t)DIGEST_KEYS.keys[at + c] << 16));
    }
    I sums() const { return lanes[0] + lanes[1]; }
};

// Of the rows that one thread read; what the threads found is added up.
class RowSums {
  public:
    static constexpr int64_t PIECE = 2 * DigestKeys::WORDS;  // bytes
    static constexpr int MANY = 4;                           // rows at a time

    // Number of a row's piece at a byte.
    static int64_t number(int64_t row, int64_t bytes, int64_t at) {
        return row * ((bytes + PIECE - 1) / PIECE) + at / PIECE;
    }

    PG_INLINE void add(int64_t number, uint32_t sum) { words_[number % 4] += sum * (splitmix(number) | 1); }

    // Of rows that lie one after the other; calls body(row, from, to) once their bytes from..to were read.
    template <class Body>
    void add_rows(int64_t row, int64_t end, const uint8_t *first, int64_t bytes, Body &&body) {
        for (; row < end; row += MANY) {
            const int64_t many = end - row < MANY ? end - row : MANY;
            for (int64_t at = 0; at < bytes; at += PIECE) {
                const int64_t size = bytes - at < PIECE ? bytes - at : PIECE;
                const uint8_t *rows[MANY];
                for (int r = 0; r < MANY; r++) rows[r] = first + (row + (r < many ? r : 0)) * bytes + at;
                uint32_t sums[MANY];
                sum_pieces(rows, size, sums);
                for (int r = 0; r < many; r++) {
                    add(number(row + r, bytes, at), sums[r]);
                    body(row + r, at, at + size);
                }
            }
        }
    }

    // The sums of a piece of each of MANY rows.  Vectors of 256 bits: those of 512 slow down the scalar code around it.
    static void sum_pieces(const uint8_t *const *rows, int64_t size, uint32_t *sums) {
        __m256i found[MANY] = {};
        int64_t at = 0;
        for (; at + STRIPE <= size; at += STRIPE) take(rows, at, at, found);
        if (at < size) {
            uint8_t rest[MANY][STRIPE] = {};
            const uint8_t *padded[MANY];
            for (int r = 0; r < MANY; r++) padded[r] = (const uint8_t *)memcpy(rest[r], rows[r] + at, size - at);
            take(padded, 0, at, found);
        }
        for (int r = 0; r < MANY; r++) {
            uint32_t lanes[8];
            memcpy(lanes, found + r, sizeof lanes);
            sums[r] = 0;
            for (const uint32_t lane : lanes) sums[r] += lane;
        }
    }

    void add_to(uint64_t *sums) const {  // several threads at once
        for (int i = 0; i < PG_DIGEST_WORDS; i++) __atomic_fetch_add(sums + i, words_[i], __ATOMIC_RELAXED);
    }

  private:
    uint64_t words_[PG_DIGEST_WORDS] = {};

    static constexpr int64_t STRIPE = 64;  // bytes

    // A stripe of each row at a byte, which is byte `key` of the piece.
    static PG_INLINE void take(const uint8_t *const *rows, int64_t at, int64_t key, __m256i *found) {
#pragma GCC unroll 2
        for (int half = 0; half < STRIPE; half += 32) {
            const __m256i keys = load_256((const uint8_t *)DIGEST_KEYS.keys + key + half);
#pragma GCC unroll 4
            for (int r = 0; r < MANY; r++) {
                const __m256i words = load_256(rows[r] + at + half);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
                found[r] = _mm256_dpwssd_epi32(found[r], words, keys);
#else
                found[r] = _mm256_add_epi32(found[r], _mm256_madd_epi16(words, keys));
#endif
            }
        }
    }
    static PG_INLINE __m256i load_256(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
};
