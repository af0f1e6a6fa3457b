// What stands between the two linears of an MLP, and where its first one's results go.
#pragma once
#include "ops.h"

PG_INLINE F silu(F x) { return x / one_plus_exp(-x); }

// x / 2 (1 + tanh(u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
PG_INLINE F gelu_tanh(F x) {
    const F u = fma(x * x * x, splat(0.044715f), x) * 0.7978845608f;
    return x / one_plus_exp(u * -2.0f);
}

PG_INLINE F clamped_swiglu(F gate, F up) {
    gate = select(gate > 7.0f, splat(7.0f), gate);
    up = select(up > 7.0f, splat(7.0f), select(up < -7.0f, splat(-7.0f), up));
    return gate / one_plus_exp(gate * -1.702f) * (up + 1.0f);
}

// Calls body(out) with what a layer's first linear hands its results to, for inner [rows, stride].
template <class Body>
void with_activation(const PgLayer &layer, float *inner, int64_t stride, Body &&body) {
    const auto gated = [&](auto function) {
        body([&](int64_t row, int64_t column, F gate, F up) {
            store(inner + row * stride + column / 2, function(gate, up));
        });
    };
    const auto plain = [&](auto function) {
        body([&](int64_t row, int64_t column, F low, F high) {
            float *out = inner + row * stride + column;
            store(out, function(low));
            store(out + W, function(high));
        });
    };
    const bool gelu = layer.activation == PG_GELU_TANH;
    if (!layer.gated) return gelu ? plain([](F x) { return gelu_tanh(x); }) : plain([](F x) { return silu(x); });
    if (layer.activation == PG_CLAMPED_SWIGLU) return gated([](F gate, F up) { return clamped_swiglu(gate, up); });
    if (gelu) return gated([](F gate, F up) { return gelu_tanh(gate) * up; });
    gated([](F gate, F up) { return silu(gate) * up; });
}
