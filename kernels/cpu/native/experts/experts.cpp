// A mixture of experts, as one loop over all experts' rows and panels for each of its two linears.
#include <algorithm>

#include "layers/activation.h"
#include "experts/expert_pieces.h"

namespace {

// Passes bound the memory that slots take; each reads an expert's weights once for all its rows.
constexpr int64_t SLOT_BYTES = 96 << 20, FEWEST_AT_ONCE = 512;

struct Scratch {
    Routing routing;
    std::vector<Piece> pieces[2];  // of the first linears and of the second
    std::vector<Piece> blocks;     // the same slots, of all panels each
    Buffer logits, choices, slots, inner;
    Buffer given, scales;           // rows as the experts' first linears read them, and the scales of bytes
    Buffer gathered[Member::MOST];  // of each member: the rows of its ticket
} scratch;

int64_t logits_stride(const PgExperts &e) { return padded(e.count) + NR; }  // the shared expert's behind the others'

// Each row's experts and weights, from what stands in `given`; calls also(row) when the router has read all rows.
template <class Also>
void route(Member &member, const PgLayer &layer, const Activations &given, Also &&also) {
    const PgExperts &e = *layer.experts;
    Routing &routing = scratch.routing;
    const int64_t stride = logits_stride(e), taken = routing.taken;
    float *logits = scratch.logits.get<float>(0), *choices = scratch.choices.get<float>(0);
    const auto product = [&](const PgLinear &w, int64_t offset) {
        linear(member, given, w, [&](int64_t row, int64_t column, F low, F high) {
            store(logits + row * stride + offset + column, low);
            store(logits + row * stride + offset + column + W, high);
        });
        member.barrier();
    };
    const bool shared = has_shared(layer), gated = shared && e.shared_gate.packed;
    product(e.router, 0);
    if (gated) product(e.shared_gate, padded(e.count));
    member.for_each(given.m, 1, [&](int64_t row, int64_t) {
        float *own = logits + row * stride;
        float *weights = routing.weights.data() + row * taken;
        int64_t *ids = routing.ids.data() + row * taken;
        const float gate = gated ? (1.0f / one_plus_exp(splat(-own[padded(e.count)])))[0] : 1.0f;
        choose(e, own, choices + row * stride, ids, weights);
        if (shared) ids[e.top_k] = e.count, weights[e.top_k] = gate;
        also(row);
    });
    member.barrier();
}

// Rows that were converted once for all slots: as `like` reads them.
struct Given {
    const PgLinear &like;
    const uint8_t *rows;
    RowLayout layout;
    const float *scales;
};

// Slots' rows of bfloat16 as the second linears read them, those of a piece as its RowLayout has them.
struct Passed {
    uint16_t *rows;  // NULL: none
    int64_t stride;  // of a slot

