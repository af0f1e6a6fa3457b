#include "attention/kv.h"

namespace {

float quantize(const float *x, int64_t n, float *q) {
    F largest{};
    for (int64_t i = 0; i < n; i += W) largest = max(largest, abs(load<F>(x + i)));
    const float peak = reduce_max(largest), factor = peak > 0 ? 127.0f / peak : 0.0f;
    for (int64_t i = 0; i < n; i += W) store(q + i, round_even(load<F>(x + i) * factor));
    return peak / 127.0f;
}

// Into the lower or upper halves of words, whose other halves another thread may be writing to.
void store_halves(const uint16_t *x, int64_t n, bool upper, uint32_t *out) {
#if defined(__AVX512BW__)
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + i)));
        _mm512_mask_storeu_epi16(out + i, upper ? 0xaaaaaaaau : 0x55555555u, upper ? _mm512_slli_epi32(words, 16) : words);
    }
#else
    for (int64_t i = 0; i < n; i++) ((uint16_t *)(out + i))[upper] = x[i];
#endif
}

// Writes one token's vector as row or column `offset` of a head's panel.
void put(const KVShape &s, uint8_t *block, int64_t head, int64_t offset, const float *x, bool is_key) {
    uint8_t *base = block + head * s.head_bytes();
    const int64_t tokens = s.block_size, dims = s.head_dim;
    if (s.format == PG_BF16) {
        uint16_t rounded[MAX_HEAD_DIM];
        for (int64_t d = 0; d < dims; d += W) store(rounded + d, to_bf16(load<F>(x + d)));
        uint32_t *out = (uint32_t *)base + (is_key ? offset : offset / 2 * dims);
        if (is_key)
            for (int64_t d = 0; d < dims; d += 2) memcpy(out + d / 2 * tokens, rounded + d, 4);
        else
            store_halves(rounded, dims, offset % 2, out);
        return;
    }
    if (s.format == PG_F32) {
        for (int64_t d = 0; d < dims; d++) ((float *)base)[is_key ? d * tokens + offset : offset * dims + d] = x[d];
        return;
    }
    if (is_f8(s.format)) {
        const float *scales = is_key ? s.key_scales : s.value_scales;
        uint8_t octets[MAX_HEAD_DIM];
        to_f8(s.format, x, scales ? scales[head] : 1.0f, dims, octets);
        for (int64_t d = 0; d < dims; d++) base[is_key ? d * tokens + offset : offset * dims + d] = octets[d];
        return;
    }
    float q[MAX_HEAD_DIM];
    const_cast<float *>(s.scales(block, head))[offset] = quantize(x, dims, q);
    for (int64_t d = 0; d < dims; d++) ((int8_t *)base)[is_key ? d * tokens + offset : offset * dims + d] = (int8_t)q[d];
}

}  // namespace

void store_key(const KVShape &shape, uint8_t *block, int64_t head, int64_t offset, const float *key) {
    put(shape, block, head, offset, key, true);
}

void store_value(const KVShape &shape, uint8_t *block, int64_t head, int64_t offset, const float *value) {
    put(shape, block, head, offset, value, false);
}

extern "C" int64_t pg_key_bytes(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim) {
    return KVShape{format, block_size, num_kv_heads, head_dim}.block_bytes();
}

extern "C" int64_t pg_value_bytes(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim) {
    return KVShape{format, block_size, num_kv_heads, head_dim}.block_bytes();
}
