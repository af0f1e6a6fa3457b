// A step from the embeddings of its tokens to their hidden states.
#include <algorithm>

#include "step.h"

namespace {

// Heads outside groups: the keys and values of one head are then read again while they are near.
void add_items(const PgModel &m, std::vector<AttentionItem> &items, const int64_t *table, int64_t position,
               int64_t count, int64_t row) {
    const int64_t most = MAX_QUERY_ROWS / (m.num_heads / m.num_kv_heads);
    for (int64_t head = 0; head < m.num_kv_heads; head++)
        for (int64_t i = 0; i < count; i += most)
            items.push_back({{table, position + i, std::min(most, count - i), row + i}, head});
}

// The buffers of a step, as large as the largest so far.
struct Scratch {
    Tokens tokens;
    Buffer residual, normed, mixed, attended, inner, kept, converted, scales;
} scratch;

void read_embedding(const PgModel &m, int64_t id, float *out) {
    const int64_t n = m.hidden;
    if (m.embedding && m.embedding_format == PG_F32) {
        memcpy(out, (const float *)m.embedding + id * n, n * 4);
        return;
    }
    if (m.embedding) {
        for (int64_t i = 0; i < n; i += W) store(out + i, from_bf16((const uint16_t *)m.embedding + id * n + i));
        return;
    }
    const int64_t column = id % NR, base = id / NR * NR * n;
    if (m.head.format == PG_F32)
        for (int64_t i = 0; i < n; i++) out[i] = ((const float *)m.head.packed)[base + i * NR + column];
    else if (m.head.format == PG_BF16)
        for (int64_t i = 0; i < n; i++)
            out[i] = from_bf16(((const uint16_t *)m.head.packed)[base + (i / 2 * NR + column) * 2 + i % 2]);
    else {
        const int8_t *packed = (const int8_t *)m.head.packed;
        const float scale = ((const float *)(packed + padded(m.head.n) * n))[id];
        for (int64_t i = 0; i < n; i++) out[i] = (float)packed[base + (i / 4 * NR + column) * 4 + i % 4] * scale;
    }
}

void embed(const PgModel &m, int64_t id, int64_t position, float *out) {
    read_embedding(m, id, out);
    if (m.embed_scale != 1.0f)
        for (int64_t i = 0; i < m.hidden; i += W) store(out + i, load<F>(out + i) * m.embed_scale);
    const float *added = m.positions ? m.positions + position * m.hidden : nullptr;
    for (int64_t i = 0; added && i < m.hidden; i += W) store(out + i, load<F>(out + i) + load<F>(added + i));
}

void forward(Member &member, const Step &s, float *hidden) {
    const PgModel &m = s.m;
    const int64_t all = (int64_t)s.tokens.ids.size(), kept = (int64_t)s.tokens.wanted.size();
    member.for_each(all, 1, [&](int64_t row, int64_t) {
        embed(m, s.tokens.ids[row], s.tokens.positions[row], s.residual + row * s.hidden_stride);
    });
    member.barrier();
    for (int32_t i = 0; i < m.num_layers; i++) {
        const bool last = i == m.num_layers - 1;
        attention_half(member, s, m.layers[i], last);
        if (last && kept == 0) return;
        feed_forward_half(member, s, m.layers[i], last ? s.kept : s.residual, last ? kept : all);
    }
    member.for_each(kept, 1, [&](int64_t row, int64_t) {
        const float *from = s.kept + row * s.hidden_stride;
        if (m.norm.weight)
            norm_row(m.norm, from, m.eps, m.hidden, hidden + row * m.hidden);
        else
            memcpy(hidden + row * m.hidden, from, m.hidden * 4);
    });
}

// What a layer's first linears give, and what its attention gives.
int64_t mixed_width(const PgModel &m, const PgLayer &layer) {
    if (layer.delta) return gates_offset(*layer.delta) + padded(2 * layer.delta->value_heads);
    return ((layer.attention_gate ? 2 : 1) * m.num_heads + 2 * m.num_kv_heads) * m.head_dim;
}
int64_t attended_width(const PgModel &m, const PgLayer &layer) {
    return layer.delta ? value_features(*layer.delta) : m.num_heads * m.head_dim;
}

bool is_served(const PgDelta &d) {
    return d.key_heads > 0 && d.value_heads % d.key_heads == 0 && d.key_dim % 16 == 0 && d.value_dim % 16 == 0 &&
           d.width >= 2 && d.width <= 4;
}

// 0, or what of a mixture is not served.
int32_t why_unsupported(const PgExperts &e) {
    if (e.inner % 16) return 6;
    if (e.top_k < 1 || e.top_k > MAX_TOP_K || e.top_k > e.count) return 7;
    if (e.groups < 1 || e.groups > MAX_GROUPS || e.count % e.groups) return 8;
    if (e.kept_groups < 1 || e.kept_groups > e.groups || e.count / e.groups * e.kept_groups < e.top_k) return 8;
    return 0;
}

}  // namespace

