// One step of a decoder: embedding, layers, final norm; then logits or the greedy token.
#include <algorithm>
#include <vector>

#include "kv.h"

namespace {

int64_t padded(int64_t n) { return (n + NR - 1) / NR * NR; }

// From a row to the next: an odd number of cache lines, or the rows of a tile would fight for the same places.
int64_t row_stride(int64_t n) { return (n + 15) / 16 % 2 ? padded(n) + 16 : padded(n + 16) + 16; }

// The attention of one group, for one KV head.
struct AttentionItem {
    QueryGroup group;
    int64_t head;
};

// A step's tokens in one list, and what there is to attend to.
struct Tokens {
    std::vector<int64_t> ids, positions, slots;   // of every token
    std::vector<int64_t> wanted;                  // places of the tokens whose hidden states are returned
    std::vector<AttentionItem> items, last_items; // of every token; of the wanted ones, as rows among themselves
};

// Heads outside groups: the keys and values of one head are then read again while they are near.
void add_items(const PgModel &m, std::vector<AttentionItem> &items, const int64_t *table, int64_t position,
               int64_t count, int64_t row) {
    const int64_t most = MAX_QUERY_ROWS / (m.num_heads / m.num_kv_heads);
    for (int64_t head = 0; head < m.num_kv_heads; head++)
        for (int64_t i = 0; i < count; i += most)
            items.push_back({{table, position + i, std::min(most, count - i), row + i}, head});
}

void list_tokens(const PgModel &m, const PgStep &s, Tokens &t) {
    t.ids.clear(), t.positions.clear(), t.slots.clear(), t.wanted.clear(), t.items.clear(), t.last_items.clear();
    for (int64_t i = 0; i < s.num_seqs; i++) {
        const int64_t first = s.computed[i], count = s.scheduled[i], wanted = s.wanted[i], row = (int64_t)t.ids.size();
        const int64_t *ids = s.tokens + s.rows[i] * s.tokens_stride, *table = s.tables + s.rows[i] * s.tables_stride;
        for (int64_t p = first; p < first + count; p++) {
            t.ids.push_back(ids[p]);
            t.positions.push_back(p);
            t.slots.push_back(table[p / m.block_size] * m.block_size + p % m.block_size);
        }
        add_items(m, t.items, table, first, count, row);
        add_items(m, t.last_items, table, first + count - wanted, wanted, (int64_t)t.wanted.size());
        for (int64_t j = count - wanted; j < count; j++) t.wanted.push_back(row + j);
    }
}

// The buffers of a step, as large as the largest so far.
struct Scratch {
    Tokens tokens;
    Buffer residual, normed, mixed, attended, inner, converted, scales, kept, best, logits;
};
Scratch scratch;

void embed(const PgModel &m, int64_t id, float *out) {
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

KVShape kv_shape(const PgModel &m) { return KVShape{m.kv_format, m.block_size, m.num_kv_heads, m.head_dim}; }

// Turns one token's queries and keys to their position and stores its key and value.
void place_token(const PgModel &m, const PgLayer &layer, const KVShape &shape, int64_t position, int64_t slot,
                 float *mixed, int64_t kv_head) {
    const int64_t dims = m.head_dim, share = m.num_heads / m.num_kv_heads, half = dims / 2;
    const float *cos = m.cos + position * half, *sin = m.sin + position * half;
    float *key = mixed + (m.num_heads + kv_head) * dims;
    const float *value = mixed + (m.num_heads + m.num_kv_heads + kv_head) * dims;
    for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++) {
        float *query = mixed + head * dims;
        if (layer.query_norm) rms_norm_row(query, layer.query_norm, m.eps, dims, query);
        rotate_head(query, cos, sin, dims);
    }
    if (layer.key_norm) rms_norm_row(key, layer.key_norm, m.eps, dims, key);
    rotate_head(key, cos, sin, dims);
    const int64_t at = slot / m.block_size * shape.block_bytes(), offset = slot % m.block_size;
    store_key(shape, layer.keys + at, kv_head, offset, key);
    store_value(shape, layer.values + at, kv_head, offset, value);
}

Attention attention_of(const PgModel &m, const PgLayer &layer, const float *query, int64_t query_stride, float *out,
                       int64_t out_stride) {
    return {kv_shape(m),  layer.keys, layer.values, m.num_heads, layer.window, 1.0f / __builtin_sqrtf((float)m.head_dim), query,
            query_stride, out,        out_stride};
}

// A step's buffers as one member sees them.
struct Step {
    const PgModel &m;
    const Tokens &tokens;
    int64_t hidden_stride, mixed_stride, attended_stride, inner_stride;
    float *residual, *normed, *mixed, *attended, *inner, *kept;
    void *converted;
    float *scales;

