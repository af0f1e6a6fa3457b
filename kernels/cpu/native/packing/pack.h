// Where the rows of a weight come from while it is packed.
#pragma once
#include <algorithm>

#include "packing/digest.h"
#include "linears/nibbles.h"

constexpr int64_t AT_ONCE = 1 << 18;  // bytes of rows that a thread takes

inline float value_at(const void *source, int32_t format, int64_t index) {
    return format == PG_F32 ? ((const float *)source)[index] : from_bf16(((const uint16_t *)source)[index]);
}

struct Row {
    const void *values;  // NULL in a panel's columns beyond the last row
    int32_t part;
    int64_t index;  // in its part
    bool summed;
};

// Where rows come from: matrices one below the other, or gate and up taken by turns, W columns of each to a panel.
struct Source {
    const PgRows *parts;
    int32_t num_parts, format;
    bool by_turns;
    int64_t n, k;

    int64_t row_bytes() const { return k * (format == PG_F32 ? 4 : 2); }

    Row row(int64_t row) const {
        if (row >= n) return {nullptr, 0, 0, false};
        int32_t part = 0;
        if (by_turns) {
            part = row % NR >= W;
            row = row / NR * W + row % W;
        } else {
            while (row >= parts[part].n) row -= parts[part++].n;
        }
        return {(const uint8_t *)parts[part].rows + row * row_bytes(), part, row, parts[part].sums != nullptr};
    }
};

// Adds rows, some at a time, to the sums of their parts.
inline void sum_rows(const Row *rows, int64_t count, int64_t bytes, RowSums *sums) {
    const Row *summed[NR];
    int64_t many = 0;
    for (int64_t r = 0; r < count; r++)
        if (rows[r].summed) summed[many++] = rows + r;
    for (int64_t i = 0; i < many; i += RowSums::MANY)
        for (int64_t at = 0; at < bytes; at += RowSums::PIECE) {
            const uint8_t *pieces[RowSums::MANY];
            uint32_t found[RowSums::MANY];
            for (int r = 0; r < RowSums::MANY; r++) pieces[r] = (const uint8_t *)summed[std::min(i + r, many - 1)]->values + at;
            RowSums::sum_pieces(pieces, std::min(bytes - at, RowSums::PIECE), found);
            for (int64_t r = i; r < std::min(i + RowSums::MANY, many); r++)
                sums[summed[r]->part].add(RowSums::number(summed[r]->index, bytes, at), found[r - i]);
        }
}

// One panel of PG_I4, quantised here: symmetric and to the nearest, as kernels/ops/linears/codes.py says.
void pack_nibbles(const Source &s, int64_t panel, const Nibbles &out, RowSums *sums);

// Whose row a column of the packed weight is, and which of it; NULL beyond the last.
inline const PgCodes *part_of(const PgCodes *parts, int32_t num_parts, bool by_turns, int64_t &row) {
    if (by_turns) {
        const PgCodes *part = parts + (row % NR >= W);
        row = row / NR * W + row % W;
        return row < part->n ? part : nullptr;
    }
    for (int32_t i = 0; i < num_parts; row -= parts[i++].n)
        if (row < parts[i].n) return parts + i;
    return nullptr;
}
