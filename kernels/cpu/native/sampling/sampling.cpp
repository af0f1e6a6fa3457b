// One token per row of logits: the largest, or the largest after Gumbel noise.
#include <math.h>

#include "layers/ops.h"

namespace {

// The noise of kernels/ops/sampling/noise.py: a hash of the row's keys and the token id gives a uniform of 24 bits.
constexpr uint32_t TOKEN_STEP = 0x9E3779B1u, FIRST_KEY = 0x9E3779B9u, SECOND_KEY = 0x7F4A7C15u;
constexpr double UNIT = 1.0 / (1 << 24);
constexpr float MARGIN = 2e-2f;  // more than the approximate noise and its sum with a logit are off by

template <class T>
PG_INLINE T mix(T word) {
    word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
    word = (word ^ (word >> 13)) * 0xC2B2AE35u;
    return word ^ (word >> 16);
}

template <class T>
PG_INLINE T bits_of(uint32_t first, uint32_t second, T token) {
    return mix<T>(mix<T>((token * TOKEN_STEP) ^ first) + second) >> 8;
}

struct Keys {
    uint32_t first, second;
};

Keys row_keys(int64_t seed, int64_t position) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)((uint64_t)seed >> 32), at = (uint32_t)position;
    return {mix(mix(mix(low ^ FIRST_KEY) + high) + at), mix(mix(mix(high ^ SECOND_KEY) + low) ^ at)};
}

double noise(uint32_t bits) { return -::log(-::log(((double)bits + 0.5) * UNIT)); }

// Near u = 1 the logarithm is taken of 1 - u, which is exact there.
PG_INLINE F approximate_noise(U bits) {
    const F rest = (__builtin_convertvector((I)(0xFFFFFFu - bits), F) + 0.5f) * (float)UNIT;
    F series = fma(rest, splat(0.25f), splat(1.0f / 3));
    series = fma(rest, series, splat(0.5f));
    series = fma(rest * rest, series, rest);
    const F wide = -log(max(splat(1.0f) - rest, splat(1e-30f)));
    return -log(select(rest < splat(0.0625f), series, wide));
}

struct Row {
    const float *values;
    int64_t vocab;
    float cut;
    int64_t last_tied;
    uint32_t first, second;

    bool kept(int64_t id) const { return values[id] > cut || (values[id] == cut && id <= last_tied); }
    double score(int64_t id) const { return (double)values[id] + noise(bits_of<uint32_t>(first, second, (uint32_t)id)); }
};

// Exact scores only where an approximate one comes near the best so far.
int64_t gumbel_argmax(const Row &row) {
    int64_t id = 0;
    double best = -HUGE_VAL;
    const int64_t likeliest = largest(row.values, row.vocab);
    if (row.kept(likeliest)) id = likeliest, best = row.score(likeliest);
    const auto consider = [&](int64_t other) {
        if (!row.kept(other)) return;
        const double score = row.score(other);
        if (score > best || (score == best && other < id)) best = score, id = other;
    };
    int64_t i = 0;
    for (; i + W <= row.vocab; i += W) {
        const F v = load<F>(row.values + i);
        const float bound = (float)best - MARGIN - fabsf((float)best) * 1e-6f;
        if (reduce_max(v) + 17.4f < bound) continue;  // no noise is larger
        const U token = (U)lanes() + (uint32_t)i;
        const F near = v + approximate_noise(bits_of<U>(row.first, row.second, token));
        const I possible = (near >= bound) & (v >= row.cut);
        if (reduce_max(select(possible, splat(1.0f), F{})) == 0.0f) continue;
        for (int lane = 0; lane < W; lane++)
            if (possible[lane]) consider(i + lane);
    }
    for (; i < row.vocab; i++) consider(i);
    return id;
}

}  // namespace

int64_t largest(const float *values, int64_t vocab) {
    F best = splat(-__builtin_inff());
    I where{};
    int64_t i = 0;
    for (; i + W <= vocab; i += W) {
        const F v = load<F>(values + i);
        const I better = v > best;
        best = select(better, v, best);
        where = ((lanes() + (int32_t)i) & better) | (where & ~better);
    }
    float top = -__builtin_inff();
    int64_t id = 0;
    for (int lane = 0; lane < W; lane++)
        if (best[lane] > top || (best[lane] == top && where[lane] < id)) top = best[lane], id = where[lane];
    for (; i < vocab; i++)
        if (values[i] > top) top = values[i], id = i;
    return id;
}

int64_t draw_row(float *logits, int64_t vocab, float temperature, int64_t seed, int64_t position,
                 const Limits &limits) {
    if (temperature == 0.0f) return largest(logits, vocab);
    for (int64_t i = 0; i < vocab; i++) logits[i] /= temperature;
    const Keys keys = row_keys(seed, position);
    Row row{logits, vocab, 0, 0, keys.first, keys.second};
    truncate_row(logits, vocab, limits, &row.cut, &row.last_tied);
    return gumbel_argmax(row);
}

extern "C" void pg_argmax(const float *logits, int64_t m, int64_t vocab, int64_t *ids) {
    parallel([&](Member &member) {
        member.for_each(m, 1, [&](int64_t row, int64_t) { ids[row] = largest(logits + row * vocab, vocab); });
    });
}

extern "C" void pg_gumbel_argmax(const float *values, int64_t m, int64_t vocab, const float *cut,
                                 const int64_t *last_tied, const int64_t *first_keys, const int64_t *second_keys,
                                 int64_t *ids) {
    parallel([&](Member &member) {
        member.for_each(m, 1, [&](int64_t i, int64_t) {
            ids[i] = gumbel_argmax({values + i * vocab, vocab, cut[i], last_tied[i], (uint32_t)first_keys[i],
                                    (uint32_t)second_keys[i]});
        });
    });
}