void Tokens::list(const PgModel &m, const PgStep &s) {
    ids.clear(), positions.clear(), slots.clear(), wanted.clear(), items.clear(), last_items.clear();
    list_sequences(s, sequences);
    for (int64_t i = 0; i < s.num_seqs; i++) {
        const int64_t first = s.computed[i], count = s.scheduled[i], last = s.wanted[i], row = (int64_t)ids.size();
        const int64_t *given = s.tokens + s.rows[i] * s.tokens_stride, *table = s.tables + s.rows[i] * s.tables_stride;
        for (int64_t p = first; p < first + count; p++) {
            ids.push_back(given[p]);
            positions.push_back(p);
            slots.push_back(table[p / m.block_size] * m.block_size + p % m.block_size);
        }
        add_items(m, items, table, first, count, row);
        add_items(m, last_items, table, first + count - last, last, (int64_t)wanted.size());
        for (int64_t j = count - last; j < count; j++) wanted.push_back(row + j);
    }
}

Step make_step(const PgModel &m, const Tokens &tokens, int64_t rows, int64_t kept) {
    const int64_t hidden_stride = row_stride(m.hidden);
    int64_t mixed_stride = 0, attended_stride = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        mixed_stride = std::max(mixed_stride, row_stride(mixed_width(m, m.layers[i])));
        attended_stride = std::max(attended_stride, row_stride(attended_width(m, m.layers[i])));
    }
    int64_t inner_stride = attended_stride;
    for (int32_t i = 0; i < m.num_layers; i++) inner_stride = std::max(inner_stride, row_stride(m.layers[i].inner));
    const int64_t widest = std::max(hidden_stride, inner_stride);
    return {m,
            tokens,
            hidden_stride,
            mixed_stride,
            attended_stride,
            inner_stride,
            reserve_experts(m, rows),
            scratch.residual.get<float>(rows * hidden_stride),
            scratch.normed.get<float>(rows * hidden_stride),
            scratch.mixed.get<float>(rows * mixed_stride),
            scratch.attended.get<float>(rows * attended_stride),
            scratch.inner.get<float>(rows * inner_stride),
            scratch.kept.get<float>(kept * hidden_stride),
            scratch.converted.get<uint16_t>(rows * widest),
            scratch.scales.get<float>(rows)};
}

Activations spread(const float *x, int64_t rows, int64_t width, bool round) {
    const int64_t stride = row_stride(width);
    float *copy = scratch.normed.get<float>(rows * stride);
    for (int64_t row = 0; row < rows; row++) memcpy(copy + row * stride, x + row * width, width * 4);
    return {copy, stride, rows, round, scratch.converted.get<uint16_t>(rows * stride), scratch.scales.get<float>(rows)};
}

extern "C" void pg_forward(const PgModel *model, const PgStep *step, float *hidden) {
    Tokens &tokens = scratch.tokens;
    tokens.list(*model, *step);
    const Step s = make_step(*model, tokens, (int64_t)tokens.ids.size(), (int64_t)tokens.wanted.size());
    parallel([&](Member &member) { forward(member, s, hidden); });
}

extern "C" int32_t pg_abi(void) { return PG_ABI; }

extern "C" const char *pg_target(void) {
    return W == 16 ? (HAS_BF16_DOT ? "avx512+bf16" : "avx512") : "avx2";
}

extern "C" void pg_set_threads(int32_t count, int32_t pin) { team_resize(count, pin != 0); }

extern "C" int32_t pg_supports(const PgModel *model) {
    if (model->head_dim % 16 || model->head_dim > 256) return 1;
    if (model->hidden % 16) return 2;
    if (model->block_size < W) return 3;
    if (model->num_heads / model->num_kv_heads > MAX_QUERY_ROWS) return 4;
    for (int32_t i = 0; model->layers && i < model->num_layers; i++) {
        const PgLayer &layer = model->layers[i];
        if (layer.inner % 16) return 2;
        if (layer.activation == PG_CLAMPED_SWIGLU && !layer.gated) return 5;
        if (layer.delta && !is_served(*layer.delta)) return 9;
        const int32_t reason = layer.experts ? why_unsupported(*layer.experts) : 0;
        if (reason) return reason;
    }
    return 0;
}
