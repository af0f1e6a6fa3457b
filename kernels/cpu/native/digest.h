// The sums of a digest (kernels/ops/digest.py says what is summed), for functions that read rows anyway.
//
// A stripe is summed just before the caller reads it, for the processor then does both at once.
#pragma once
#include "pageant.h"
#include "simd.h"

struct DigestStart {
    static constexpr int STATE = 4 * PG_DIGEST_WORDS;  // words of a stripe
    static constexpr uint64_t PHI = 0x9e3779b97f4a7c15u;
    alignas(64) uint64_t words[STATE] = {};
    constexpr DigestStart() {
        for (int i = 0; i < STATE; i++) words[i] = (i + 1) * PHI;
    }
};

// Of one row.
class RowState {
  public:
    static constexpr int STATE = DigestStart::STATE, LANES = W / 2;  // words of a stripe, of a vector
    static constexpr int64_t STRIPE = 8 * STATE;                     // bytes

    PG_INLINE void begin(int64_t index) {
        static constexpr DigestStart start;
        for (int i = 0; i < VECTORS; i++) vectors_[i] = load<U64>(start.words + i * LANES) + index * STATE * start.PHI;
    }

    // The stripe at a multiple of STRIPE.
    PG_INLINE void take(const void *row, int64_t at, int64_t bytes) {
        const uint8_t *data = (const uint8_t *)row;
        if (at + STRIPE <= bytes) return take(data + at);
        if (at) return take(data + bytes - STRIPE);
        alignas(64) uint8_t padded[STRIPE] = {};
        memcpy(padded, data, bytes);
        take(padded);
    }

    PG_INLINE void add_to(uint64_t *words) const {
        constexpr int TOGETHER = PG_DIGEST_WORDS / LANES;
        for (int i = 0; i < TOGETHER; i++) {
            U64 sum = vectors_[i];
            for (int other = i + TOGETHER; other < VECTORS; other += TOGETHER) sum = mixed(sum, vectors_[other]);
            for (int step = 0; step < 4; step++) sum = mixed(sum, U64{});
            store(words + i * LANES, load<U64>(words + i * LANES) + sum);
        }
    }

  private:
    using U64 = uint64_t __attribute__((vector_size(4 * W)));
    static constexpr int VECTORS = STATE / LANES;
    static constexpr uint32_t FACTOR = 0x9e3779b1u;

    static PG_INLINE U64 mixed(U64 a, U64 words) {
#if defined(__AVX512F__)
        const U64 product = (U64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(FACTOR));
        return product ^ (U64)_mm512_shuffle_epi32((__m512i)a, _MM_PERM_CDAB) ^ words;
#else
        const U64 product = (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(FACTOR));
        return product ^ (U64)_mm256_shuffle_epi32((__m256i)a, 0xb1) ^ words;
#endif
    }

    PG_INLINE void take(const uint8_t *stripe) {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) vectors_[i] = mixed(vectors_[i], load<U64>(stripe + 8 * LANES * i));
    }

    U64 vectors_[VECTORS];
};

// Of the rows that one thread read; what the threads found is added up.
class RowSums {
  public:
    // Calls body(begin, end) for pieces of the row's bytes.
    template <class Body>
    PG_INLINE void add(int64_t index, const void *row, int64_t bytes, Body &&body) {
        RowState state;
        state.begin(index);
        for (int64_t at = 0; at < bytes; at += RowState::STRIPE) {
            state.take(row, at, bytes);
            body(at, at + RowState::STRIPE < bytes ? at + RowState::STRIPE : bytes);
        }
        add(state);
    }
    PG_INLINE void add(const RowState &state) { state.add_to(words_); }

    void add_to(uint64_t *sums) const {  // several threads at once
        for (int i = 0; i < PG_DIGEST_WORDS; i++) __atomic_fetch_add(sums + i, words_[i], __ATOMIC_RELAXED);
    }

  private:
    alignas(64) uint64_t words_[PG_DIGEST_WORDS] = {};
};
