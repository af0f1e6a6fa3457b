// From hidden states to logits, to the greedy token, and to tokens one after the other.
#include "steps/lora.h"

namespace {

Buffer best_of_members, returned, drawn_from;

// The best logit of each row that one member saw, by lane.
struct Best {
    F value[2];
    I id[2];
};

Activations head_input(const PgModel &m, const float *hidden, int64_t rows) {
    return spread(hidden, rows, m.hidden, m.round_activations != 0);
}

// Calls body(finish) with what products of the head become to be logits.
template <class Body>
void with_finish(const PgModel &m, Body &&body) {
    const float scale = m.logit_scale, limit = m.logit_softcap;
    if (limit) return body([=](F product) { return softcap(product * scale, limit); });
    if (scale != 1.0f) return body([=](F product) { return product * scale; });
    body([](F product) { return product; });
}

// The best of all ranks, the lowest id among equals, as the leader has it then.
void best_of_ranks(const PgModel &m, int64_t rows, int64_t *ids) {
    const PgGroup &g = *m.group;
    const RankBest *all = areas_of(g, m.hidden).best;
    if (is_linked(g)) {
        Written written(g);
        written.add(all + g.rank * g.max_rows, 1, 0, rows * (int64_t)sizeof(RankBest));
        gather_at_leader(g, written);
    } else {
        meet_ranks(g);
    }
    if (!leads(g)) return;
    for (int64_t row = 0; row < rows; row++) {
        RankBest best = all[row];
        for (int32_t rank = 1; rank < g.ranks; rank++) {  // whose ids are higher
            const RankBest &other = all[rank * g.max_rows + row];
            if (other.value > best.value) best = other;
        }
        ids[row] = best.id;
    }
}

}  // namespace

extern "C" void pg_logits(const PgModel *model, const float *hidden, int64_t m, const int64_t *adapters, float *logits) {
    PgGroup *group = model->group;
    if (group && leads(*group) && !order_rows(*model, ORDER_LOGITS, hidden, m, adapters)) return;
    const Activations a = head_input(*model, hidden, m);
    const HeadLora head(*model, adapters, m);
    const int64_t n = model->vocab, own = model->head.n;
    float *all = group ? areas_of(*group, model->hidden).logits : logits, *out = all + model->first_vocab;
    with_finish(*model, [&](auto finish) {
        parallel([&](Member &member) {
            if (group) agree(member, group);
            Activations given = a;
            const LoraRows lora = head.make(member, *model, given);
            linear(member, given, model->head, [&](int64_t row, int64_t column, F low, F high) {
                lora.add(row, column, low, high);
                store_some(out + row * n + column, finish(low), own - column);
                store_some(out + row * n + column + W, finish(high), own - column - W);
            });
            if (group) meet_sharing(member, group);
        });
    });
    if (group && is_linked(*group)) {
        Written written(*group);
        written.add_columns(all, n, m, model->first_vocab, own);
        gather_at_leader(*group, written);
    }
    if (group && leads(*group) && logits != all) memcpy(logits, all, m * n * 4);
}

