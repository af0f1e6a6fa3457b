// Linear attention: a short convolution and the gated delta rule, over states that stay from step to step.
#pragma once
#include <vector>

#include "layers/ops.h"

// A sequence's tokens of one step, which pass through its state one after the other.
struct Sequence {
    int64_t slot;          // of its state
    int64_t first, count;  // rows of the step
    bool is_new;           // its state begins as zeros, whatever is in the slot
};
void list_sequences(const PgStep &s, std::vector<Sequence> &sequences);

// The rows of a step on their way through one layer.
struct DeltaRows {
    const PgDelta &delta;
    const std::vector<Sequence> &sequences;
    float *mixed;  // [rows, stride]: queries, keys, values; the values become results
    int64_t stride;
    float *gates;  // [rows, gates_stride]: what becomes beta, and behind it what becomes the decay
    int64_t gates_stride;
};

inline int64_t key_features(const PgDelta &d) { return (int64_t)d.key_heads * d.key_dim; }
inline int64_t value_features(const PgDelta &d) { return (int64_t)d.value_heads * d.value_dim; }
inline int64_t channels(const PgDelta &d) { return 2 * key_features(d) + value_features(d); }

// Where the gates of a row stand, behind what qkv gives: linears write whole panels.
inline int64_t gates_offset(const PgDelta &d) { return (channels(d) + value_features(d) + NR - 1) / NR * NR; }

// The members' shares of the parts, in this order; no barrier after any of them.
void convolve(Member &member, const DeltaRows &r);
void prepare_delta(Member &member, const DeltaRows &r, int64_t rows);  // lengths of queries and keys; gates
void apply_delta_rule(Member &member, const DeltaRows &r);
