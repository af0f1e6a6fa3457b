// One step of a decoder, in parts: its tokens and buffers, and what each member of the team does to a layer.
#pragma once
#include <vector>

#include "states/delta.h"
#include "ranks/group.h"
#include "attention/attention.h"

inline int64_t padded(int64_t n) { return (n + NR - 1) / NR * NR; }

// From a row to the next: an odd number of cache lines, or the rows of a tile would fight for the same places.
inline int64_t row_stride(int64_t n) { return (n + 15) / 16 % 2 ? padded(n) + 16 : padded(n + 16) + 16; }

// Query heads that are attended to together: those of a KV head, or as many as share the reading of latents.
inline int64_t query_share(const PgLayer &layer) {
    if (!layer.latent) return layer.num_heads / layer.num_kv_heads;
    int64_t share = layer.num_heads < 16 ? layer.num_heads : 16;
    while (layer.num_heads % share) share--;
    return share;
}

// What there is to attend to in the layers whose query heads are in so many groups of `share`.
struct AttentionItems {
    int64_t groups, share;
    std::vector<AttentionItem> all, last;  // of every token; of the wanted ones, as rows among themselves
};

// A few rows of one adapter, wherever they stand.
struct LoraGroup {
    static constexpr int64_t MOST_ROWS = 4;
    int64_t adapter, count, rows[MOST_ROWS];
};

// A step's tokens in one list.
struct Tokens {
    std::vector<int64_t> ids, positions;  // of every token
    std::vector<const int64_t *> blocks;  // of every token, where its first table has its block
    std::vector<int64_t> wanted;          // places of the tokens whose hidden states are returned
    std::vector<AttentionItems> items;    // one for each shape of the layers' heads
    std::vector<Sequence> sequences;
    std::vector<int64_t> adapters, wanted_adapters;  // of every token, and of the wanted ones; empty: none anywhere
    std::vector<LoraGroup> groups, wanted_groups;    // of these
    Ahead ahead;                                     // what will be read of these adapters

    void list(const PgModel &m, const PgStep &s);
    const AttentionItems &items_of(const PgLayer &layer) const;
};

// A step's buffers as every member sees them.  The functions below end with a barrier.
struct Step {
    const PgModel &m;
    const PgStep &given;
    const Tokens &tokens;
    int64_t hidden_stride, mixed_stride, attended_stride, queries_stride, inner_stride, expert_stride;
    float *residual, *normed, *mixed, *attended, *queries, *inner, *kept;
    void *converted;
    int64_t apart;  // bytes from one member's `converted` to the next one's, where a row is alone
    float *scales;
    float *added;  // what adapters add to a linear's rows (lora.h)
    int64_t added_stride;
    float *picked;  // queries of the wanted rows, with inner_stride, or with queries_stride in a group
    float *joined;  // what output and down give before a norm

    // Of rows that all ranks have, those that this one computes for all who share memory with it.
    bool is_mine(int64_t row) const { return !m.group || is_linked(*m.group) || row % m.group->ranks == m.group->rank; }

    Activations activations(float *x, int64_t stride, int64_t rows) const {
        return {x, stride, rows, m.round_activations != 0, converted, scales, apart};
    }
};

// Buffers for so many tokens, of which so many are wanted; they hold until the next call.
Step make_step(const PgModel &m, const PgStep &given, const Tokens &tokens, int64_t rows, int64_t kept);

// A whole step, and the tokens that its wanted rows take, which are appended to the step's.
void step_tokens(const PgModel &m, const PgStep &s, const PgSampling &sampling, int64_t *ids);

// Nothing for so few rows that each linear waits for its own weights.
void list_reads(const PgModel &m, const std::vector<LoraGroup> &groups, int64_t rows, Ahead &ahead);
void group_adapters(const std::vector<int64_t> &adapters, std::vector<LoraGroup> &groups);
int64_t widest_linear(const PgModel &m);  // in output features, of those that adapters may change

// Rows from outside in a buffer of ours, ready for a linear; it holds until the next call or step.
Activations spread(const float *x, int64_t rows, int64_t width, bool round);

Attention attention_of(const PgModel &m, const PgLayer &layer, const float *query, int64_t query_stride, float *out,
                       int64_t out_stride);

// A vector of each row.
struct Vectors {
    float *x;
    int64_t stride;
};

// Latent attention (latent.cpp).  What stands before the latent in a row of s.mixed; norms and turns every row's latent,
// and stores it; then queries out of `given`, the wanted rows' where `last`; and values out of s.attended.
int64_t latent_first(const PgLayer &layer);
void store_latents(Member &member, const Step &s, const PgLayer &layer, const KVShape &shape, int64_t rows);
Vectors latent_queries(Member &member, const Step &s, const PgLayer &layer, Vectors given, int64_t rows, bool last);
Vectors latent_values(Member &member, const Step &s, const PgLayer &layer, int64_t rows);

// A layer adds to the residual; of the last one only wanted rows go on, in `kept`.
void attention_half(Member &member, const Step &s, const PgLayer &layer, bool last);
void feed_forward_half(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows);

// The second half after its norm, through a dense MLP: what is given goes through it, and is added to the residual.
void feed_forward(Member &member, const Step &s, const PgLayer &layer, Activations given, float *residual);

// The same through experts, from s.normed.
void mix_experts(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows);
int64_t reserve_experts(const PgModel &m, int64_t rows);  // buffers for that; from one row of inner features to the next
constexpr int64_t MAX_TOP_K = 64, MAX_GROUPS = 64;

// Adds so many features of what a layer computed.
inline void add_features(const Step &s, int64_t count, const float *x, float *residual) {
    const float scale = s.m.residual_scale;
    for (int64_t i = 0; i < count; i += W) store(residual + i, load<F>(residual + i) + load<F>(x + i) * scale);
}

// Adds one row of it, which is changed.
inline void add_row(const Step &s, const PgNorm &norm, float *x, float *residual) {
    if (norm.weight) norm_row(norm, x, s.m.eps, s.m.hidden, x);
    add_features(s, s.m.hidden, x, residual);
}
