// The state of a head is held in panels of 16 columns, [value_dim / 16][key_dim][16]: a column depends on no other, so
// that a few panels stay in the nearest cache while all tokens of a sequence pass through them.
#include "states/delta.h"

#include "layers/activation.h"
#include "steps/step.h"

namespace {

constexpr int64_t PANEL = 16;    // columns
constexpr int64_t VECTORS = 4;   // of channels that a member convolves before it takes others
constexpr int CHAINS = 4;        // of a sum over keys: the latency of one would be waited for
constexpr float LENGTH_EPS = 1e-6f;

template <int WIDTH>
void convolve_channels(const DeltaRows &r, const Sequence &q, int64_t channel) {
    const int64_t all = channels(r.delta);
    const float *taps = r.delta.taps + channel;
    float *inputs = r.delta.inputs + q.slot * (WIDTH - 1) * all + channel;
    F weight[WIDTH], held[WIDTH - 1] = {};
    for (int j = 0; j < WIDTH; j++) weight[j] = load<F>(taps + j * all);
    for (int j = 0; j < WIDTH - 1 && !q.is_new; j++) held[j] = load<F>(inputs + j * all);
    float *x = r.mixed + q.first * r.stride + channel;
    for (int64_t token = 0; token < q.count; token++, x += r.stride) {
        const F own = load<F>(x);
        F sum{};
        for (int j = 0; j < WIDTH - 1; j++) sum = fma(weight[j], held[j], sum);
        store(x, silu(fma(weight[WIDTH - 1], own, sum)));
        for (int j = 0; j + 1 < WIDTH - 1; j++) held[j] = held[j + 1];
        held[WIDTH - 2] = own;
    }
    for (int j = 0; j < WIDTH - 1; j++) store(inputs + j * all, held[j]);
}

// x becomes x / |x| * factor.
void normalise(float *x, int64_t n, float factor) {
    F squares[2] = {};
    for (int64_t i = 0; i < n; i += W) {
        const F v = load<F>(x + i);
        squares[i / W % 2] = fma(v, v, squares[i / W % 2]);
    }
    const float scale = factor / __builtin_sqrtf(reduce_add(squares[0] + squares[1]) + LENGTH_EPS);
    for (int64_t i = 0; i < n; i += W) store(x + i, load<F>(x + i) * scale);
}

// log(1 + x) for x in 0 ... 1, relative error about 1e-7: 2 atanh(x / (2 + x)).
PG_INLINE F log1p(F x) {
    const F s = x / (x + 2.0f), square = s * s;
    F p = splat(2.0f / 15);
    for (float term : {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3}) p = fma(p, square, splat(term));
    return fma(s * square, p, s + s);
}

PG_INLINE F softplus(F x) { return max(x, F{}) + log1p(exp(-abs(x))); }

void prepare_gates(const PgDelta &d, float *gates) {
    const int64_t heads = d.value_heads;
    for (int64_t i = 0; i < heads; i += W) {
        const int64_t count = heads - i;
        const F beta = load_some(gates + i, count), step = load_some(gates + heads + i, count);
        const F rate = load_some(d.rate + i, count), bias = load_some(d.bias + i, count);
        store_some(gates + i, 1.0f / one_plus_exp(-beta), count);
        store_some(gates + heads + i, exp(-rate * softplus(step + bias)), count);
    }
}

PG_INLINE F sum(const F (&chains)[CHAINS]) { return (chains[0] + chains[1]) + (chains[2] + chains[3]); }

// All tokens of a sequence through NC vectors of columns of one head's state.
template <int NC>
void pass_tokens(const DeltaRows &r, const Sequence &q, int64_t head, int64_t column) {
    const PgDelta &d = r.delta;
    const int64_t dims = d.key_dim, heads = d.value_heads, key_head = head / (heads / d.key_heads);
    float *base = d.states + (q.slot * heads + head) * dims * d.value_dim;
    float *state[NC];
    for (int c = 0; c < NC; c++) {
        const int64_t at = column + c * W;
        state[c] = base + at / PANEL * dims * PANEL + at % PANEL;
        for (int64_t i = 0; i < dims && q.is_new; i++) store(state[c] + i * PANEL, F{});
    }
    for (int64_t row = q.first; row < q.first + q.count; row++) {
        const float *query = r.mixed + row * r.stride + key_head * dims, *key = query + key_features(d);
        float *value = r.mixed + row * r.stride + 2 * key_features(d) + head * d.value_dim + column;
        const float *gates = r.gates + row * r.gates_stride;
        const float beta = gates[head], decay = gates[heads + head];
        F sums[NC][CHAINS] = {}, change[NC];
        for (int64_t i = 0; i < dims; i += CHAINS)
            for (int j = 0; j < CHAINS; j++)
                for (int c = 0; c < NC; c++)
                    sums[c][j] = fma(splat(key[i + j]), load<F>(state[c] + (i + j) * PANEL), sums[c][j]);
        for (int c = 0; c < NC; c++) {
            change[c] = (load<F>(value + c * W) - sum(sums[c]) * decay) * beta;
            for (F &chain : sums[c]) chain = F{};
        }
        for (int64_t i = 0; i < dims; i += CHAINS)
            for (int j = 0; j < CHAINS; j++)
                for (int c = 0; c < NC; c++) {
                    float *at = state[c] + (i + j) * PANEL;
                    const F now = fma(splat(key[i + j]), change[c], load<F>(at) * decay);
                    store(at, now);
                    sums[c][j] = fma(splat(query[i + j]), now, sums[c][j]);
                }
        for (int c = 0; c < NC; c++) store(value + c * W, sum(sums[c]));
    }
}

}  // namespace