    uint16_t *of(const Piece &p) const { return rows + p.first * stride; }
    RowLayout layout(const PgLayer &layer, const Piece &p) const {
        return layout_of(DOT_BF16, weight_of(layer, p.expert, true), p.last - p.first);
    }
};

// All slots' rows times their experts' weights.  A slot's row is `passed`, or one of `given`, or from(slot) to be
// converted.  out(piece) is called with each piece, for what its results go to: slot, column and both halves.
template <class From, class Out>
void multiply_slots(Member &member, const PgLayer &layer, bool second, bool round, const Passed &passed,
                    const Given *given, From &&from, Out &&out) {
    const std::vector<Piece> &pieces = scratch.pieces[second];
    const Routing &routing = scratch.routing;
    member.for_each((int64_t)pieces.size(), 1, [&](int64_t i, int64_t) {
        const Piece &p = pieces[i];
        const PgLinear &w = weight_of(layer, p.expert, second);
        const Kernel kernel = kernel_of(w, round);
        const int64_t count = p.last - p.first;
        const RowLayout layout = layout_of(kernel, w, count);
        const auto own = out(p);
        const auto finish = [&](int64_t row, int64_t column, F low, F high) {
            add_bias(w, column, low, high);
            own(row, column, low, high);
        };
        Clock::enter(PG_LINEARS);
        if (second && passed.rows) {
            const Rows rows = passed.layout(layer, p).rows(kernel, passed.of(p), nullptr);
            return block(kernel, rows, 0, count, w, p.begin, p.end, finish);
        }
        const bool ready = given && read_alike(given->like, w);
        if (ready && count == 1) {
            const int64_t row = routing.row_of[p.first];
            const Rows one = layout.rows(kernel, given->rows + given->layout.at(row), given->scales + row);
            return block(kernel, one, 0, 1, w, p.begin, p.end, finish);
        }
        Clock::enter(PG_CONVERTING);
        float *scales = scratch.gathered[member.id].get<float>(padded(count) + count * layout.stride(layout.bytes) / 4);
        uint8_t *rows = (uint8_t *)(scales + padded(count));
        for (int64_t r = 0; r < count; r++) {
            const int64_t slot = p.first + r, row = routing.row_of[slot];
            uint8_t *to = rows + layout.at(r);
            if (ready) {
                copy_row(given->rows + given->layout.at(row), layout.bytes, to, layout.gap(r));
                scales[r] = given->scales[row];
            } else {
                scales[r] = convert(w, round, from(slot), to, layout.gap(r));
            }
        }
        Clock::enter(PG_LINEARS);
        block(kernel, layout.rows(kernel, rows, scales), 0, count, w, p.begin, p.end, finish);
    });
    release_tiles();
    member.barrier();
}

// A row's weighted sum of its slots: by rank, or in order of experts, which is that of slots.
void sum_slots(int64_t row, bool by_expert, const float *slots, int64_t hidden, int64_t stride, float *sum) {
    const Routing &routing = scratch.routing;
    const int64_t taken = routing.taken;
    int64_t own[MAX_TOP_K + 1];
    std::copy_n(routing.slots.data() + row * taken, taken, own);
    if (by_expert) std::sort(own, own + taken);
    for (int64_t i = 0; i < hidden; i += W) {
        F v{};
        for (int64_t rank = 0; rank < taken; rank++)
            v = fma(splat(routing.weight_of_slot[own[rank]]), load<F>(slots + own[rank] * stride + i), v);
        store(sum + i, v);
    }
}

// What a member adds up at a time of the second linears: so many panels of all rows stay in the second-level cache.
constexpr int64_t SUMMED_BYTES = 1 << 20, FEWEST_PIECES = 3;  // of each member

// Panels of a ticket of sum_columns, or 0: rows are too few, or members too many.
int64_t summed_panels(int64_t rows, int64_t panels, int members) {
    const int64_t fitting = std::min(SUMMED_BYTES / (rows * NR * 4), panels / (FEWEST_PIECES * members));
    return rows < FEWEST_AT_ONCE / 2 ? 0 : std::min<int64_t>(fitting, 4);
}

// Weighted sums of the passed rows' products into sums [rows, stride], some panels after the other, each of all experts:
// no product goes through memory.  The order is that of the experts, as in sum_slots.
void sum_columns(Member &member, const PgLayer &layer, const Passed &passed, int64_t rows, int64_t at_once, float *sums,
                 int64_t stride) {
    const Routing &routing = scratch.routing;
    const int64_t panels = (weight_of(layer, 0, true).n + NR - 1) / NR;
    member.for_each(panels, at_once, [&](int64_t begin, int64_t end) {
        Clock::enter(PG_LINEARS);
        for (int64_t row = 0; row < rows; row++) memset(sums + row * stride + begin * NR, 0, (end - begin) * NR * 4);
        for (const Piece &p : scratch.blocks) {
            const PgLinear &w = weight_of(layer, p.expert, true);
            const Rows given = passed.layout(layer, p).rows(DOT_BF16, passed.of(p), nullptr);
            block(DOT_BF16, given, 0, p.last - p.first, w, begin, end, [&](int64_t row, int64_t column, F low, F high) {
                const int64_t slot = p.first + row;
                const F weight = splat(routing.weight_of_slot[slot]);
                float *sum = sums + routing.row_of[slot] * stride + column;
                add_bias(w, column, low, high);
                store(sum, fma(weight, low, load<F>(sum)));
                store(sum + W, fma(weight, high, load<F>(sum + W)));
            });
        }
    });
    release_tiles();
    member.barrier();
}

// What stands between experts' linears, where ranks of a group have it together.
float *slots_between(const PgModel &m) {
    return m.group ? areas_of(*m.group, m.hidden).experts : scratch.inner.get<float>(0);
}

// What experts give: of whole ones, all ranks have it together.
float *slots_given(const PgModel &m, const PgLayer &layer) {
    return has_whole(m, layer) ? areas_of(*m.group, m.hidden).slots : scratch.slots.get<float>(0);
}

// What this rank has between experts' linears that others read: of whole experts nothing, but of the shared one.
void list_inner(const PgModel &m, const PgLayer &layer, const Passed &passed, const float *inner, int64_t stride,
                Written &written) {
    for (const Piece &p : scratch.blocks) {
        const bool shared = p.expert == layer.experts->count;
        if (!shared && has_whole(m, layer)) continue;
        const int64_t first = shared ? layer.first_inner : layer.first_expert;
        const int64_t width = weight_of(layer, p.expert, false).n / (layer.gated ? 2 : 1);
        if (passed.rows) written.add_rounded(passed.of(p), passed.layout(layer, p), first, width);
        else written.add_columns(inner + p.first * stride, stride, p.last - p.first, first, width);
    }
}

// Where in a slot a rank's results of whole experts begin: the shared one's are a part.
int64_t first_given(const PgModel &m, const PgLayer &layer, const Piece &p) {
    return p.expert == layer.experts->count ? m.first_hidden : 0;
}

// What whole experts give, by slots that all ranks fill together, goes into the residual, in the order that one process
// has.  Ranks that share memory divide the rows.
void add_slots(Member &member, const Step &s, const PgLayer &layer, bool by_expert, float *residual, int64_t first,
               int64_t rows) {
    const PgModel &m = s.m;
    const int64_t stride = s.hidden_stride;
    const float *slots = slots_given(m, layer);
    meet(member, m.group, [&](Written &written) {
        for (const Piece &p : scratch.blocks)
            written.add_columns(slots + p.first * stride, stride, p.last - p.first, first_given(m, layer, p),
                                weight_of(layer, p.expert, true).n);
    });
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        if (!s.is_mine(row)) return;
        float *sum = s.normed + (first + row) * stride;
        sum_slots(row, by_expert, slots, m.hidden, stride, sum);
        add_row(s, layer.mlp_output_norm, sum, residual + (first + row) * stride);
    });
    meet_sharing(member, m.group);
}

