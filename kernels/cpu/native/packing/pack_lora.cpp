// Adapters packed as PgLora says, by one thread, beside steps.
#include <algorithm>
#include <cstring>

#include "pageant.h"
#include "simd.h"

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
                memcpy(out, down + r * features + at, count * sizeof(T));
                std::fill(out + count, out + CHUNK, T{});
            }
        }
    }
}

// B [n, rank], of which `joined` ranks of a column lie together.
template <class T, int joined>
void pack_up(const T *up, int64_t n, int64_t rank, T *out) {
    for (int64_t first = 0; first < n; first += W)
        for (int64_t r = 0; r < rank + rank % 2; r += joined)
            for (int64_t column = first; column < first + W; column++)
                for (int64_t one = r; one < r + joined; one++) *out++ = one < rank ? up[column * rank + one] : T{};
}

// The same of bfloat16, by words of two where no rank is alone.
void pack_pairs(const uint16_t *up, int64_t n, int64_t rank, uint16_t *out) {
    if (rank % 2) return pack_up<uint16_t, 2>(up, n, rank, out);
    const int64_t pairs = rank / 2;
    for (int64_t first = 0; first < n; first += W, up += W * rank, out += W * rank)
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t column = 0; column < W; column++)
                memcpy(out + 2 * (pair * W + column), up + 2 * (column * pairs + pair), 4);
}

}  // namespace

extern "C" void pg_pack_lora(const PgLoraPart *stored, int64_t features, int32_t format, void *down, void *up) {
    const int64_t rank = stored->rank, n = stored->n;
    if (format == PG_F32) {
        if (down) pack_down((const float *)stored->down, rank, features, (float *)down);
        pack_up<float, 1>((const float *)stored->up, n, rank, (float *)up);
    } else {
        if (down) pack_down((const uint16_t *)stored->down, rank, features, (uint16_t *)down);
        pack_pairs((const uint16_t *)stored->up, n, rank, (uint16_t *)up);
    }
}
