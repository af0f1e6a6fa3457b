// min_p, top_k and top_p as one threshold per row (kernels/ops/sampling/truncation.py), without sorting the row.
//
// What is kept is mostly near the most likely token: only values near it are looked at, unless they are too few.  Masses
// are float32, and summed in float64.
#include <math.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "layers/ops.h"

namespace {

constexpr float DEPTHS[] = {4.0f, 12.0f, __builtin_inff()};  // nats below the most likely token
constexpr int NUM_DEPTHS = 3;

using D = double __attribute__((vector_size(8 * W)));

struct Candidate {
    float value, mass;
};

PG_INLINE bool more_likely(const Candidate &a, const Candidate &b) { return a.value > b.value; }

struct Row {
    const float *values;
    int64_t vocab;
    float peak;
    std::vector<float> &near;  // room
    std::vector<Candidate> &candidates;

    // Values that are at least `bound`, in order of token ids.
    void gather(float bound) {
        near.clear();
        int64_t i = 0;
        for (; i + W <= vocab; i += W) {
            if (reduce_max(load<F>(values + i)) < bound) continue;
            for (int lane = 0; lane < W; lane++)
                if (values[i + lane] >= bound) near.push_back(values[i + lane]);
        }
        for (; i < vocab; i++)
            if (values[i] >= bound) near.push_back(values[i]);
    }

    float kth_largest(int64_t k) {
        for (const float depth : DEPTHS) {
            gather(peak - depth);
            if ((int64_t)near.size() >= k) break;
        }
        if ((int64_t)near.size() < k) return -__builtin_inff();
        std::nth_element(near.begin(), near.begin() + (k - 1), near.end(), std::greater<float>());
        return near[k - 1];
    }

    // Of the values that are at least `floor`: their mass down to each depth, the last of which is all of it.
    void weigh(float floor, double *masses) const {
        D total{};
        double near_masses[NUM_DEPTHS - 1] = {};
        for (int64_t i = 0; i < vocab; i += W) {
            F v = load_some(values + i, vocab - i);
            if (vocab - i < W) v = select(lanes() < I{} + (int32_t)(vocab - i), v, splat(-__builtin_inff()));
            const float best = reduce_max(v);
            if (best < floor) continue;
            const F mass = select(v >= floor, exp(v - peak), F{});
            total += __builtin_convertvector(mass, D);
            for (int depth = 0; depth < NUM_DEPTHS - 1 && best >= peak - DEPTHS[NUM_DEPTHS - 2]; depth++)
                for (int lane = 0; lane < W; lane++)
                    if (v[lane] >= peak - DEPTHS[depth]) near_masses[depth] += mass[lane];
        }
        std::copy_n(near_masses, NUM_DEPTHS - 1, masses);
        masses[NUM_DEPTHS - 1] = 0;
        for (int lane = 0; lane < W; lane++) masses[NUM_DEPTHS - 1] += total[lane];
    }

    void weigh_candidates() {
        candidates.resize(near.size());
        for (size_t i = 0; i < near.size(); i += W) {
            const size_t count = std::min<size_t>(W, near.size() - i);
            const F v = load_some(near.data() + i, (int64_t)count), mass = exp(v - peak);
            for (size_t lane = 0; lane < count; lane++) candidates[i + lane] = {v[lane], mass[lane]};
        }
    }

    // The smallest set of the most likely values down to `floor` whose mass reaches `share` of theirs: its least value
    // and the last token that has it.
    void nucleus(double share, float floor, float *cut, int64_t *last_tied) {
        double masses[NUM_DEPTHS];
        weigh(floor, masses);
        const double wanted = share * masses[NUM_DEPTHS - 1];
        int depth = 0;
        while (depth < NUM_DEPTHS - 1 && masses[depth] < wanted) depth++;
        gather(std::max(floor, peak - DEPTHS[depth]));
        weigh_candidates();
        *cut = boundary(wanted);
        *last_tied = last_kept(*cut, wanted);
    }

    // Halves what is left until one value is, at which the sum from the largest reaches what is wanted.
    float boundary(double wanted) {
        auto first = candidates.begin(), last = candidates.end();
        double above = 0;
        while (last - first > 1) {
            const auto middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, more_likely);
            double upper = 0;
            for (auto one = first; one != middle; one++) upper += one->mass;
            if (above + upper >= wanted)
                last = middle;
            else
                above += upper, first = middle;
        }
        return first->value;
    }

    int64_t last_kept(float cut, double wanted) const {
        double above = 0, mass = 0;
        for (const Candidate &one : candidates) {
            if (one.value > cut) above += one.mass;
            if (one.value == cut) mass = one.mass;
        }
        int64_t found = 0, num_kept = 0;
        for (int64_t id = 0; id < vocab; id++) {
            if (values[id] != cut) continue;
            if (num_kept && above + (double)num_kept * mass >= wanted) break;
            found = id, num_kept++;
        }
        return found;
    }
};

float largest_value(const float *values, int64_t vocab) {
    F best = splat(-__builtin_inff());
    int64_t i = 0;
    for (; i + W <= vocab; i += W) best = max(load<F>(values + i), best);
    float found = reduce_max(best);
    for (; i < vocab; i++) found = std::max(found, values[i]);
    return found;
}

}  // namespace

void truncate_row(const float *values, int64_t vocab, const Limits &limits, float *cut, int64_t *last_tied) {
    static thread_local std::vector<float> near;
    static thread_local std::vector<Candidate> candidates;
    const bool limited = limits.top_k > 0 && limits.top_k < vocab, nuclear = limits.top_p < 1.0;
    *cut = -__builtin_inff(), *last_tied = vocab;
    if (!limited && !nuclear && isinf(limits.depth)) return;
    Row row{values, vocab, largest_value(values, vocab), near, candidates};
    if (!isfinite(row.peak)) return;  // nothing is possible, or nothing else than what is infinite
    *cut = (float)((double)row.peak + limits.depth);
    if (limited) *cut = std::max(*cut, row.kth_largest(limits.top_k));
    if (nuclear) row.nucleus(limits.top_p, *cut, cut, last_tied);
}

extern "C" void pg_truncation(const float *values, int64_t m, int64_t vocab, const double *depth, const int64_t *top_k,
                              const double *top_p, float *cut, int64_t *last_tied) {
    parallel([&](Member &member) {
        member.for_each(m, 1, [&](int64_t i, int64_t) {
            truncate_row(values + i * vocab, vocab, {depth[i], top_k[i], top_p[i]}, cut + i, last_tied + i);
        });
    });
}
