// What latent attention does before and after its softmax: queries that meet latents, and latents that become values.
#include "steps/step.h"

namespace {

// y_h = x_h W_h^T of every head: x [rows, stride] holds the heads `width` floats apart, out(row, head, column, vector)
// gets W columns at a time.  Each result is one chain over the input features, so that rows and heads stay alone.
template <class Out>
void multiply_heads(Member &member, const float *x, int64_t stride, int64_t width, int64_t rows,
                    const PgLinear *weights, int64_t heads, Out &&out) {
    const int64_t blocks = row_blocks(rows, weights->k);
    member.for_each(blocks * heads, 1, [&](int64_t item, int64_t) {
        const int64_t head = item / blocks, b = item % blocks;
        const PgLinear &w = weights[head];
        const Rows from{x + head * width, stride, nullptr};
        block(kernel_of(w, false), from, rows * b / blocks, rows * (b + 1) / blocks, w, 0, (w.n + NR - 1) / NR,
              [&](int64_t row, int64_t column, F low, F high) {
                  out(row, head, column, low);
                  if (column + W < w.n) out(row, head, column + W, high);
              });
    });
    member.barrier();
}

// Turns a part of a vector that stands for a token at this position.
void rotate(const PgLayer &layer, int64_t position, float *x) {
    const int64_t dims = layer.latent->rotated, at = position * (dims / 2);
    if (layer.cos) rotate_head(x, layer.cos + at, layer.sin + at, dims);
}

}  // namespace

int64_t latent_first(const PgLayer &layer) {
    const PgLatent &l = *layer.latent;
    return l.query_rank ? l.query_rank : layer.num_heads * (l.plain + l.rotated);
}

void store_latents(Member &member, const Step &s, const PgLayer &layer, const KVShape &shape, int64_t rows) {
    const PgLatent &l = *layer.latent;
    const int64_t first = latent_first(layer);
    member.for_each(rows, rows < 4 * member.count ? 1 : 4, [&](int64_t row, int64_t end) {
        for (; row < end; row++) {
            float *query = s.mixed + row * s.mixed_stride, *latent = query + first;
            if (layer.query_norm.weight) norm_row(layer.query_norm, query, l.eps, l.query_rank, query);
            norm_row(layer.key_norm, latent, l.eps, l.rank, latent);
            rotate(layer, s.tokens.positions[row], latent + l.rank);
            uint8_t *block = layer.values + s.tokens.blocks[row][layer.table] * shape.block_bytes();
            store_value(shape, block, 0, shape.offset_of(s.tokens.positions[row]), latent);
        }
    });
    member.barrier();
}

Vectors latent_queries(Member &member, const Step &s, const PgLayer &layer, Vectors given, int64_t rows, bool last) {
    const PgLatent &l = *layer.latent;
    const int64_t heads = layer.num_heads, width = l.plain + l.rotated, dims = layer.head_dim;
    if (l.query_rank) {
        linear(member, s.activations(given.x, given.stride, rows), l.query, [&](int64_t row, int64_t column, F low, F high) {
            store(s.attended + row * s.attended_stride + column, low);
            store(s.attended + row * s.attended_stride + column + W, high);
        });
        member.barrier();
        given = {s.attended, s.attended_stride};
    }
    member.for_each(rows * heads, heads, [&](int64_t item, int64_t end) {
        for (; item < end; item++) {
            const int64_t row = item / heads, head = item % heads;
            float *turned = given.x + row * given.stride + head * width + l.plain;
            rotate(layer, s.tokens.positions[last ? s.tokens.wanted[row] : row], turned);
            memcpy(s.queries + row * s.queries_stride + head * dims + l.rank, turned, l.rotated * 4);
        }
    });
    member.barrier();
    multiply_heads(member, given.x, given.stride, width, rows, l.key_up, heads,
                   [&](int64_t row, int64_t head, int64_t column, F v) {
                       store(s.queries + row * s.queries_stride + head * dims + column, v);
                   });
    return {s.queries, s.queries_stride};
}

Vectors latent_values(Member &member, const Step &s, const PgLayer &layer, int64_t rows) {
    const PgLatent &l = *layer.latent;
    multiply_heads(member, s.attended, s.attended_stride, l.rank, rows, l.value_up, layer.num_heads,
                   [&](int64_t row, int64_t head, int64_t column, F v) {
                       store(s.queries + row * s.queries_stride + head * l.value_dim + column, v);
                   });
    return {s.queries, s.queries_stride};
}
