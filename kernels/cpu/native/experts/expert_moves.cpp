// Whole experts that change their ranks between two steps: what was packed is copied, so that no rank packs anything.
//
// Moves of one order are made together, piece by piece: all ranks that give write a piece into the group's memory, they
// meet, and those that get write it over what they give up.  So two ranks exchange experts without memory for either.
#include <cstring>

#include "experts/expert_pieces.h"
#include "ranks/group.h"

namespace {

int64_t packed_bytes(const PgLinear &w) {
    if (is_coded(w.format)) return pg_coded_bytes(w.n, w.k, std::min(w.group, w.k), &w.coding);
    return pg_packed_bytes(w.n, w.k, w.format, w.group);
}

// Everything that an expert's linears read, as one stretch of bytes.
class ExpertBytes {
  public:
    ExpertBytes(const PgLayer &layer, int64_t expert) {
        for (const PgLinear *w : {&layer.experts->gate_up[expert], &layer.experts->down[expert]}) {
            parts_[count_++] = {(uint8_t *)w->packed, packed_bytes(*w)};
            if (w->bias) parts_[count_++] = {(uint8_t *)w->bias, w->n * 4};
            if (w->gather) parts_[count_++] = {(uint8_t *)w->gather, w->k * 4};
        }
        for (int i = 0; i < count_; i++) bytes += parts_[i].bytes;
    }
    int64_t bytes = 0;

    void read(int64_t first, int64_t n, uint8_t *to) const {
        for_each(first, n, [&](uint8_t *own, int64_t size) { memcpy(to, own, size), to += size; });
    }
    void write(int64_t first, int64_t n, const uint8_t *from) const {
        for_each(first, n, [&](uint8_t *own, int64_t size) { memcpy(own, from, size), from += size; });
    }

  private:
    struct Part {
        uint8_t *at;
        int64_t bytes;
    };
    // Calls body(place, bytes) for what bytes [first, first + n) have of each part.
    template <class Body>
    void for_each(int64_t first, int64_t n, Body &&body) const {
        for (int i = 0; i < count_; first -= parts_[i++].bytes) {
            const int64_t begin = std::max<int64_t>(first, 0), end = std::min(first + n, parts_[i].bytes);
            if (begin < end) body(parts_[i].at + begin, end - begin);
        }
    }
    Part parts_[6];
    int count_ = 0;
};

bool is_move(const PgModel &m, const PgExperts &e, const PgExpertMove &move) {
    const auto has = [&](int64_t rank, int64_t expert) {
        const bool known = rank >= 0 && rank < m.group->ranks && expert >= 0 && expert < e.count;
        return known && (e.holders[expert] >> rank & 1);
    };
    const bool is_known = move.expert >= 0 && move.expert < e.count;
    return is_known && has(move.from, move.expert) && has(move.to, move.dropped) && !has(move.to, move.expert);
}

bool are_moves(const PgModel &m, int64_t layer, const std::vector<PgExpertMove> &moves) {
    if (layer < 0 || layer >= m.num_layers || !m.layers[layer].experts || !has_whole(m, m.layers[layer])) return false;
    for (const PgExpertMove &move : moves)
        if (!is_move(m, *m.layers[layer].experts, move)) return false;
    return !moves.empty();
}

// The rank's linears of one expert are from now on those of another one, whose bytes they have.
void rename(const PgExperts &e, int64_t dropped, int64_t expert) {
    for (PgLinear *each : {e.gate_up, e.down}) each[expert] = each[dropped], each[dropped] = {};
}

}  // namespace

void move_experts(const PgModel &m, int64_t number, const PgExpertMove *ordered, int64_t count) {
    const PgGroup &g = *m.group;
    const std::vector<PgExpertMove> moves(ordered, ordered + count);  // the next order is written over these
    parallel([&](Member &member) { agree(member, &g); });
    if (pg_group_state(&g) != PG_ALIVE) return;
    if (!are_moves(m, number, moves)) return pg_group_end(&g, PG_DISAGREED);
    const PgLayer &layer = m.layers[number];
    const PgExperts &e = *layer.experts;
    int64_t own = 0;
    while (!holds(m, layer, own)) own++;  // each rank has one, and all are packed alike
    const int64_t bytes = ExpertBytes(layer, own).bytes, room = g.slot_bytes / count / 64 * 64;
    if (room <= 0) return pg_group_end(&g, PG_NO_ROOM);
    uint8_t *area = (uint8_t *)areas_of(g, m.hidden).slots;
    parallel([&](Member &member) {
        for (int64_t first = 0; first < bytes; first += room) {
            const int64_t n = std::min(room, bytes - first);
            member.for_each(count, 1, [&](int64_t i, int64_t) {
                if (moves[i].from == g.rank) ExpertBytes(layer, moves[i].expert).read(first, n, area + i * room);
            });
            meet(member, &g, [&](Written &written) {
                for (int64_t i = 0; i < count; i++)
                    if (moves[i].from == g.rank) written.add(area + i * room, 1, 0, n);
            });
            member.for_each(count, 1, [&](int64_t i, int64_t) {
                if (moves[i].to == g.rank) ExpertBytes(layer, moves[i].dropped).write(first, n, area + i * room);
            });
            meet_sharing(member, &g);
        }
    });
    for (const PgExpertMove &move : moves) {
        e.holders[move.dropped] &= ~(1ull << move.to);
        if (move.to == g.rank) rename(e, move.dropped, move.expert);
    }
    for (const PgExpertMove &move : moves) e.holders[move.expert] |= 1ull << move.to;
}
