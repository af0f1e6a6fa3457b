// A mixture of experts, as one loop over all experts' rows and panels for each of its two linears.
#include <algorithm>

#include "activation.h"
#include "step.h"

namespace {

// Passes bound the memory that slots take; each reads an expert's weights once for all its rows.
constexpr int64_t SLOT_BYTES = 96 << 20, FEWEST_AT_ONCE = 512;

// Which experts the rows of a pass take, the shared one as the last of them.  A slot is a row's place with one expert;
// slots are in order of experts, and within an expert of rows.
struct Routing {
    int64_t taken, num_experts;              // the shared one included
    std::vector<int64_t> ids;                // [rows, taken] by rank
    std::vector<float> weights;              // [rows, taken]
    std::vector<int64_t> slots;              // [rows, taken]
    std::vector<int64_t> starts;             // [num_experts + 1] slots
    std::vector<int64_t> row_of, expert_of;  // [rows * taken] of slots

    void assign(int64_t rows);
};

// One ticket: these slots of an expert times these panels of its weight.
struct Piece {
    int64_t expert, first, last, begin, end;
};

struct Scratch {
    Routing routing;
    std::vector<Piece> pieces[2];  // of the first linears and of the second
    Buffer logits, choices, slots, inner;
    Buffer given, scales;           // rows as the experts' first linears read them, and the scales of bytes
    Buffer gathered[Member::MOST];  // of each member: the rows of its ticket
} scratch;

// Counting sort: stable, so that a slot's row never depends on how the team worked.
void Routing::assign(int64_t rows) {
    std::fill(starts.begin(), starts.end(), 0);
    for (int64_t i = 0; i < rows * taken; i++) starts[ids[i] + 1]++;
    for (int64_t expert = 0; expert < num_experts; expert++) starts[expert + 1] += starts[expert];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < rows * taken; i++) {
        const int64_t slot = slots[i] = next[ids[i]]++;
        row_of[slot] = i / taken;
        expert_of[slot] = ids[i];
    }
}

int64_t logits_stride(const PgExperts &e) { return padded(e.count) + NR; }  // the shared expert's behind the others'

bool has_shared(const PgLayer &layer) { return layer.gate_up.packed != nullptr; }

const PgLinear &weight_of(const PgLayer &layer, int64_t expert, bool second) {
    if (expert == layer.experts->count) return second ? layer.down : layer.gate_up;
    return (second ? layer.experts->down : layer.experts->gate_up)[expert];
}

void softmax(float *x, int64_t n) {
    float peak = x[0];
    for (int64_t i = 1; i < n; i++) peak = x[i] > peak ? x[i] : peak;
    for (int64_t i = n; i < padded(n); i++) x[i] = -__builtin_inff();
    F sums{};
    for (int64_t i = 0; i < n; i += W) {
        const F p = exp(load<F>(x + i) - peak);
        store(x + i, p);
        sums = sums + p;
    }
    const float sum = reduce_add(sums);
    for (int64_t i = 0; i < n; i += W) store(x + i, load<F>(x + i) / sum);
}

// Leaves the groups whose best, or two best, choices are largest; the others' choices are lost.
void keep_groups(const PgExperts &e, float *choices) {
    const int64_t size = e.count / e.groups;
    float worth[MAX_GROUPS];
    for (int64_t group = 0; group < e.groups; group++) {
        const float *x = choices + group * size;
        const int64_t best = largest(x, size);
        float second = -__builtin_inff();
        for (int64_t i = 0; i < size; i++)
            if (i != best && x[i] > second) second = x[i];
        worth[group] = size > 1 && e.group_best > 1 ? x[best] + second : x[best];
    }
    bool kept[MAX_GROUPS] = {};
    for (int64_t i = 0; i < e.kept_groups; i++) {
        const int64_t group = largest(worth, e.groups);
        kept[group] = true;
        worth[group] = -__builtin_inff();
    }
    for (int64_t i = 0; i < e.count; i++)
        if (!kept[i / size]) choices[i] = -__builtin_inff();
}

