// A group of ranks: processes that compute one model together, each with a part of every weight.
//
// A linear is cut by output features, so each of its sums is made by one rank, in the order that one process alone has.
// What the next linear reads whole lies in memory that all ranks share: each writes its own columns, and a meeting of all
// ranks stands in the place of a barrier of the team.  Residuals, what attention gives, what stands between the linears
// of an MLP, and logits lie there; keys and values are the rank's own.
//
// Rank 0 leads.  What it computes it orders from the others, in order; they compute it from what it wrote to the shared
// memory.  Each rank digests the orders as it reads them, and all digests are compared before anything is computed: a
// rank that has read something else ends the group.
//
// Ranks of several hosts share nothing: each has the whole memory, and a gather over sockets (links.h) stands in the place
// of a meeting; where nothing was written for others, there is nothing to wait for.
#pragma once
#include <vector>

#include "ranks/links.h"

constexpr int32_t MOST_RANKS = 64;

// ORDER_LAYERS: a forward pass from residuals that the leader has, in the place of embeddings.
enum OrderKind {
    ORDER_FORWARD = 1,
    ORDER_LOGITS = 2,
    ORDER_GREEDY = 3,
    ORDER_COPY = 4,
    ORDER_LAYERS = 5,
    ORDER_MOVE = 6
};

inline bool is_step(int64_t kind) { return kind == ORDER_FORWARD || kind == ORDER_LAYERS; }

// The best logit of a row that one rank has.
struct RankBest {
    float value;
    int64_t id;
};

// The shared memory, in areas.
struct GroupAreas {
    int64_t *columns;  // [4, max_seqs]: computed, scheduled, wanted, the place of an adapter or -1
    int64_t *tokens;   // [max_tokens] of a step, in order; or pairs of blocks that are copied, or moves of experts
    int64_t *tables;   // [max_seqs, table_columns]
    RankBest *best;    // [ranks, max_rows]
    float *given;      // [max_rows, hidden]
    int64_t *adapters; // [max_rows] of these, or -1
    float *logits;     // [max_rows, vocab]
    float *residual, *kept, *attended, *inner, *joined;  // [max_tokens, their stride]
    float *experts;  // what stands between experts' linears, by slots
    float *slots;    // what whole experts give
    float *normed;   // [max_tokens, its stride], of sequence_parallel
    int64_t bytes;
};
GroupAreas areas_of(const PgGroup &g, int64_t hidden);

constexpr int64_t AREAS_BEGIN = 8192;  // of bytes before them, which say how the group is

inline bool leads(const PgGroup &g) { return g.rank == 0; }
inline bool is_linked(const PgGroup &g) { return g.links != nullptr; }

// Ranks that share memory: every one comes here as often; no rank goes on before all have come, or the group has ended.
void meet_ranks(const PgGroup &g);

// The number of the gather that begins.
uint64_t count_gather(const PgGroup &g);

// A barrier of all members of all ranks, after which each rank reads what the others have written: list(written) adds what
// this one has.
template <class List>
inline void meet(Member &member, const PgGroup *g, List &&list) {
    member.barrier();
    if (!g) return;
    if (member.id == 0) {
        if (is_linked(*g)) {
            Written written(*g);
            list(written);
            gather(*g, written);
        } else {
            meet_ranks(*g);
        }
    }
    member.barrier();
}

// The same where ranks change only what they have for themselves unless they share it.
inline void meet_sharing(Member &member, const PgGroup *g) {
    member.barrier();
    if (!g || is_linked(*g)) return;
    if (member.id == 0) meet_ranks(*g);
    member.barrier();
}

// Experts of a layer change their ranks (expert_moves.cpp).
constexpr int64_t MOVE_WORDS = sizeof(PgExpertMove) / 8;
void move_experts(const PgModel &m, int64_t layer, const PgExpertMove *moves, int64_t count);

// A meeting at the beginning of an order, after which digests are compared.
void agree(Member &member, const PgGroup *g);

// What the leader is about to compute.  False: the group has ended, or this is more than its memory holds.
bool order_forward(const PgModel &m, const PgStep &step);
bool order_rows(const PgModel &m, OrderKind kind, const float *hidden, int64_t rows, const int64_t *adapters);

// Where each layer's blocks begin in a row of the tables, each such place once.
void list_pools(const PgModel &m, std::vector<int64_t> &pools);
