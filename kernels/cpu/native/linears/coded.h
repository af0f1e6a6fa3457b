// Weights that stay the codes that a checkpoint has, and become numbers while they are multiplied.
//
// A piece of a panel is decoded to what gemm.h packs, F32 or BF16, in the nearest cache, and multiplied there by the same
// instructions in the same order: results have the bits of weights that were decoded when they were loaded.
//
// A panel of NR columns has its groups one behind the other, each as
//     scales [NR] float32, bfloat16 or float16
//     zeros [NR] octets, where there are any; else integers of 4 bits are around 8, those of 8 bits around 128
//     PG_W4, PG_E2M1   [features / 8][NR] words of 32 bits: feature i of these eight in bits 4 i ... 4 i + 3
//     PG_W8            [features / 4][NR] words of 32 bits: an octet for each feature
//     PG_E4M3          the same, but features 1 and 2 change places: halves of words are neighbours then
#pragma once
#include "pageant.h"
#include "simd.h"

inline bool is_coded(int32_t format) {
    return format == PG_W4 || format == PG_W8 || format == PG_E2M1 || format == PG_E4M3;
}

struct Coded {
    const uint8_t *packed;
    int64_t k, group;
    int32_t format, scales;
    bool zeros;

    bool nibbles() const { return format == PG_W4 || format == PG_E2M1; }
    int64_t word() const { return nibbles() ? 8 : 4; }  // features
    int64_t groups() const { return (k + group - 1) / group; }
    int64_t scale_bytes() const { return scales == PG_F32 ? 4 : 2; }
    int64_t head_bytes() const { return NR * (scale_bytes() + zeros); }
    int64_t code_bytes(int64_t features) const { return NR * features * 4 / word(); }
    int64_t group_bytes() const { return head_bytes() + code_bytes(group); }
    int64_t panel_bytes() const { return groups() * head_bytes() + code_bytes(k); }
    int64_t features(int64_t index) const { return index + 1 < groups() ? group : k - index * group; }
};

inline Coded coded_of(const void *packed, int64_t k, int64_t group, const PgCoding &coding) {
    return {(const uint8_t *)packed, k, group < k ? group : k, coding.format, coding.scales, coding.zeros != 0};
}

// Rows [first, first + rows), at most CODED_ROWS, times as many panels as go together, at most end - panel, into results
// [panels][rows][NR]; returns how many.
constexpr int64_t CODED_ROWS = 512;
constexpr int64_t CODED_RESULTS = CODED_ROWS * NR;
