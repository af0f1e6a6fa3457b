// What of a mixture this process computes, in tickets, and rows as its experts' kernels read them.
#pragma once
#include "experts/routing.h"

// One ticket: these slots of an expert times these panels of its weight.
struct Piece {
    int64_t expert, first, last, begin, end;
};

inline bool has_shared(const PgLayer &layer) { return layer.gate_up.packed != nullptr; }

// Whether ranks of a group have whole experts each, in the place of a part of every one; the shared one is always cut.
inline bool has_whole(const PgModel &m, const PgLayer &layer) { return m.group && layer.experts->holders; }

inline const PgLinear &weight_of(const PgLayer &layer, int64_t expert, bool second) {
    if (expert == layer.experts->count) return second ? layer.down : layer.gate_up;
    return (second ? layer.experts->down : layer.experts->gate_up)[expert];
}

// Whether this process has the expert, or a part of it.
inline bool holds(const PgModel &m, const PgLayer &layer, int64_t expert) {
    const bool whole = has_whole(m, layer) && expert < layer.experts->count;
    return !whole || layer.experts->holders[expert] >> m.group->rank & 1;
}

// The slots of an expert that this process computes: all, or of an expert that several ranks have whole, its share.
struct Share {
    int64_t first, last;
};
inline Share share_of(const PgModel &m, const PgLayer &layer, const Routing &routing, int64_t expert) {
    const int64_t first = routing.starts[expert], rows = routing.starts[expert + 1] - first;
    if (!holds(m, layer, expert)) return {first, first};
    if (!has_whole(m, layer) || expert == layer.experts->count) return {first, first + rows};
    const uint64_t holders = layer.experts->holders[expert], before = holders & ((1ull << m.group->rank) - 1);
    const int64_t count = __builtin_popcountll(holders), place = __builtin_popcountll(before);
    return {first + rows * place / count, first + rows * (place + 1) / count};
}

// Whether all experts' second linears read rows as tiles of bfloat16: the first ones then write them so.  Of whole
// experts, those that a rank has not are as its own.
inline bool writes_rounded(const PgModel &m, const PgLayer &layer, const Routing &routing, bool round) {
    for (int64_t expert = 0; expert < routing.num_experts; expert++)
        if (holds(m, layer, expert) && !reads_rounded(weight_of(layer, expert, true), round)) return false;
    return true;
}

// The first linear of some expert of this process.
inline const PgLinear &any_first(const PgModel &m, const PgLayer &layer) {
    int64_t expert = 0;
    while (expert + 1 < layer.experts->count && !holds(m, layer, expert)) expert++;
    return layer.experts->gate_up[expert];
}

// One expert after the other: what a member reads comes in long stretches.  Where rows are `passed` from a piece of the
// first linears to those of the second, both have the same.  `blocks`: the same slots, of all panels each.
inline void list_pieces(const PgModel &m, const PgLayer &layer, const Routing &routing, bool second, bool passed,
                        int members, std::vector<Piece> &pieces, std::vector<Piece> &blocks) {
    const bool round = m.round_activations != 0;
    const auto each_block = [&](auto &&body) {
        for (int64_t expert = 0; expert < routing.num_experts; expert++) {
            const Share own = share_of(m, layer, routing, expert);
            const int64_t start = own.first, rows = own.last - start;
            if (!rows) continue;
            const PgLinear &w = weight_of(layer, expert, second);
            const PgLinear &other = weight_of(layer, expert, !second);
            const bool tiled = by_tiles(kernel_of(w, round), w, rows);
            const int64_t longest = passed && other.k > w.k ? other.k : w.k;
            const int64_t count = tiled || passed ? tiled_blocks(rows, longest) : row_blocks(rows, w.k);
            for (int64_t b = 0; b < count; b++)
                body(expert, start + rows * b / count, start + rows * (b + 1) / count, (w.n + NR - 1) / NR);
        }
    };
    int64_t all = 0;
    each_block([&](int64_t, int64_t, int64_t, int64_t panels) { all += panels; });
    const int64_t piece = panels_at_once(all, members);
    pieces.clear();
    blocks.clear();
    each_block([&](int64_t expert, int64_t first, int64_t last, int64_t panels) {
        blocks.push_back({expert, first, last, 0, panels});
        for (int64_t begin = 0; begin < panels; begin += piece)
            pieces.push_back({expert, first, last, begin, std::min(begin + piece, panels)});
    });
}

// Into what the kernel of a weight reads; `gap` as RowLayout has it.  Returns the scale of bytes.
inline float convert(const PgLinear &w, bool round, const float *from, void *to, int64_t gap) {
    const Kernel kernel = kernel_of(w, round);
    if (kernel == DOT_I8) return quantize_row(from, w.k, (uint8_t *)to, gap);
    if (kernel == DOT_I4) {
        quantize_groups(from, w, (uint8_t *)to);
        return 0;
    }
    if (kernel == DOT_BF16) {
        to_bf16_row(from, w.k, (uint16_t *)to, gap);
        return 0;
    }
    memcpy(to, from, w.k * 4);
    if (round) round_row((float *)to, w.k);
    return 0;
}

// A converted row to another place.
inline void copy_row(const uint8_t *from, int64_t bytes, uint8_t *to, int64_t gap) {
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64, to += gap) memcpy(to, from + i, 64);
    if (i < bytes) memcpy(to, from + i, bytes - i);
}

inline bool read_alike(const PgLinear &one, const PgLinear &other) {
    return one.format == other.format && one.k == other.k && one.group == other.group && one.gather == other.gather;
}