void list_sequences(const PgStep &s, std::vector<Sequence> &sequences) {
    sequences.clear();
    for (int64_t i = 0, first = 0; i < s.num_seqs; first += s.scheduled[i], i++)
        sequences.push_back({s.rows[i], first, s.scheduled[i], s.computed[i] == 0});
}

void convolve(Member &member, const DeltaRows &r) {
    const int64_t vectors = channels(r.delta) / W, pieces = (vectors + VECTORS - 1) / VECTORS;
    const auto channels_of = r.delta.width == 2   ? convolve_channels<2>
                             : r.delta.width == 3 ? convolve_channels<3>
                                                  : convolve_channels<4>;
    member.for_each((int64_t)r.sequences.size() * pieces, 1, [&](int64_t item, int64_t) {
        const int64_t begin = item % pieces * VECTORS, end = begin + VECTORS < vectors ? begin + VECTORS : vectors;
        for (int64_t v = begin; v < end; v++) channels_of(r, r.sequences[item / pieces], v * W);
    });
}

void prepare_delta(Member &member, const DeltaRows &r, int64_t rows) {
    const PgDelta &d = r.delta;
    const float scale = 1.0f / __builtin_sqrtf((float)d.key_dim);
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        float *query = r.mixed + row * r.stride, *key = query + key_features(d);
        for (int64_t head = 0; head < d.key_heads; head++) {
            normalise(query + head * d.key_dim, d.key_dim, scale);
            normalise(key + head * d.key_dim, d.key_dim, 1.0f);
        }
        prepare_gates(d, r.gates + row * r.gates_stride);
    });
}

void apply_delta_rule(Member &member, const DeltaRows &r) {
    constexpr int64_t TILE = 2 * W;  // columns
    const int64_t heads = r.delta.value_heads, tiles = (r.delta.value_dim + TILE - 1) / TILE;
    member.for_each((int64_t)r.sequences.size() * heads * tiles, 1, [&](int64_t item, int64_t) {
        const Sequence &q = r.sequences[item / (heads * tiles)];
        const int64_t head = item / tiles % heads, column = item % tiles * TILE;
        if (column + TILE <= r.delta.value_dim)
            pass_tokens<2>(r, q, head, column);
        else
            pass_tokens<1>(r, q, head, column);
    });
}

extern "C" void pg_causal_conv(const PgDelta *delta, const PgStep *step, float *x) {
    std::vector<Sequence> sequences;
    list_sequences(*step, sequences);
    const DeltaRows rows{*delta, sequences, x, channels(*delta), nullptr, 0};
    parallel([&](Member &member) { convolve(member, rows); });
}

extern "C" void pg_delta_rule(const PgDelta *delta, const PgStep *step, float *mixed, float *gates) {
    std::vector<Sequence> sequences;
    list_sequences(*step, sequences);
    const DeltaRows rows{*delta, sequences, mixed, channels(*delta), gates, 2 * delta->value_heads};
    const int64_t count = sequences.empty() ? 0 : sequences.back().first + sequences.back().count;
    parallel([&](Member &member) {
        prepare_delta(member, rows, count);
        member.barrier();
        apply_delta_rule(member, rows);
    });
}