// Rows [first, first + rows) of s.normed through their experts, whose sum is added to the residual.
void mix_rows(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t first, int64_t rows) {
    const PgModel &m = s.m;
    const Routing &routing = scratch.routing;
    const bool round = m.round_activations != 0;
    const int64_t taken = routing.taken, stride = s.hidden_stride, inner_stride = s.expert_stride;
    float *normed = s.normed + first * stride, *slots = slots_given(m, layer);
    float *inner = slots_between(m), *scales = scratch.scales.get<float>(0);
    const PgLinear &like = any_first(m, layer);
    const bool whole = has_whole(m, layer);
    uint8_t *converted = scratch.given.get<uint8_t>(0);
    RowLayout plain = layout_of(kernel_of(like, round), like, rows);
    plain.tiled = false;
    const Given given{like, converted, plain, scales};
    const bool passes = writes_rounded(m, layer, routing, round);
    const Passed passed{passes ? (uint16_t *)inner : nullptr, 2 * inner_stride};
    route(member, layer, s.activations(normed, stride, rows), [&](int64_t row) {
        scales[row] = convert(like, round, normed + row * stride, converted + plain.at(row), plain.gap(row));
    });
    if (member.id == 0) {
        scratch.routing.assign(rows);
        scratch.routing.add_loads(*layer.experts);
        for (bool second : {false, true})
            list_pieces(m, layer, routing, second, passes, member.count, scratch.pieces[second], scratch.blocks);
    }
    member.barrier();
    const auto row_of_slot = [&](int64_t slot) { return normed + routing.row_of[slot] * stride; };
    Inner to{inner, inner_stride, passed.rows, {}};  // of the piece that this member is at
    with_activation(layer, to, [&](auto &&out) {
        multiply_slots(member, layer, false, round, passed, &given, row_of_slot, [&](const Piece &p) {
            to.first = p.expert == layer.experts->count ? layer.first_inner : layer.first_expert;
            if (passed.rows) to.rounded = passed.of(p), to.layout = passed.layout(layer, p);
            else to.rows = inner + p.first * inner_stride;
            return out;
        });
    });
    if (m.group && (!whole || has_shared(layer)))
        meet(member, m.group, [&](Written &written) { list_inner(m, layer, passed, inner, inner_stride, written); });
    const int64_t own = whole ? m.hidden : layer.experts->down[0].n;  // features of the hidden states: all, or this rank's
    const int64_t at_once = passes && !whole ? summed_panels(rows, (own + NR - 1) / NR, member.count) : 0;
    if (at_once) {
        sum_columns(member, layer, passed, rows, at_once, normed, stride);
    } else {
        const auto inner_of_slot = [&](int64_t slot) { return inner + slot * inner_stride; };
        multiply_slots(member, layer, true, round, passed, nullptr, inner_of_slot, [&](const Piece &p) {
            const int64_t begin = whole ? first_given(m, layer, p) : 0;
            return [&, to = slots + p.first * stride + begin](int64_t row, int64_t column, F low, F high) {
                store(to + row * stride + column, low);
                store(to + row * stride + column + W, high);
            };
        });
    }
    if (whole) return add_slots(member, s, layer, passes, residual, first, rows);
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        float *sum = normed + row * stride, *to = residual + (first + row) * stride + m.first_hidden;
        if (!at_once) sum_slots(row, passes, slots, own, stride, sum);
        if (!m.group) return add_row(s, layer.mlp_output_norm, sum, to);
        if (layer.mlp_output_norm.weight) memcpy(s.joined + (first + row) * stride + m.first_hidden, sum, own * 4);
        else add_features(s, own, sum, to);
    });
    meet(member, m.group, [&](Written &written) {
        const float *rows_of = layer.mlp_output_norm.weight ? s.joined : residual;
        written.add_columns(rows_of + first * stride, stride, rows, m.first_hidden, own);
    });
    if (!m.group || !layer.mlp_output_norm.weight) return;
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        const int64_t at = (first + row) * stride;
        if (s.is_mine(row)) add_row(s, layer.mlp_output_norm, s.joined + at, residual + at);
    });
    meet_sharing(member, m.group);
}

