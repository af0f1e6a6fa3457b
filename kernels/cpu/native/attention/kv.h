// The paged KV pool of one layer.
//
// A block holds, per KV head and by format:
//     keys    F32 [D][T]   BF16 [D / 2][T][2]   I8 [D][T], behind all heads scales [heads][T] float32
//     values  F32 [T][D]   BF16 [T / 2][D][2]   I8 [T][D], behind all heads scales [heads][T] float32
// and E4M3 and E5M2 as I8, without these scales,
// with D = head_dim and T = block_size: panels for the microkernels of gemm.h, keys with a column per token, values
// with a column per dimension.
#pragma once
#include "layers/ops.h"

constexpr int64_t MAX_HEAD_DIM = 576;

struct KVShape {
    int32_t format;
    int64_t block_size, heads, head_dim;
    const float *key_scales = nullptr, *value_scales = nullptr;  // as PgLayer has them
    int shift = __builtin_ctzll(block_size);  // a 64-bit division takes as long as fifty multiplications

    int64_t block_of(int64_t token) const { return token >> shift; }
    int64_t offset_of(int64_t token) const { return token & (block_size - 1); }

    int64_t head_bytes() const {
        return block_size * head_dim * (format == PG_F32 ? 4 : format == PG_BF16 ? 2 : 1);
    }
    int64_t block_bytes() const { return heads * (head_bytes() + (format == PG_I8 ? block_size * 4 : 0)); }
    // What the numbers of a head that are read from a pool of 8-bit floats are multiples of.
    float unit(const float *scales, int64_t head) const { return f8_unit(format) * (scales ? scales[head] : 1.0f); }
    const float *scales(const uint8_t *block, int64_t head) const {
        return (const float *)(block + heads * head_bytes()) + head * block_size;
    }
};

void store_key(const KVShape &shape, uint8_t *block, int64_t head, int64_t offset, const float *key);
void store_value(const KVShape &shape, uint8_t *block, int64_t head, int64_t offset, const float *value);
