// What stands between the two linears of an MLP, and where its first one's results go.
#pragma once
#include "layers/ops.h"

PG_INLINE F silu(F x) { return x / one_plus_exp(-x); }

// The same, to be rounded to bfloat16.
PG_INLINE F short_silu(F x) { return x * short_reciprocal(short_exp2(x * -LOG2_E) + 1.0f); }

// x / 2 (1 + tanh(u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
PG_INLINE F gelu_tanh(F x) {
    const F u = fma(x * x * x, splat(0.044715f), x) * 0.7978845608f;
    return x / one_plus_exp(u * -2.0f);
}

PG_INLINE F short_gelu_tanh(F x) {
    const F u = fma(x * x * x, splat(0.044715f), x) * 0.7978845608f;
    return x * short_reciprocal(short_exp2(u * (-2.0f * LOG2_E)) + 1.0f);
}

template <bool SHORT = false>
PG_INLINE F clamped_swiglu(F gate, F up) {
    gate = select(gate > 7.0f, splat(7.0f), gate);
    up = select(up > 7.0f, splat(7.0f), select(up < -7.0f, splat(-7.0f), up));
    if constexpr (SHORT) return gate * short_reciprocal(short_exp2(gate * (-1.702f * LOG2_E)) + 1.0f) * (up + 1.0f);
    return gate / one_plus_exp(gate * -1.702f) * (up + 1.0f);
}

// Calls body(out) with what a layer's first linear hands its results to; it calls put(row, column, value) with W
// columns.
template <class Put, class Body>
void with_activation(const PgLayer &layer, bool rounded, Put &&put, Body &&body) {
    const auto gated = [&](auto function) {
        body([&](int64_t row, int64_t column, F gate, F up) { put(row, column / 2, function(gate, up)); });
    };
    const auto plain = [&](auto function) {
        body([&](int64_t row, int64_t column, F low, F high) {
            put(row, column, function(low));
            put(row, column + W, function(high));
        });
    };
    const bool gelu = layer.activation == PG_GELU_TANH, clamped = layer.activation == PG_CLAMPED_SWIGLU;
    if (rounded) {
        if (!layer.gated && gelu) return plain([](F x) { return short_gelu_tanh(x); });
        if (!layer.gated) return plain([](F x) { return short_silu(x); });
        if (clamped) return gated([](F gate, F up) { return clamped_swiglu<true>(gate, up); });
        if (gelu) return gated([](F gate, F up) { return short_gelu_tanh(gate) * up; });
        return gated([](F gate, F up) { return short_silu(gate) * up; });
    }
    if (!layer.gated) return gelu ? plain([](F x) { return gelu_tanh(x); }) : plain([](F x) { return silu(x); });
    if (clamped) return gated([](F gate, F up) { return clamped_swiglu(gate, up); });
    if (gelu) return gated([](F gate, F up) { return gelu_tanh(gate) * up; });
    gated([](F gate, F up) { return silu(gate) * up; });
}

// The same into inner [rows, stride], or where that is given into `rounded`, as the next linear reads its rows.
struct Inner {
    float *rows;
    int64_t stride;
    uint16_t *rounded;
    RowLayout layout;
    int64_t first = 0;  // features before those of this process
};
template <class Body>
void with_activation(const PgLayer &layer, const Inner &to, Body &&body) {
    if (to.rounded)
        return with_activation(layer, true, [&](int64_t row, int64_t column, F v) {
            store_bf16(to.layout.pair(to.rounded, row, to.first + column), v);
        }, body);
    const auto put = [&](int64_t row, int64_t column, F v) { store(to.rows + row * to.stride + to.first + column, v); };
    with_activation(layer, false, put, body);
}
