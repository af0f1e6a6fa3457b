// The paged KV pool of one layer, and causal attention over it.
//
// A block holds, per KV head and by format:
//     keys    F32 [D][T]   BF16 [D / 2][T][2]   I8 [D][T], behind all heads scales [heads][T] float32
//     values  F32 [T][D]   BF16 [T / 2][D][2]   I8 [T][D], behind all heads scales [heads][T] float32
// and E4M3 and E5M2 as I8, without these scales,
// with D = head_dim and T = block_size: panels for the microkernels of gemm.h, keys with a column per token, values
// with a column per dimension.
#pragma once
#include "ops.h"

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

// Queries of one sequence at consecutive positions.
struct QueryGroup {
    const int64_t *table;  // the sequence's block ids; those of a layer's pool are its `table` columns further
    int64_t position;      // of the first query
    int64_t count;
    int64_t row;  // of the first query in the step's queries
};
constexpr int64_t MAX_HEAD_DIM = 576;
constexpr int64_t MAX_QUERY_ROWS = 96;  // queries x query heads of a KV head that are attended to together

struct Attention {
    KVShape shape;
    const uint8_t *keys, *values;
    int64_t table;      // as PgLayer has it
    int64_t share;      // query heads of a group
    int64_t value_dim;  // features of a value: head_dim, but where `latent`
    bool latent;        // keys are rows as values are, of one head for all groups, whose first features are the values
    int64_t window;
    float scale, softcap;  // as PgLayer has them
    const float *sinks;
    const float *query;  // [rows, query_stride]: heads behind each other
    int64_t query_stride;
    float *out;  // [rows, out_stride]
    int64_t out_stride;
    bool tiled;  // by tiles, of queries and probabilities that are rounded to bfloat16
    uint16_t *rounded = nullptr;  // where `tiled`: instead of `out`, as a linear reads its rows
    RowLayout layout = {};
    int64_t first = 0;  // where `rounded`: features before those of this process's heads
};

// What a row's sum of weighted values is multiplied by: its probabilities add up to `sum` below `peak`.  A sink is one
// more score, whose value is zero; the larger of it and the peak is what both are then below.
float normaliser(float sum, float peak, const float *sink);

// The query heads [head * share, (head + 1) * share) of one group.
void attend(const Attention &a, const QueryGroup &group, int64_t head);
