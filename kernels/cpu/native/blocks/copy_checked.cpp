// Copies bytes and makes their CRC-32 on the way, so that they are read from memory once.
//
// The polynomial is zlib's.  What was read is a polynomial of which 128 bytes are kept, in eight parts of 128 bits: before
// the next 128 bytes are added each part is multiplied by x^1024, modulo the polynomial (Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction").  The last ones go through a table, byte by byte.
#include "pageant.h"

#include <immintrin.h>

#include <cstring>

namespace {

constexpr uint32_t POLYNOMIAL = 0xedb88320u;  // the bits of all numbers here are in reverse, the highest power last
constexpr int64_t PARTS = 4, BYTES = 32 * PARTS;

constexpr uint32_t times_x(uint32_t value) { return value >> 1 ^ (value & 1 ? POLYNOMIAL : 0); }

// x^power modulo the polynomial, in the place where a product without carries needs it.
constexpr uint64_t power_of_x(int power) {
    uint32_t value = 1u << 31;
    while (power-- > 0) value = times_x(value);
    return (uint64_t)value << 1;
}

struct Table {
    uint32_t of[256] = {};

    constexpr Table() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            of[byte] = byte;
            for (int bit = 0; bit < 8; bit++) of[byte] = times_x(of[byte]);
        }
    }
};
constexpr Table TABLE;

uint32_t add_bytes(uint32_t sum, const uint8_t *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) sum = sum >> 8 ^ TABLE.of[(sum ^ data[i]) & 255];
    return sum;
}

// Whole pieces of BYTES; returns the sum before its last inversion.
__attribute__((target("avx2,pclmul,vpclmulqdq"))) uint32_t copy_pieces(uint8_t *to, const uint8_t *from, int64_t bytes) {
    const int64_t lower = (int64_t)power_of_x(8 * BYTES + 32), upper = (int64_t)power_of_x(8 * BYTES - 32);
    const __m256i powers = _mm256_set_epi64x(upper, lower, upper, lower);
    __m256i parts[PARTS];
    for (int64_t at = 0; at < bytes; at += BYTES) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < PARTS; i++) {
            const __m256i next = _mm256_loadu_si256((const __m256i *)(from + at + 32 * i));
            _mm256_storeu_si256((__m256i *)(to + at + 32 * i), next);
            if (at) {
                const __m256i low = _mm256_clmulepi64_epi128(parts[i], powers, 0x00);
                const __m256i high = _mm256_clmulepi64_epi128(parts[i], powers, 0x11);
                parts[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), next);
            } else {
                parts[i] = i ? next : _mm256_xor_si256(next, _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, -1));
            }
        }
    }
    uint8_t rest[BYTES];
    memcpy(rest, parts, sizeof rest);
    return add_bytes(0, rest, BYTES);
}

}  // namespace

extern "C" int64_t pg_copy_checked(void *to, const void *from, int64_t bytes) {
    if (!__builtin_cpu_supports("vpclmulqdq")) return -1;
    if (!bytes) return 0;
    const int64_t whole = bytes / BYTES * BYTES;
    uint32_t sum = whole ? copy_pieces((uint8_t *)to, (const uint8_t *)from, whole) : ~0u;
    memcpy((uint8_t *)to + whole, (const uint8_t *)from + whole, bytes - whole);
    sum = add_bytes(sum, (const uint8_t *)to + whole, bytes - whole);
    return (int64_t)(uint32_t)~sum;
}
