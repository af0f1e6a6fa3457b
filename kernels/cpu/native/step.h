// One step of a decoder, in parts: its tokens and buffers, and what each member of the team does to a layer.
#pragma once
#include <vector>

#include "delta.h"
#include "kv.h"

inline int64_t padded(int64_t n) { return (n + NR - 1) / NR * NR; }

// From a row to the next: an odd number of cache lines, or the rows of a tile would fight for the same places.
inline int64_t row_stride(int64_t n) { return (n + 15) / 16 % 2 ? padded(n) + 16 : padded(n + 16) + 16; }

// The attention of one group, for one KV head.
struct AttentionItem {
    QueryGroup group;
    int64_t head;
};

// A step's tokens in one list, and what there is to attend to.
struct Tokens {
    std::vector<int64_t> ids, positions, slots;    // of every token
    std::vector<int64_t> wanted;                   // places of the tokens whose hidden states are returned
    std::vector<AttentionItem> items, last_items;  // of every token; of the wanted ones, as rows among themselves
    std::vector<Sequence> sequences;

    void list(const PgModel &m, const PgStep &s);
};

// A step's buffers as every member sees them.  The functions below end with a barrier.
struct Step {
    const PgModel &m;
    const Tokens &tokens;
    int64_t hidden_stride, mixed_stride, attended_stride, inner_stride, expert_stride;
    float *residual, *normed, *mixed, *attended, *inner, *kept;
    void *converted;
    float *scales;

    Activations activations(float *x, int64_t stride, int64_t rows) const {
        return {x, stride, rows, m.round_activations != 0, converted, scales};
    }
};

// Buffers for so many tokens, of which so many are wanted; they hold until the next call.
Step make_step(const PgModel &m, const Tokens &tokens, int64_t rows, int64_t kept);

// Rows from outside in a buffer of ours, ready for a linear; it holds until the next call or step.
Activations spread(const float *x, int64_t rows, int64_t width, bool round);

Attention attention_of(const PgModel &m, const PgLayer &layer, const float *query, int64_t query_stride, float *out,
                       int64_t out_stride);

// A layer adds to the residual; of the last one only wanted rows go on, in `kept`.
void attention_half(Member &member, const Step &s, const PgLayer &layer, bool last);
void feed_forward_half(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows);

// The second half after its norm: what stands in s.normed goes through the MLP, and is added to the residual.
void feed_forward(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows);

// The same through experts.
void mix_experts(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows);
int64_t reserve_experts(const PgModel &m, int64_t rows);  // buffers for that; from one row of inner features to the next
constexpr int64_t MAX_TOP_K = 64, MAX_GROUPS = 64;

// Adds one row of what a layer computed, which is changed.
inline void add_row(const Step &s, const PgNorm &norm, float *x, float *residual) {
    if (norm.weight) norm_row(norm, x, s.m.eps, s.m.hidden, x);
    const float scale = s.m.residual_scale;
    for (int64_t i = 0; i < s.m.hidden; i += W) store(residual + i, load<F>(residual + i) + load<F>(x + i) * scale);
}
