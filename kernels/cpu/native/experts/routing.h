// Which experts a token takes, and where its rows are among theirs.
#pragma once
#include <algorithm>

#include "steps/step.h"

// Which experts the rows of a pass take, the shared one as the last of them.  A slot is a row's place with one expert;
// slots are in order of experts, and within an expert of rows.
struct Routing {
    int64_t taken, num_experts;              // the shared one included
    std::vector<int64_t> ids;                // [rows, taken] by rank
    std::vector<float> weights;              // [rows, taken]
    std::vector<int64_t> slots;              // [rows, taken]
    std::vector<int64_t> starts;             // [num_experts + 1] slots
    std::vector<int64_t> row_of, expert_of;  // [rows * taken] of slots
    std::vector<float> weight_of_slot;       // [rows * taken]

    void assign(int64_t rows);
    void add_loads(const PgExperts &e) const;
};

// Counting sort: stable, so that a slot's row never depends on how the team worked.
inline void Routing::assign(int64_t rows) {
    std::fill(starts.begin(), starts.end(), 0);
    for (int64_t i = 0; i < rows * taken; i++) starts[ids[i] + 1]++;
    for (int64_t expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < rows * taken; i++) {
        const int64_t slot = slots[i] = next[ids[i]]++;
        row_of[slot] = i / taken;
        expert_of[slot] = ids[i];
        weight_of_slot[slot] = weights[i];
    }
}

inline void Routing::add_loads(const PgExperts &e) const {
    for (int64_t expert = 0; e.loads && expert < e.count; expert++)
        e.loads[expert] += starts[expert + 1] - starts[expert];
}

inline void softmax(float *x, int64_t n) {
    float peak = x[0];
    for (int64_t i = 1; i < n; i++) peak = x[i] > peak ? x[i] : peak;
    for (int64_t i = n; i < padded(n); i++) x[i] = -__builtin_inff();
    F sums{};
    for (int64_t i = 0; i < n; i += W) {
        const F p = exp(load<F>(x + i) - peak);
        store(x + i, p);
        sums = sums + p;
    }
    const float sum = reduce_add(sums);
    for (int64_t i = 0; i < n; i += W) store(x + i, load<F>(x + i) / sum);
}

// Leaves the groups whose best, or two best, choices are largest; the others' choices are lost.
inline void keep_groups(const PgExperts &e, float *choices) {
    const int64_t size = e.count / e.groups;
    float worth[MAX_GROUPS];
    for (int64_t group = 0; group < e.groups; group++) {
        const float *x = choices + group * size;
        const int64_t best = largest(x, size);
        float second = -__builtin_inff();
        for (int64_t i = 0; i < size; i++)
            if (i != best && x[i] > second) second = x[i];
        worth[group] = size > 1 && e.group_best > 1 ? x[best] + second : x[best];
    }
    bool kept[MAX_GROUPS] = {};
    for (int64_t i = 0; i < e.kept_groups; i++) {
        const int64_t group = largest(worth, e.groups);
        kept[group] = true;
        worth[group] = -__builtin_inff();
    }
    for (int64_t i = 0; i < e.count; i++)
        if (!kept[i / size]) choices[i] = -__builtin_inff();
}

// From the logits of one row, which are changed, to its experts by rank and their weights.
inline void choose(const PgExperts &e, float *logits, float *choices, int64_t *ids, float *weights) {
    const int64_t n = e.count;
    if (e.score == PG_SOFTMAX) softmax(logits, n);
    if (e.score == PG_SIGMOID)
        for (int64_t i = 0; i < n; i += W) store(logits + i, 1.0f / one_plus_exp(-load<F>(logits + i)));
    for (int64_t i = 0; i < n; i++) choices[i] = e.correction ? logits[i] + e.correction[i] : logits[i];
    if (e.kept_groups < e.groups) keep_groups(e, choices);
    for (int64_t rank = 0; rank < e.top_k; rank++) {
        const int64_t id = largest(choices, n);
        choices[id] = -__builtin_inff();
        ids[rank] = id;
        weights[rank] = logits[id];
    }
    if (e.score == PG_SOFTMAX_OF_CHOSEN) {
        float chosen[MAX_TOP_K + NR];
        memcpy(chosen, weights, e.top_k * 4);
        softmax(chosen, e.top_k);
        memcpy(weights, chosen, e.top_k * 4);
    } else if (e.renormalise) {
        float sum = 1e-20f;  // of sigmoids that may all be zero
        for (int64_t rank = 0; rank < e.top_k; rank++) sum += weights[rank];
        for (int64_t rank = 0; rank < e.top_k; rank++) weights[rank] /= sum;
    }
    for (int64_t rank = 0; rank < e.top_k; rank++) weights[rank] *= e.scale;
}
