// What adapters add to the linears of a step: y += B (scale * A x), each row by its own adapter.
//
// It is made before the linear runs, row by row, into a buffer that the linear's results are added to.  Sums have one
// order, of features and of ranks, so that a row depends on itself and its adapter alone.
#pragma once
#include "steps/step.h"

// A linear's place in PgModel::adapters.
enum LoraSlot { LORA_QKV, LORA_OUTPUT, LORA_GATE_UP, LORA_DOWN, LORA_SLOTS };

// What the rows of one linear get.
struct LoraRows {
    const float *added = nullptr;       // [rows, stride], the parts' output features behind each other; NULL: nothing
    int64_t stride = 0;
    const int64_t *adapters = nullptr;  // [rows]; those of rows that get nothing are negative
    int64_t second = 0;                 // where up's features begin, which take turns with gate's in the linear; 0: none
    const Ahead *ahead = nullptr;       // what the linear asks for beside its own weights
    int64_t linear = 0;                 // its place in ahead's shares

    PG_INLINE void add(int64_t row, int64_t column, F &low, F &high) const {
        if (!added || adapters[row] < 0) return;
        const float *own = added + row * stride;
        low = low + load<F>(own + (second ? column / 2 : column));
        high = high + load<F>(own + (second ? second + column / 2 : column + W));
    }
    Target target(const float *rows, int64_t to_next) const { return {rows, to_next, ahead, linear}; }
};

// What an adapter has behind its layers.
constexpr int64_t LORA_HEAD = 0, LORA_EMBEDDING = 1;
inline const PgLora &lora_end(const PgModel &m, int64_t adapter, int64_t which) {
    return m.adapters[adapter][(int64_t)m.num_layers * LORA_SLOTS + which];
}

// Adds to one token's embedding.
void add_embedding(const PgModel &m, int64_t adapter, int64_t id, float *out);

// The same as below for the head: buffers are taken before the team begins, and hold until the next call or step.
struct HeadLora {
    std::vector<int64_t> adapters;  // of the rows; negative: none
    std::vector<LoraGroup> groups;
    float *added = nullptr;  // [rows, stride]
    int64_t stride = 0;

    HeadLora(const PgModel &m, const int64_t *adapters, int64_t rows);
    LoraRows make(Member &member, const PgModel &m, Activations &given) const;
};

// Makes it of what a layer's linear reads, whose rows are converted first where it reads them so, as its weights would
// meet them with the adapter merged into them; others are read before the linear may round them.  A barrier behind it.
// `last`: the rows are the wanted ones.
LoraRows add_lora(Member &member, const Step &s, const PgLayer &layer, LoraSlot slot, Activations &given, bool last);