void begin_layer(const PgLayer &layer, int64_t rows) {
    Routing &routing = scratch.routing;
    const int64_t shared = has_shared(layer);
    routing.taken = layer.experts->top_k + shared;
    routing.num_experts = layer.experts->count + shared;
    for (std::vector<int64_t> *one : {&routing.ids, &routing.slots, &routing.row_of, &routing.expert_of})
        one->resize(rows * routing.taken);
    routing.weights.resize(rows * routing.taken);
    routing.weight_of_slot.resize(rows * routing.taken);
    routing.starts.resize(routing.num_experts + 1);
}

}  // namespace

namespace {

// How many rows of a pass have room for what its slots hold.
int64_t rows_at_once(const PgModel &m, const PgLayer &layer) {
    const int64_t taken = layer.experts->top_k + has_shared(layer);
    const int64_t bytes = 4 * taken * (row_stride(m.hidden) + row_stride(std::max(layer.experts->inner, layer.inner)));
    return std::max(SLOT_BYTES / bytes, FEWEST_AT_ONCE);
}

// Of a pass through any layer.
int64_t most_slots(const PgModel &m) {
    int64_t slots = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (layer.experts) slots = std::max(slots, rows_at_once(m, layer) * (layer.experts->top_k + 1));  // one is shared
    }
    return slots;
}

// From one slot to the next between experts' linears.
int64_t widest_expert(const PgModel &m) {
    int64_t stride = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (layer.experts) stride = std::max({stride, row_stride(layer.experts->inner), row_stride(layer.inner)});
    }
    return stride;
}

}  // namespace

int64_t reserve_experts(const PgModel &m, int64_t all) {
    const int64_t stride = widest_expert(m);
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (!layer.experts) continue;
        const int64_t rows = std::min(all, rows_at_once(m, layer));
        const int64_t taken = layer.experts->top_k + has_shared(layer);
        scratch.logits.get<float>(rows * logits_stride(*layer.experts));
        scratch.choices.get<float>(rows * logits_stride(*layer.experts));
        if (!has_whole(m, layer)) scratch.slots.get<float>(rows * taken * row_stride(m.hidden));
        if (!m.group) scratch.inner.get<float>(rows * taken * stride);
        scratch.given.get<uint8_t>(rows * RowLayout::stride(4 * m.hidden));
        scratch.scales.get<float>(rows);
    }
    return stride;
}

extern "C" int64_t pg_expert_bytes(const PgModel *model) { return most_slots(*model) * widest_expert(*model) * 4; }

extern "C" int64_t pg_slot_bytes(const PgModel *model) { return most_slots(*model) * row_stride(model->hidden) * 4; }

void mix_experts(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows) {
    const int64_t most = rows_at_once(s.m, layer);
    if (member.id == 0) begin_layer(layer, std::min(rows, most));
    member.barrier();
    for (int64_t first = 0; first < rows; first += most)
        mix_rows(member, s, layer, residual, first, std::min(rows - first, most));
}

extern "C" void pg_route(const PgModel *model, const PgLayer *layer, const float *x, int64_t m, int64_t *ids,
                         float *weights) {
    const PgExperts &e = *layer->experts;
    PgModel one = *model;
    one.layers = layer, one.num_layers = 1;
    const int64_t most = rows_at_once(one, *layer);
    for (int64_t first = 0; first < m; first += most) {
        const int64_t rows = std::min(m - first, most);
        const Activations given = spread(x + first * one.hidden, rows, one.hidden, one.round_activations != 0);
        reserve_experts(one, rows);
        begin_layer(*layer, rows);
        parallel([&](Member &member) { route(member, *layer, given, [](int64_t) {}); });
        const Routing &routing = scratch.routing;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t rank = 0; rank < e.top_k; rank++) {
                ids[(first + row) * e.top_k + rank] = routing.ids[row * routing.taken + rank];
                weights[(first + row) * e.top_k + rank] = routing.weights[row * routing.taken + rank];
            }
    }
}
