// Causal attention over the paged KV pool of one layer.
#pragma once
#include "attention/kv.h"

// Queries of one sequence at consecutive positions.
struct QueryGroup {
    const int64_t *table;  // the sequence's block ids; those of a layer's pool are its `table` columns further
    int64_t position;      // of the first query
    int64_t count;
    int64_t row;  // of the first query in the step's queries
};

// The attention of one group of queries, for one group of heads.
struct AttentionItem {
    QueryGroup group;
    int64_t head;
};
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
    bool rounds;  // queries and probabilities to bfloat16 (attention_rounded.h)
    uint16_t *rounded = nullptr;  // where it `rounds`: instead of `out`, as a linear reads its rows
    RowLayout layout = {};
    int64_t first = 0;  // where `rounded`: features before those of this process's heads
};

// Keys looked at together, at positions that are multiples of it, whatever the queries are: a row's sums have one order.
constexpr int64_t KEY_TILE = 256;

// One tile: the first of its keys' positions, and how many of them any query sees.
struct KeyTile {
    const int64_t *blocks;
    int64_t begin, count;
};

inline KeyTile key_tile(const Attention &a, const QueryGroup &g, int64_t begin) {
    const int64_t rest = g.position + g.count - begin;
    return {g.table + a.table + a.shape.block_of(begin), begin, rest < KEY_TILE ? rest : KEY_TILE};
}

// Where the first tile that a group sees begins.
inline int64_t first_seen(const Attention &a, const QueryGroup &g) {
    const int64_t seen = a.window && g.position >= a.window ? g.position - a.window + 1 : 0;
    return seen / KEY_TILE * KEY_TILE;
}

// Asks for a tile's keys and values: blocks lie scattered, and nothing else foresees the next one.
void fetch_tile(const Attention &a, const KeyTile &t, int64_t head);

// What a row's sum of weighted values is multiplied by: its probabilities add up to `sum` below `peak`.  A sink is one
// more score, whose value is zero; the larger of it and the peak is what both are then below.
float normaliser(float sum, float peak, const float *sink);

// The query heads [head * share, (head + 1) * share) of one group.  `next`: what is likely to be asked for after this one,
// or NULL.
void attend(const Attention &a, const AttentionItem &item, const AttentionItem *next);