    Activations activations(float *x, int64_t stride, int64_t rows) const {
        return {x, stride, rows, m.round_activations != 0, converted, scales};
    }
};

void norm(Member &member, const Step &s, const float *x, const float *weight, int64_t rows) {
    member.for_each(rows, rows < 4 * member.count ? 1 : 4, [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            rms_norm_row(x + row * s.hidden_stride, weight, s.m.eps, s.m.hidden, s.normed + row * s.hidden_stride);
    });
    member.barrier();
}

void add_linear(Member &member, const Step &s, float *x, int64_t stride, int64_t rows, const PgLinear &w, float *sum) {
    linear(member, s.activations(x, stride, rows), w, [&](int64_t row, int64_t column, F low, F high) {
        float *out = sum + row * s.hidden_stride + column;
        store(out, load<F>(out) + low);
        store(out + W, load<F>(out + W) + high);
    });
    member.barrier();
}

void attention_half(Member &member, const Step &s, const PgLayer &layer, bool last) {
    const PgModel &m = s.m;
    const int64_t all = (int64_t)s.tokens.ids.size(), kept = (int64_t)s.tokens.wanted.size();
    const KVShape shape = kv_shape(m);
    norm(member, s, s.residual, layer.input_norm, all);
    linear(member, s.activations(s.normed, s.hidden_stride, all), layer.qkv,
           [&](int64_t row, int64_t column, F low, F high) {
               store(s.mixed + row * s.mixed_stride + column, low);
               store(s.mixed + row * s.mixed_stride + column + W, high);
           });
    member.barrier();
    member.for_each(all * m.num_kv_heads, all < 4 * member.count ? 1 : 4 * m.num_kv_heads,
                    [&](int64_t item, int64_t end) {
                        for (; item < end; item++) {
                            const int64_t row = item / m.num_kv_heads;
                            place_token(m, layer, shape, s.tokens.positions[row], s.tokens.slots[row],
                                        s.mixed + row * s.mixed_stride, item % m.num_kv_heads);
                        }
                    });
    member.barrier();
    const std::vector<AttentionItem> &items = last ? s.tokens.last_items : s.tokens.items;
    if (last) {  // from here on only the wanted rows matter: their queries and residuals move together
        const int64_t width = m.num_heads * m.head_dim;
        member.for_each(kept, 4, [&](int64_t row, int64_t end) {
            for (; row < end; row++) {
                const int64_t from = s.tokens.wanted[row];
                memcpy(s.inner + row * s.inner_stride, s.mixed + from * s.mixed_stride, width * 4);
                memcpy(s.kept + row * s.hidden_stride, s.residual + from * s.hidden_stride, m.hidden * 4);
            }
        });
        member.barrier();
    }
    const Attention a = attention_of(m, layer, last ? s.inner : s.mixed, last ? s.inner_stride : s.mixed_stride,
                                     s.attended, s.attended_stride);
    member.for_each((int64_t)items.size(), 1, [&](int64_t i, int64_t) { attend(a, items[i].group, items[i].head); });
    member.barrier();
    add_linear(member, s, s.attended, s.attended_stride, last ? kept : all, layer.output, last ? s.kept : s.residual);
}

void feed_forward_half(Member &member, const Step &s, const PgLayer &layer, float *x, int64_t rows) {
    norm(member, s, x, layer.post_norm, rows);
    linear(member, s.activations(s.normed, s.hidden_stride, rows), layer.gate_up,
           [&](int64_t row, int64_t column, F gate, F up) {
               const F silu = gate / (exp(-gate) + 1.0f);
               store(s.inner + row * s.inner_stride + column / 2, silu * up);
           });
    member.barrier();
    add_linear(member, s, s.inner, s.inner_stride, rows, layer.down, x);
}

void forward(Member &member, const Step &s, float *hidden) {
    const PgModel &m = s.m;
    const int64_t all = (int64_t)s.tokens.ids.size(), kept = (int64_t)s.tokens.wanted.size();
    member.for_each(all, 1, [&](int64_t row, int64_t) {
        embed(m, s.tokens.ids[row], s.residual + row * s.hidden_stride);
    });
    member.barrier();
    for (int32_t i = 0; i < m.num_layers; i++) {
        const bool last = i == m.num_layers - 1;
        attention_half(member, s, m.layers[i], last);
        if (last && kept == 0) return;
        feed_forward_half(member, s, m.layers[i], last ? s.kept : s.residual, last ? kept : all);
    }
    member.for_each(kept, 1, [&](int64_t row, int64_t) {
        rms_norm_row(s.kept + row * s.hidden_stride, m.norm, m.eps, m.hidden, hidden + row * m.hidden);
    });
}

// The best logit of each row that one member saw, by lane.
struct Best {
    F value[2];
    I id[2];
};

// Rows from outside into a buffer of ours.
Activations spread(const float *x, int64_t rows, int64_t width, bool round) {
    const int64_t stride = row_stride(width);
    float *copy = scratch.normed.get<float>(rows * stride);
    for (int64_t row = 0; row < rows; row++) memcpy(copy + row * stride, x + row * width, width * 4);
    return {copy, stride, rows, round, scratch.converted.get<uint16_t>(rows * stride), scratch.scales.get<float>(rows)};
}

Activations head_input(const PgModel &m, const float *hidden, int64_t rows) {
    return spread(hidden, rows, m.hidden, m.round_activations != 0);
}

}  // namespace