// From the logits of one row, which are changed, to its experts by rank and their weights.
void choose(const PgExperts &e, float *logits, float *choices, int64_t *ids, float *weights) {
    const int64_t n = e.count;
    if (e.score == PG_SOFTMAX) softmax(logits, n);
    if (e.score == PG_SIGMOID)
        for (int64_t i = 0; i < n; i += W) store(logits + i, 1.0f / one_plus_exp(-load<F>(logits + i)));
    for (int64_t i = 0; i < n; i++) choices[i] = e.correction ? logits[i] + e.correction[i] : logits[i];
    if (e.kept_groups < e.groups) keep_groups(e, choices);
    for (int64_t rank = 0; rank < e.top_k; rank++) {
        const int64_t id = largest(choices, n);
        choices[id] = -__builtin_inff();
        ids[rank] = id;
        weights[rank] = logits[id];
    }
    if (e.score == PG_SOFTMAX_OF_CHOSEN) {
        float chosen[MAX_TOP_K + NR];
        memcpy(chosen, weights, e.top_k * 4);
        softmax(chosen, e.top_k);
        memcpy(weights, chosen, e.top_k * 4);
    } else if (e.renormalise) {
        float sum = 1e-20f;  // of sigmoids that may all be zero
        for (int64_t rank = 0; rank < e.top_k; rank++) sum += weights[rank];
        for (int64_t rank = 0; rank < e.top_k; rank++) weights[rank] /= sum;
    }
    for (int64_t rank = 0; rank < e.top_k; rank++) weights[rank] *= e.scale;
}

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

// One expert after the other: what a member reads comes in long stretches.
void list_pieces(const PgLayer &layer, bool second, bool round, int members, std::vector<Piece> &pieces) {
    const Routing &routing = scratch.routing;
    const auto each_block = [&](auto &&body) {
        for (int64_t expert = 0; expert < routing.num_experts; expert++) {
            const int64_t start = routing.starts[expert], rows = routing.starts[expert + 1] - start;
            if (!rows) continue;
            const PgLinear &w = weight_of(layer, expert, second);
            const bool tiled = by_tiles(kernel_of(w, round), w, rows);
            const int64_t blocks = tiled ? tiled_blocks(rows, w.k) : row_blocks(rows, w.k);
            for (int64_t b = 0; b < blocks; b++)
                body(expert, start + rows * b / blocks, start + rows * (b + 1) / blocks, (w.n + NR - 1) / NR);
        }
    };
    int64_t all = 0;
    each_block([&](int64_t, int64_t, int64_t, int64_t panels) { all += panels; });
    const int64_t piece = panels_at_once(all, members);
    pieces.clear();
    each_block([&](int64_t expert, int64_t first, int64_t last, int64_t panels) {
        for (int64_t begin = 0; begin < panels; begin += piece)
            pieces.push_back({expert, first, last, begin, std::min(begin + piece, panels)});
    });
}

