// A draft head: what stands around its layers, and several drafts one after the other in one call.
#include <math.h>

#include <algorithm>

#include "steps/lora.h"

namespace {

// The buffers of a call, as large as the largest so far.
struct Room {
    Buffer captured, vectors, both, inputs, state, normed, logits;
    std::vector<int64_t> ids, positions;  // of the rows that enter: the token behind each, and where it stands
} room;

// Of captured features: the first row of each sequence is at its `first`.
void gather_captured(const PgHead &head, const PgStep &step, const PgDrafting &asked, float *to) {
    const int64_t width = head.captured, piece = head.captured_together;
    std::vector<const float *> from;
    for (int64_t i = 0; i < step.num_seqs; i++)
        for (int64_t j = 0; j < step.scheduled[i]; j++) from.push_back(asked.captured + (asked.firsts[i] + j) * width);
    parallel([&](Member &member) {
        member.for_each((int64_t)from.size(), 1, [&](int64_t row, int64_t) {
            float *out = to + row * width;
            memcpy(out, from[row], width * 4);
            for (int64_t at = 0; head.capture_norm.weight && at < width; at += piece) {
                PgNorm norm = head.capture_norm;
                norm.weight += at;
                norm_row(norm, out + at, head.layers->eps, piece, out + at);
            }
        });
    });
}

void read_row(const PgHead &head, int64_t id, float *out) {
    const int64_t n = head.layers->hidden;
    if (head.embedding_format == PG_F32) memcpy(out, (const float *)head.embedding + id * n, n * 4);
    else
        for (int64_t i = 0; i < n; i += W) store(out + i, from_bf16((const uint16_t *)head.embedding + id * n + i));
}

// The layers, of room.ids and `vectors`: states of the wanted rows.
void go_through(const PgHead &head, PgStep &step, const float *vectors, float *state) {
    const PgModel &m = *head.layers;
    const int64_t n = m.hidden, rows = (int64_t)room.ids.size();
    float *both = room.both.get<float>(rows * 2 * n), *inputs = room.inputs.get<float>(rows * n);
    parallel([&](Member &member) {
        member.for_each(rows, 1, [&](int64_t row, int64_t) {
            float *embedded = both + row * 2 * n, *vector = embedded + n;
            read_row(head, room.ids[row], embedded);
            if (head.skips_first && room.positions[row] == 0) memset(embedded, 0, n * 4);
            if (head.embedding_norm.weight) norm_row(head.embedding_norm, embedded, m.eps, n, embedded);
            memcpy(vector, vectors + row * n, n * 4);
            if (head.hidden_norm.weight) norm_row(head.hidden_norm, vector, m.eps, n, vector);
            memcpy(inputs + row * n, head.norms_residual ? vector : vectors + row * n, n * 4);
        });
    });
    if (head.combine.packed) pg_linear(&head.combine, m.round_activations, both, rows, inputs);
    step.inputs = inputs, step.beside = head.combine.packed ? nullptr : both;
    pg_forward(&m, &step, state);
}

// Of each row the token that it drafts, as the head numbers tokens.
void choose(const PgHead &head, const PgDrafting &asked, const float *normed, const std::vector<int64_t> &seqs,
            const std::vector<int64_t> &lengths, int64_t *ids) {
    const PgModel &m = *head.layers;
    const int64_t rows = (int64_t)seqs.size(), own = m.vocab, vocab = head.vocab;
    const bool greedy = std::all_of(seqs.begin(), seqs.end(), [&](int64_t i) { return is_greedy(asked.sampling, i); });
    if (greedy) {
        pg_greedy(&m, normed, rows, nullptr, ids);
        for (int64_t row = 0; head.ids && row < rows; row++) ids[row] = head.ids[ids[row]];
        return;
    }
    float *logits = room.logits.get<float>(rows * (own + vocab)), *wide = logits + rows * own;
    pg_logits(&m, normed, rows, nullptr, logits);
    parallel([&](Member &member) {
        member.for_each(rows, 1, [&](int64_t row, int64_t) {
            float *all = head.ids ? wide + row * vocab : logits + row * own;
            if (head.ids) std::fill_n(all, vocab, -__builtin_inff());
            for (int64_t i = 0; head.ids && i < own; i++) all[head.ids[i]] = logits[row * own + i];
            const int64_t seq = seqs[row];
            const PgSampling &sampling = asked.sampling;
            ids[row] = draw_row(all, vocab, sampling.temperature[seq], sampling.seeds[seq], lengths[row],
                                limits_of(sampling, seq));
        });
    });
}

}  // namespace

extern "C" void pg_draft(const PgHead *head, const PgStep *step, const PgDrafting *asked, int64_t *drafts) {
    const PgModel &m = *head->layers;
    const int64_t n = m.hidden;
    int64_t rows = 0, total = 0;
    std::vector<int64_t> seqs, lengths, places;  // of the sequences that go on: tokens, and where their drafts go
    room.ids.clear(), room.positions.clear();
    for (int64_t i = 0; i < step->num_seqs; i++) {
        const int64_t *tokens = step->tokens + step->rows[i] * step->tokens_stride;
        const int64_t first = step->computed[i], end = first + step->scheduled[i];
        for (int64_t p = first; p < end; p++) room.ids.push_back(tokens[p + 1]), room.positions.push_back(p);
        rows += step->scheduled[i];
        if (step->wanted[i]) seqs.push_back(i), lengths.push_back(end + 1), places.push_back(total);
        total += asked->counts[i];
    }
    float *captured = room.captured.get<float>(rows * head->captured), *vectors = captured;
    gather_captured(*head, *step, *asked, captured);
    if (head->fuse.packed) {
        vectors = room.vectors.get<float>(rows * n);
        pg_linear(&head->fuse, m.round_activations, captured, rows, vectors);
    }
    float *state = room.state.get<float>(rows * n), *normed = room.normed.get<float>(rows * n);
    PgStep next = *step;
    go_through(*head, next, vectors, state);
    std::vector<int64_t> of_rows, computed, ones(seqs.size(), 1), chosen(seqs.size());
    for (int64_t turn = 0; !seqs.empty(); turn++) {
        const int64_t going = (int64_t)seqs.size();
        for (int64_t row = 0; row < going; row++) {
            const float *from = state + row * n;
            if (head->norm.weight) norm_row(head->norm, from, m.eps, n, normed + row * n);
            else memcpy(normed + row * n, from, n * 4);
        }
        choose(*head, *asked, normed, seqs, lengths, chosen.data());
        const float *fed = head->feeds_normed ? normed : state;
        float *kept = room.captured.get<float>(rows * std::max<int64_t>(n, head->captured));
        int64_t left = 0;
        room.ids.clear(), room.positions.clear(), of_rows.clear(), computed.clear();
        for (int64_t row = 0; row < going; row++) {
            drafts[places[row] + turn] = chosen[row];
            if (turn + 1 == asked->counts[seqs[row]]) continue;
            memcpy(kept + left * n, fed + row * n, n * 4);
            room.ids.push_back(chosen[row]), room.positions.push_back(lengths[row] - 1);
            of_rows.push_back(step->rows[seqs[row]]), computed.push_back(lengths[row] - 1);
            seqs[left] = seqs[row], lengths[left] = lengths[row] + 1, places[left] = places[row], left++;
        }
        seqs.resize(left), lengths.resize(left), places.resize(left);
        if (!left) break;
        next.num_seqs = left, next.rows = of_rows.data(), next.computed = computed.data();
        next.scheduled = next.wanted = ones.data();
        go_through(*head, next, kept, state);
    }
}