extern "C" void pg_forward(const PgModel *model, const PgStep *step, float *hidden) {
    const PgModel &m = *model;
    list_tokens(m, *step, scratch.tokens);
    const int64_t rows = (int64_t)scratch.tokens.ids.size(), kept = (int64_t)scratch.tokens.wanted.size();
    const int64_t hidden_stride = row_stride(m.hidden);
    const int64_t mixed_stride = row_stride((m.num_heads + 2 * m.num_kv_heads) * m.head_dim);
    const int64_t attended_stride = row_stride(m.num_heads * m.head_dim);
    const int64_t inner_stride = std::max(row_stride(m.inner), attended_stride);
    const int64_t widest = std::max({hidden_stride, attended_stride, inner_stride});
    const Step s{m,
                 scratch.tokens,
                 hidden_stride,
                 mixed_stride,
                 attended_stride,
                 inner_stride,
                 scratch.residual.get<float>(rows * hidden_stride),
                 scratch.normed.get<float>(rows * hidden_stride),
                 scratch.mixed.get<float>(rows * mixed_stride),
                 scratch.attended.get<float>(rows * attended_stride),
                 scratch.inner.get<float>(rows * inner_stride),
                 scratch.kept.get<float>(kept * hidden_stride),
                 scratch.converted.get<uint16_t>(m.round_activations || m.head.format == PG_I8 ? rows * widest : 1),
                 scratch.scales.get<float>(rows)};
    parallel([&](Member &member) { forward(member, s, hidden); });
}

extern "C" void pg_linear(const PgLinear *weight, int32_t round_activations, const float *x, int64_t m, float *out) {
    const int64_t n = weight->n;
    const Activations a = spread(x, m, weight->k, round_activations != 0);
    parallel([&](Member &member) {
        linear(member, a, *weight, [&](int64_t row, int64_t column, F low, F high) {
            store_some(out + row * n + column, low, n - column);
            store_some(out + row * n + column + W, high, n - column - W);
        });
    });
}

extern "C" void pg_logits(const PgModel *model, const float *hidden, int64_t m, float *logits) {
    const Activations a = head_input(*model, hidden, m);
    const int64_t n = model->vocab;
    parallel([&](Member &member) {
        linear(member, a, model->head, [&](int64_t row, int64_t column, F low, F high) {
            store_some(logits + row * n + column, low, n - column);
            store_some(logits + row * n + column + W, high, n - column - W);
        });
    });
}