// Into what the kernel of a weight reads; `gap` as RowLayout has it.  Returns the scale of bytes.
float convert(const PgLinear &w, bool round, const float *from, void *to, int64_t gap) {
    const Kernel kernel = kernel_of(w, round);
    if (kernel == DOT_I8) return quantize_row(from, w.k, (uint8_t *)to, gap);
    if (kernel == DOT_I4) {
        quantize_groups(from, nibbles_of(w), (uint8_t *)to);
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
void copy_row(const uint8_t *from, int64_t bytes, uint8_t *to, int64_t gap) {
    for (int64_t i = 0; i < bytes; i += 64, to += gap) memcpy(to, from + i, std::min<int64_t>(bytes - i, 64));
}

bool read_alike(const PgLinear &one, const PgLinear &other) {
    return one.format == other.format && one.k == other.k && one.group == other.group;
}

// Rows that were converted once for all slots: as `like` reads them.
struct Given {
    const PgLinear &like;
    const uint8_t *rows;
    RowLayout layout;
    const float *scales;
};

// All slots' rows times their experts' weights.  A slot's row is one of `given`, or from(slot) to be converted.
template <class From, class Out>
void multiply_slots(Member &member, const PgLayer &layer, bool second, bool round, const Given *given, From &&from,
                    Out &&out) {
    const std::vector<Piece> &pieces = scratch.pieces[second];
    const Routing &routing = scratch.routing;
    member.for_each((int64_t)pieces.size(), 1, [&](int64_t i, int64_t) {
        const Piece &p = pieces[i];
        const PgLinear &w = weight_of(layer, p.expert, second);
        const Kernel kernel = kernel_of(w, round);
        const int64_t count = p.last - p.first;
        const RowLayout layout = layout_of(kernel, w, count);
        const auto finish = [&](int64_t row, int64_t column, F low, F high) {
            add_bias(w, column, low, high);
            out(p.first + row, column, low, high);
        };
        const bool ready = given && read_alike(given->like, w);
        if (ready && count == 1) {
            const int64_t row = routing.row_of[p.first];
            const Rows one = layout.rows(kernel, given->rows + given->layout.at(row), given->scales + row);
            return block(kernel, one, 0, 1, w, p.begin, p.end, finish);
        }
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
        block(kernel, layout.rows(kernel, rows, scales), 0, count, w, p.begin, p.end, finish);
    });
    release_tiles();
    member.barrier();
}

// Rows [first, first + rows) of s.normed through their experts, whose sum is added to the residual.
void mix_rows(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t first, int64_t rows) {
    const PgModel &m = s.m;
    const Routing &routing = scratch.routing;
    const bool round = m.round_activations != 0;
    const int64_t taken = routing.taken, stride = s.hidden_stride, inner_stride = s.expert_stride;
    float *normed = s.normed + first * stride, *slots = scratch.slots.get<float>(0);
    float *inner = scratch.inner.get<float>(0), *scales = scratch.scales.get<float>(0);
    const PgLinear &like = layer.experts->gate_up[0];
    uint8_t *converted = scratch.given.get<uint8_t>(0);
    RowLayout plain = layout_of(kernel_of(like, round), like, rows);
    plain.tiled = false;
    const Given given{like, converted, plain, scales};
    route(member, layer, s.activations(normed, stride, rows), [&](int64_t row) {
        scales[row] = convert(like, round, normed + row * stride, converted + plain.at(row), plain.gap(row));
    });
    if (member.id == 0) {
        scratch.routing.assign(rows);
        for (bool second : {false, true}) list_pieces(layer, second, round, member.count, scratch.pieces[second]);
    }
    member.barrier();
    const auto row_of_slot = [&](int64_t slot) { return normed + routing.row_of[slot] * stride; };
    with_activation(layer, inner, inner_stride,
                    [&](auto &&out) { multiply_slots(member, layer, false, round, &given, row_of_slot, out); });
    multiply_slots(member, layer, true, round, nullptr, [&](int64_t slot) { return inner + slot * inner_stride; },
                   [&](int64_t slot, int64_t column, F low, F high) {
                       store(slots + slot * stride + column, low);
                       store(slots + slot * stride + column + W, high);
                   });
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        float *sum = normed + row * stride;
        const int64_t *own = routing.slots.data() + row * taken;
        const float *weights = routing.weights.data() + row * taken;
        for (int64_t i = 0; i < m.hidden; i += W) {
            F v{};
            for (int64_t rank = 0; rank < taken; rank++)
                v = fma(splat(weights[rank]), load<F>(slots + own[rank] * stride + i), v);
            store(sum + i, v);
        }
        add_row(s, layer.mlp_output_norm, sum, residual + (first + row) * stride);
    });
    member.barrier();
}

void begin_layer(const PgLayer &layer, int64_t rows) {
    Routing &routing = scratch.routing;
    const int64_t shared = has_shared(layer);
    routing.taken = layer.experts->top_k + shared;
    routing.num_experts = layer.experts->count + shared;
    for (std::vector<int64_t> *one : {&routing.ids, &routing.slots, &routing.row_of, &routing.expert_of})
        one->resize(rows * routing.taken);
    routing.weights.resize(rows * routing.taken);
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

}  // namespace

int64_t reserve_experts(const PgModel &m, int64_t all) {
    int64_t stride = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (layer.experts) stride = std::max({stride, row_stride(layer.experts->inner), row_stride(layer.inner)});
    }
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (!layer.experts) continue;
        const int64_t rows = std::min(all, rows_at_once(m, layer));
        const int64_t taken = layer.experts->top_k + has_shared(layer);
        scratch.logits.get<float>(rows * logits_stride(*layer.experts));
        scratch.choices.get<float>(rows * logits_stride(*layer.experts));
        scratch.slots.get<float>(rows * taken * row_stride(m.hidden));
        scratch.inner.get<float>(rows * taken * stride);
        scratch.given.get<uint8_t>(rows * RowLayout::stride(4 * m.hidden));
        scratch.scales.get<float>(rows);
    }
    return stride;
}

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