extern "C" void pg_greedy(const PgModel *model, const float *hidden, int64_t m, const int64_t *adapters, int64_t *ids) {
    PgGroup *group = model->group;
    if (group && leads(*group) && !order_rows(*model, ORDER_GREEDY, hidden, m, adapters)) return;
    const Activations a = head_input(*model, hidden, m);
    const HeadLora head(*model, adapters, m);
    const int64_t n = model->head.n, count = team_size();
    Best *all = best_of_members.get<Best>(count * m);
    const F lowest = splat(-__builtin_inff());
    for (int64_t i = 0; i < count * m; i++) all[i] = {{lowest, lowest}, {I{}, I{}}};
    with_finish(*model, [&](auto finish) {  // logits that differ may be equal then
        parallel([&](Member &member) {
            if (group) agree(member, group);
            Best *best = all + member.id * m;
            Activations rows = a;
            const LoraRows lora = head.make(member, *model, rows);
            linear(member, rows, model->head, [&](int64_t row, int64_t column, F low, F high) {
                lora.add(row, column, low, high);
                const F given[2] = {finish(low), finish(high)};
                for (int h = 0; h < 2; h++) {
                    const I id = lanes() + (int32_t)(column + h * W);
                    // A member that helps another comes to lower ids after higher ones.
                    const I tied = (given[h] == best[row].value[h]) & (id < best[row].id[h]);
                    const I better = ((given[h] > best[row].value[h]) | tied) & (id < (int32_t)n);
                    best[row].value[h] = select(better, given[h], best[row].value[h]);
                    best[row].id[h] = (id & better) | (best[row].id[h] & ~better);
                }
            });
        });
    });
    RankBest *bests = group ? areas_of(*group, model->hidden).best + group->rank * group->max_rows : nullptr;
    const auto found = [&](int64_t row, float value, int64_t id) {
        if (group) bests[row] = {value, model->first_vocab + id};
        else ids[row] = id;
    };
    for (int64_t row = 0; row < m; row++) {
        float value = -__builtin_inff();
        int64_t id = 0;
        for (int64_t i = 0; i < count; i++)
            for (int lane = 0; lane < NR; lane++) {
                const Best &b = all[i * m + row];
                const float v = b.value[lane / W][lane % W];
                const int64_t j = b.id[lane / W][lane % W];
                if (v > value || (v == value && j < id)) value = v, id = j;
            }
        found(row, value, id);
    }
    if (group) best_of_ranks(*model, m, ids);
}

// Of each wanted row of a step, the token that its sequence takes.
static void take_tokens(const PgModel &m, const PgStep &s, const PgSampling &sampling, const float *hidden, int64_t *ids) {
    const int64_t vocab = m.vocab;
    std::vector<int64_t> seqs, of_rows;
    bool greedy = true;
    for (int64_t i = 0; i < s.num_seqs; i++) {
        if (!s.wanted[i]) continue;
        seqs.push_back(i), greedy &= is_greedy(sampling, i);
        if (s.adapters) of_rows.push_back(s.adapters[i]);
    }
    const int64_t *adapters = s.adapters ? of_rows.data() : nullptr;
    const int64_t rows = (int64_t)seqs.size();
    if (!rows) return;
    if (greedy) return pg_greedy(&m, hidden, rows, adapters, ids);
    float *logits = drawn_from.get<float>(rows * vocab);
    pg_logits(&m, hidden, rows, adapters, logits);
    parallel([&](Member &member) {
        member.for_each(rows, 1, [&](int64_t row, int64_t) {
            const int64_t i = seqs[row];
            ids[row] = draw_row(logits + row * vocab, vocab, sampling.temperature[i], sampling.seeds[i],
                                s.computed[i] + s.scheduled[i], limits_of(sampling, i));
        });
    });
}

void step_tokens(const PgModel &m, const PgStep &s, const PgSampling &sampling, int64_t *ids) {
    int64_t rows = 0;
    for (int64_t i = 0; i < s.num_seqs; i++) rows += s.wanted[i];
    float *hidden = returned.get<float>(rows * m.hidden);
    pg_forward(&m, &s, hidden);
    take_tokens(m, s, sampling, hidden, ids);
    int64_t *tokens = const_cast<int64_t *>(s.tokens);
    for (int64_t i = 0; i < s.num_seqs; i++)
        if (s.wanted[i]) tokens[s.rows[i] * s.tokens_stride + s.computed[i] + s.scheduled[i]] = *ids++;
}

extern "C" void pg_extend(const PgModel *model, const PgStep *step, int64_t count, const PgSampling *sampling, int64_t *ids) {
    const int64_t n = step->num_seqs;
    std::vector<int64_t> computed(step->computed, step->computed + n), scheduled(step->scheduled, step->scheduled + n);
    PgStep next = *step;
    next.computed = computed.data(), next.scheduled = scheduled.data();
    for (int64_t turn = 0; turn < count; turn++, ids += n) {
        step_tokens(*model, next, *sampling, ids);
        for (int64_t i = 0; i < n; i++) computed[i] += scheduled[i], scheduled[i] = 1;
    }
}