extern "C" void pg_greedy(const PgModel *model, const float *hidden, int64_t m, int64_t *ids) {
    const Activations a = head_input(*model, hidden, m);
    const int64_t n = model->vocab, count = team_size();
    Best *all = scratch.best.get<Best>(count * m);
    const F lowest = splat(-__builtin_inff());
    for (int64_t i = 0; i < count * m; i++) all[i] = {{lowest, lowest}, {I{}, I{}}};
    parallel([&](Member &member) {
        Best *best = all + member.id * m;
        linear(member, a, model->head, [&](int64_t row, int64_t column, F low, F high) {
            const F given[2] = {low, high};
            for (int h = 0; h < 2; h++) {
                const I id = lanes() + (int32_t)(column + h * W);
                const I better = (given[h] > best[row].value[h]) & (id < (int32_t)n);
                best[row].value[h] = select(better, given[h], best[row].value[h]);
                best[row].id[h] = (id & better) | (best[row].id[h] & ~better);
            }
        });
    });
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
        ids[row] = id;
    }
}

extern "C" void pg_extend(const PgModel *model, const PgStep *step, int64_t count, const float *temperature,
                          const int64_t *seeds, int64_t *ids) {
    const int64_t n = step->num_seqs, vocab = model->vocab;
    std::vector<int64_t> computed(step->computed, step->computed + n), scheduled(step->scheduled, step->scheduled + n);
    std::vector<float> hidden(n * model->hidden);
    int64_t *tokens = const_cast<int64_t *>(step->tokens);
    PgStep next = *step;
    next.computed = computed.data(), next.scheduled = scheduled.data();
    bool greedy = true;
    for (int64_t i = 0; i < n; i++) greedy &= temperature[i] == 0.0f;
    float *logits = greedy ? nullptr : scratch.logits.get<float>(n * vocab);
    for (int64_t turn = 0; turn < count; turn++, ids += n) {
        pg_forward(model, &next, hidden.data());
        for (int64_t i = 0; i < n; i++) computed[i] += scheduled[i], scheduled[i] = 1;
        if (greedy) {
            pg_greedy(model, hidden.data(), n, ids);
        } else {
            pg_logits(model, hidden.data(), n, logits);
            parallel([&](Member &member) {
                member.for_each(n, 1, [&](int64_t i, int64_t) {
                    ids[i] = draw_row(logits + i * vocab, vocab, temperature[i], seeds[i], computed[i]);
                });
            });
        }
        for (int64_t i = 0; i < n; i++) tokens[step->rows[i] * step->tokens_stride + computed[i]] = ids[i];
    }
}

extern "C" void pg_attention(const PgModel *model, const PgLayer *layer, const PgStep *step, const float *query,
                             float *out) {
    list_tokens(*model, *step, scratch.tokens);
    const int64_t width = model->num_heads * model->head_dim;
    const Attention a = attention_of(*model, *layer, query, width, out, width);
    const std::vector<AttentionItem> &items = scratch.tokens.items;
    parallel([&](Member &member) {
        member.for_each((int64_t)items.size(), 1,
                        [&](int64_t i, int64_t) { attend(a, items[i].group, items[i].head); });
    });
}

extern "C" void pg_rms_norm(const float *x, const float *weight, float eps, int64_t m, int64_t hidden, float *out) {
    for (int64_t i = 0; i < m; i++) rms_norm_row(x + i * hidden, weight, eps, hidden, out + i * hidden);
}

extern "C" void pg_store_kv(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim,
                            const float *key, const float *value, const int64_t *slots, int64_t m, uint8_t *keys,
                            uint8_t *values) {
    const KVShape shape{format, block_size, num_kv_heads, head_dim};
    for (int64_t i = 0; i < m; i++)
        for (int64_t head = 0; head < num_kv_heads; head++) {
            const int64_t at = slots[i] / block_size * shape.block_bytes();
            const int64_t from = (i * num_kv_heads + head) * head_dim;
            store_key(shape, keys + at, head, slots[i] % block_size, key + from);
            store_value(shape, values + at, head, slots[i] % block_size, value + from);
        }
}

extern "C" int32_t pg_abi(void) { return PG_ABI; }

extern "C" const char *pg_target(void) {
    return W == 16 ? (HAS_BF16_DOT ? "avx512+bf16" : "avx512") : "avx2";
}

extern "C" void pg_set_threads(int32_t count, int32_t pin) { team_resize(count, pin != 0); }

extern "C" int32_t pg_supports(const PgModel *model) {
    if (model->head_dim % 16 || model->head_dim > 256) return 1;
    if (model->hidden % 16 || model->inner % 16) return 2;
    if (model->block_size < W) return 3;
    if (model->num_heads / model->num_kv_heads > MAX_QUERY_ROWS) return 4;
    return 0;
}
