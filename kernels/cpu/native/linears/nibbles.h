// Weights of 4 bits and activations of 8 bits, both scaled by groups of input features (kernels/ops/linears/linear_codes.py).
//
// A panel of NR columns has its groups one behind the other, each as
//     scales [NR] float16                                PG_I4, whose zeros are all 8
//     scales [NR] float32, then zeros [NR] uint16        PG_U4
//     [features / 8][NR] words of 32 bits: byte b has feature b of these eight in its low half, 4 + b in the high one
// A row of activations has its groups as int8 [features], then its scale and what zeros make of it: minus the sum of
// the features, eight times that for PG_I4.
#pragma once
#include "pageant.h"
#include "simd.h"

struct Nibbles {
    const uint8_t *packed;
    int64_t k, group;
    bool wide;  // PG_U4

    int64_t groups() const { return (k + group - 1) / group; }
    int64_t head_bytes() const { return NR * (wide ? 6 : 2); }
    int64_t group_bytes() const { return head_bytes() + NR * group / 2; }
    int64_t panel_bytes() const { return groups() * head_bytes() + NR * k / 2; }
    int64_t features(int64_t index) const { return index + 1 < groups() ? group : k - index * group; }
};

inline bool is_nibbles(int32_t format) { return format == PG_I4 || format == PG_U4; }

inline Nibbles nibbles_of(const void *packed, int64_t k, int32_t format, int64_t group) {
    return {(const uint8_t *)packed, k, group < k ? group : k, format == PG_U4};
}
inline Nibbles nibbles_of(const PgLinear &w) { return nibbles_of(w.packed, w.k, w.format, w.group); }

constexpr int64_t ROW_HEAD = 8;  // bytes behind a group of activations
constexpr int64_t ZERO = 8;      // of PG_I4

void quantize_groups(const float *x, const Nibbles &w, uint8_t *out);
void quantize_groups(const float *x, const PgLinear &w, uint8_t *out);  // in the order of the weight's columns

// Rows [first, last) of activations, `stride` bytes apart, times as many panels as go together, at most end - panel,
// into results [panels][last - first][NR]; returns how many.
constexpr int64_t MOST_NIBBLE_ROWS = 288;
constexpr int64_t NIBBLE_RESULTS = MOST_NIBBLE_ROWS * NR;
int multiply_nibbles(const uint8_t *rows, int64_t stride, int64_t first, int64_t last, const Nibbles &w, int64_t panel,
                     int64_t end, float *results);

void read_nibbles(const Nibbles &w, int64_t row, float *out);  // one row [k] as numbers
