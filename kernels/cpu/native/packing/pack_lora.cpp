// Adapters packed as PgLora says, by one thread, beside steps.
#include <algorithm>
#include <cstring>

#include "packing/transpose.h"
#include "pageant.h"

namespace {

constexpr int64_t TOGETHER = 16, CHUNK = 32;  // ranks, and input features

// A [rank, features]
template <class T>
void pack_down(const T *down, int64_t rank, int64_t features, T *out) {
    for (int64_t first = 0; first < rank; first += TOGETHER) {
        const int64_t rows = std::min(rank - first, TOGETHER);
        for (int64_t at = 0; at < features; at += CHUNK) {
            const int64_t count = std::min(features - at, CHUNK);
            for (int64_t r = first; r < first + rows; r++, out += CHUNK) {
                const T *chunk = down + r * features + at;
                if (count == CHUNK) {  // of a known size, so that no function is called
                    memcpy(out, chunk, CHUNK * sizeof(T));
                    continue;
                }
                memcpy(out, chunk, count * sizeof(T));
                std::fill(out + count, out + CHUNK, T{});
            }
        }
    }
}

PG_INLINE U load_some(const uint32_t *p, int64_t count) {
    if (count == W) return load<U>(p);
    U v{};
    if (count == W / 2) memcpy(&v, p, sizeof v / 2);
    else memcpy(&v, p, count * sizeof *p);
    return v;
}

// B [n, words]: of W columns each word lies together; `rows` words with those of zeros.
void pack_words(const uint32_t *up, int64_t n, int64_t words, int64_t rows, uint32_t *out) {
    for (int64_t first = 0; first < n; first += W, up += W * words, out += W * rows) {
        for (int64_t word = 0; word < words; word += W) {
            const int64_t count = std::min<int64_t>(words - word, W);
            U block[W];
            for (int64_t column = 0; column < W; column++) block[column] = load_some(up + column * words + word, count);
            transpose(block);
            for (int64_t i = 0; i < count; i++) store(out + (word + i) * W, block[i]);
        }
        std::fill(out + words * W, out + rows * W, 0u);
    }
}

// B [n, rank] in bfloat16, an odd number of ranks
void pack_odd_pairs(const uint16_t *up, int64_t n, int64_t rank, uint16_t *out) {
    for (int64_t first = 0; first < n; first += W)
        for (int64_t r = 0; r < rank; r += 2)
            for (int64_t column = first; column < first + W; column++) {
                *out++ = up[column * rank + r];
                *out++ = r + 1 < rank ? up[column * rank + r + 1] : 0;
            }
}

}  // namespace

extern "C" void pg_pack_lora(const PgLoraPart *stored, int64_t features, int32_t format, void *down, void *up) {
    const int64_t rank = stored->rank, n = stored->n;
    if (format == PG_F32) {
        if (down) pack_down((const float *)stored->down, rank, features, (float *)down);
        pack_words((const uint32_t *)stored->up, n, rank, rank + rank % 2, (uint32_t *)up);
    } else {
        if (down) pack_down((const uint16_t *)stored->down, rank, features, (uint16_t *)down);
        if (rank % 2) pack_odd_pairs((const uint16_t *)stored->up, n, rank, (uint16_t *)up);
        else pack_words((const uint32_t *)stored->up, n, rank / 2, rank / 2, (uint32_t *)up);
    }
}
