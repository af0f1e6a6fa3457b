// The two halves of a layer.
#include "layers/activation.h"
#include "steps/lora.h"

namespace {

KVShape kv_shape(const PgModel &m, const PgLayer &layer) {
    return {m.kv_format, m.block_size, layer.num_kv_heads, layer.head_dim, layer.key_scales, layer.value_scales};
}

// Turns one token's queries and keys to their position and stores its key and value.
void place_token(const PgModel &m, const PgLayer &layer, const KVShape &shape, int64_t position, int64_t block,
                 float *mixed, int64_t kv_head) {
    const int64_t dims = layer.head_dim, share = layer.num_heads / layer.num_kv_heads, half = dims / 2;
    const bool by_head = !layer.norm_whole;
    float *key = mixed + (layer.num_heads + kv_head) * dims;
    float *value = key + layer.num_kv_heads * dims;
    const auto place = [&](const PgNorm &norm, float *head) {
        if (norm.weight && by_head) norm_row(norm, head, m.eps, dims, head);
        if (layer.cos) rotate_head(head, layer.cos + position * half, layer.sin + position * half, dims);
    };
    for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++) place(layer.query_norm, mixed + head * dims);
    place(layer.key_norm, key);
    if (layer.value_norm.weight) norm_row(layer.value_norm, value, m.eps, dims, value);
    const int64_t at = block * shape.block_bytes(), offset = shape.offset_of(position);
    store_key(shape, layer.keys + at, kv_head, offset, key);
    store_value(shape, layer.values + at, kv_head, offset, value);
}

void norm_or_copy(const Step &s, const PgNorm &norm, const float *x, float *out) {
    if (norm.weight) norm_row(norm, x, s.m.eps, s.m.hidden, out);
    else memcpy(out, x, s.m.hidden * 4);
}

// Norms rows into to(row), each then followed by then(row).
template <class To, class Then>
void for_each_normed(Member &member, const Step &s, const float *x, const PgNorm &norm, int64_t rows, To &&to, Then &&then) {
    Clock::enter(PG_NORMS);
    member.for_each(rows, rows < 4 * member.count ? 1 : 4, [&](int64_t row, int64_t end) {
        for (; row < end; row++) {
            const float *from = x + row * s.hidden_stride;
            norm_or_copy(s, norm, from, to(row));
            then(row);
        }
    });
    member.barrier();
}

// Into s.normed, where the next linear may round what it reads: the residual stays as it is without a norm too.
void norm(Member &member, const Step &s, const float *x, const PgNorm &norm, int64_t rows) {
    for_each_normed(member, s, x, norm, rows, [&](int64_t row) { return s.normed + row * s.hidden_stride; }, [](int64_t) {});
}

// The same where ranks divide the rows, into memory that all of them have.
Activations norm_divided(Member &member, const Step &s, const float *x, const PgNorm &norm, int64_t rows) {
    const PgGroup &g = *s.m.group;
    const int64_t stride = s.hidden_stride, own = rows > g.rank ? (rows - g.rank + g.ranks - 1) / g.ranks : 0;
    float *normed = areas_of(g, s.m.hidden).normed, *first = normed + g.rank * stride;
    Clock::enter(PG_NORMS);
    member.for_each(own, 1, [&](int64_t i, int64_t) {
        const float *from = x + (g.rank + i * g.ranks) * stride;
        float *to = first + i * g.ranks * stride;
        norm_or_copy(s, norm, from, to);
    });
    meet(member, &g, [&](Written &written) { written.add(first, own, g.ranks * stride * 4, s.m.hidden * 4); });
    return s.activations(normed, stride, rows);
}

// The same for one linear alone, as it reads its rows.
Activations norm_for(Member &member, const Step &s, const float *x, const PgNorm &norm, int64_t rows, const PgLinear &w) {
    if (s.m.group && s.m.group->sequence_parallel) return norm_divided(member, s, x, norm, rows);
    Activations given = s.activations(s.normed, s.hidden_stride, rows);
    if (given.is_alone()) {
        Clock::enter(PG_NORMS);
        given.x += member.id * s.hidden_stride, given.own = true;
        norm_or_copy(s, norm, x, given.x);
        convert(member, given, w);
        return given;
    }
    given.ready = reads_rounded(w, given.round);
    if (!given.ready) {
        ::norm(member, s, x, norm, rows);
        return given;
    }
    const RowLayout layout = layout_of(DOT_BF16, w, rows);
    const auto own = [&](int64_t row) { return s.normed + (rows < member.count ? row : member.id) * s.hidden_stride; };
    for_each_normed(member, s, x, norm, rows, own, [&](int64_t row) {
        const float *from = own(row);
        for (int64_t i = 0; i < w.k; i += 2 * W)
            store_bf16(layout.pair((uint16_t *)s.converted, row, i), load<F>(from + i), load<F>(from + i + W));
    });
    return given;
}

// Queries and keys of all heads together.
void norm_whole(Member &member, const Step &s, const PgLayer &layer, int64_t rows) {
    const PgModel &m = s.m;
    const int64_t queries = layer.num_heads * layer.head_dim, keys = layer.num_kv_heads * layer.head_dim;
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        float *query = s.mixed + row * s.mixed_stride, *key = query + queries;
        if (layer.query_norm.weight) norm_row(layer.query_norm, query, m.eps, queries, query);
        if (layer.key_norm.weight) norm_row(layer.key_norm, key, m.eps, keys, key);
    });
    member.barrier();
}

// Of the last layer only wanted rows go on: their residuals move together.
void keep_wanted(const Step &s, int64_t row) {
    if (!s.is_mine(row)) return;
    memcpy(s.kept + row * s.hidden_stride, s.residual + s.tokens.wanted[row] * s.hidden_stride, s.m.hidden * 4);
}

// Scales what attention gave by the sigmoids of the gates, which stand behind the values.
void gate_attended(Member &member, const Step &s, const PgLayer &layer, int64_t rows, bool last) {
    const int64_t width = layer.num_heads * layer.head_dim, offset = width + 2 * layer.num_kv_heads * layer.head_dim;
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        const float *gate = s.mixed + (last ? s.tokens.wanted[row] : row) * s.mixed_stride + offset;
        float *out = s.attended + row * s.attended_stride + layer.first_attended;
        for (int64_t i = 0; i < width; i += W) store(out + i, load<F>(out + i) / one_plus_exp(-load<F>(gate + i)));
    });
}

void store_linear(Member &member, const Step &s, const Activations &given, const PgLinear &w, int64_t offset,
                  const LoraRows &lora = {}) {
    linear(member, given, w, [&](int64_t row, int64_t column, F low, F high) {
        lora.add(row, column, low, high);
        store(s.mixed + row * s.mixed_stride + offset + column, low);
        store(s.mixed + row * s.mixed_stride + offset + column + W, high);
    }, lora.target(s.mixed + offset, s.mixed_stride));
    member.barrier();
}

void add_linear(Member &member, const Step &s, const Activations &given, const PgLinear &w, const PgNorm &norm,
                float *residual, const LoraRows &lora = {}) {
    const int64_t first = s.m.first_hidden;
    const auto columns_of = [&](const float *rows) {
        return [&, rows](Written &written) { written.add_columns(rows, s.hidden_stride, given.m, first, w.n); };
    };
    if (!norm.weight) {
        const float scale = s.m.residual_scale;
        linear(member, given, w, [&](int64_t row, int64_t column, F low, F high) {
            float *out = residual + row * s.hidden_stride + first + column;
            lora.add(row, column, low, high);
            store(out, load<F>(out) + low * scale);
            store(out + W, load<F>(out + W) + high * scale);
        }, lora.target(residual + first, s.hidden_stride));
        return meet(member, s.m.group, columns_of(residual));
    }
    linear(member, given, w, [&](int64_t row, int64_t column, F low, F high) {
        lora.add(row, column, low, high);
        store(s.joined + row * s.hidden_stride + first + column, low);
        store(s.joined + row * s.hidden_stride + first + column + W, high);
    }, lora.target(s.joined + first, s.hidden_stride));
    meet(member, s.m.group, columns_of(s.joined));
    member.for_each(given.m, 1, [&](int64_t row, int64_t) {
        if (s.is_mine(row)) add_row(s, norm, s.joined + row * s.hidden_stride, residual + row * s.hidden_stride);
    });
    meet_sharing(member, s.m.group);
}

}  // namespace

Attention attention_of(const PgModel &m, const PgLayer &layer, const float *query, int64_t query_stride, float *out,
                       int64_t out_stride) {
    const float scale = layer.scale ? layer.scale : 1.0f / __builtin_sqrtf((float)layer.head_dim);
    const bool latent = layer.latent != nullptr;
    Attention a;
    a.shape = kv_shape(m, layer), a.share = query_share(layer), a.window = layer.window;
    a.keys = latent ? layer.values : layer.keys, a.values = layer.values;
    a.table = layer.table, a.latent = latent, a.value_dim = latent ? layer.latent->rank : layer.head_dim;
    a.scale = scale, a.softcap = layer.softcap, a.sinks = layer.sinks;
    a.query = query, a.query_stride = query_stride, a.out = out, a.out_stride = out_stride;
    a.rounds = HAS_BF16_DOT && m.round_attention && m.kv_format == PG_BF16 && !latent && layer.head_dim % 32 == 0;
    return a;
}

namespace {

// What stands in s.mixed goes through convolution and delta rule into s.attended; of the last layer wanted rows alone.
void attend_linearly(Member &member, const Step &s, const PgDelta &d, bool last) {
    const int64_t all = (int64_t)s.tokens.ids.size(), rows = last ? (int64_t)s.tokens.wanted.size() : all;
    const DeltaRows r{d, s.tokens.sequences, s.mixed, s.mixed_stride, s.mixed + gates_offset(d), s.mixed_stride};
    convolve(member, r);
    member.barrier();
    prepare_delta(member, r, all);
    member.barrier();
    apply_delta_rule(member, r);
    member.barrier();
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        const float *value = s.mixed + (last ? s.tokens.wanted[row] : row) * s.mixed_stride + 2 * key_features(d);
        const float *gate = value + value_features(d);
        float *out = s.attended + row * s.attended_stride;
        for (int64_t head = 0; head < d.value_heads; head++)
            norm_row(d.norm, value + head * d.value_dim, s.m.eps, d.value_dim, out + head * d.value_dim);
        for (int64_t i = 0; i < value_features(d); i += W) store(out + i, load<F>(out + i) * silu(load<F>(gate + i)));
        if (last) keep_wanted(s, row);
    });
    member.barrier();
}

}  // namespace

void attention_half(Member &member, const Step &s, const PgLayer &layer, bool last) {
    const PgModel &m = s.m;
    const int64_t all = (int64_t)s.tokens.ids.size(), kept = (int64_t)s.tokens.wanted.size();
    const KVShape shape = kv_shape(m, layer);
    const int64_t kv_heads = layer.num_kv_heads, picked_stride = m.group ? s.queries_stride : s.inner_stride;
    if (layer.delta) {
        Activations given = s.activations(s.normed, s.hidden_stride, all);
        norm(member, s, s.residual, layer.input_norm, all);
        const LoraRows lora = add_lora(member, s, layer, LORA_QKV, given, false);
        store_linear(member, s, given, layer.qkv, 0, lora);
        given.ready = false;
        store_linear(member, s, given, layer.delta->gates, gates_offset(*layer.delta));
        attend_linearly(member, s, *layer.delta, last);
        return add_linear(member, s, s.activations(s.attended, s.attended_stride, last ? kept : all), layer.output,
                          layer.attention_norm, last ? s.kept : s.residual);
    }
    Activations read = s.activations(s.given.beside, layer.qkv.k, all);
    if (!s.given.beside || &layer != s.m.layers) read = norm_for(member, s, s.residual, layer.input_norm, all, layer.qkv);
    const LoraRows first = add_lora(member, s, layer, LORA_QKV, read, false);
    store_linear(member, s, read, layer.qkv, 0, first);
    if (layer.norm_whole) norm_whole(member, s, layer, all);
    const auto place = [&](int64_t row, int64_t kv_head) {
        place_token(m, layer, shape, s.tokens.positions[row], s.tokens.blocks[row][layer.table],
                    s.mixed + row * s.mixed_stride, kv_head);
    };
    // Of one token of each sequence no other is attended to: each attends once it is placed.
    const bool placed_beside = !layer.latent && !last && all == s.given.num_seqs;
    if (layer.latent) {
        store_latents(member, s, layer, shape, all);
    } else if (!placed_beside) {
        Clock::enter(PG_PLACING);
        member.for_each(all * kv_heads, all < 4 * member.count ? 1 : 4 * kv_heads, [&](int64_t item, int64_t end) {
            for (; item < end; item++) place(item / kv_heads, item % kv_heads);
        });
        member.barrier();
    }
    const AttentionItems &found = s.tokens.items_of(layer);
    const std::vector<AttentionItem> &items = last ? found.last : found.all;
    if (last) {  // from here on only the wanted rows matter: their queries and residuals move together
        const int64_t width = layer.latent ? latent_first(layer) : layer.num_heads * layer.head_dim;
        member.for_each(kept, 4, [&](int64_t row, int64_t end) {
            for (; row < end; row++) {
                const int64_t from = s.tokens.wanted[row];
                memcpy(s.picked + row * picked_stride, s.mixed + from * s.mixed_stride, width * 4);
                keep_wanted(s, row);
            }
        });
        member.barrier();
    }
    const int64_t rows = last ? kept : all;
    Vectors query = last ? Vectors{s.picked, picked_stride} : Vectors{s.mixed, s.mixed_stride};
    if (layer.latent) query = latent_queries(member, s, layer, query, rows, last);
    float *own = s.attended + layer.first_attended;
    Attention a = attention_of(m, layer, query.x, query.stride, own, s.attended_stride);
    if (a.rounds && !layer.attention_gate && reads_rounded(layer.output, m.round_activations != 0))
        a.rounded = (uint16_t *)s.attended, a.layout = layout_of(DOT_BF16, layer.output, rows), a.first = layer.first_attended;
    Clock::enter(PG_ATTENDING);
    member.for_each((int64_t)items.size(), 1, [&](int64_t i, int64_t) {
        if (placed_beside) place(items[i].group.row, items[i].head);
        attend(a, items[i], i + 1 < (int64_t)items.size() ? &items[i + 1] : nullptr);
    });
    if (layer.attention_gate) {
        member.barrier();
        gate_attended(member, s, layer, rows, last);
    }
    meet(member, m.group, [&](Written &written) {
        const int64_t width = layer.num_heads * layer.head_dim;
        if (a.rounded) written.add_rounded(a.rounded, a.layout, a.first, width);
        else written.add_columns(s.attended, s.attended_stride, rows, layer.first_attended, width);
    });
    Vectors values{s.attended, s.attended_stride};
    if (layer.latent) values = latent_values(member, s, layer, rows);
    Activations given = s.activations(values.x, values.stride, rows);
    if (a.rounded) given.converted = a.rounded, given.ready = true;
    const LoraRows second = add_lora(member, s, layer, LORA_OUTPUT, given, last);
    add_linear(member, s, given, layer.output, layer.attention_norm, last ? s.kept : s.residual, second);
}

void feed_forward_half(Member &member, const Step &s, const PgLayer &layer, float *residual, int64_t rows) {
    if (layer.experts) {
        norm(member, s, residual, layer.mlp_norm, rows);
        mix_experts(member, s, layer, residual, rows);
    } else {
        feed_forward(member, s, layer, norm_for(member, s, residual, layer.mlp_norm, rows, layer.gate_up), residual);
    }
    if (!layer.layer_scale) return;
    member.for_each(rows, 1, [&](int64_t row, int64_t) {
        if (!s.is_mine(row)) return;
        float *x = residual + row * s.hidden_stride;
        for (int64_t i = 0; i < s.m.hidden; i += W) store(x + i, load<F>(x + i) * *layer.layer_scale);
    });
    meet_sharing(member, s.m.group);
}

void feed_forward(Member &member, const Step &s, const PgLayer &layer, Activations given, float *residual) {
    const int64_t rows = given.m;
    const bool last = residual == s.kept;
    Inner inner{s.inner, s.inner_stride, nullptr, {}, layer.first_inner};
    Activations between = s.activations(s.inner, s.inner_stride, rows);
    between.ready = reads_rounded(layer.down, given.round);
    if (between.ready) {
        between.converted = inner.rounded = (uint16_t *)s.inner;
        inner.layout = layout_of(DOT_BF16, layer.down, rows);
    }
    const LoraRows lora = add_lora(member, s, layer, LORA_GATE_UP, given, last);
    with_activation(layer, inner, [&](auto &&out) {
        linear(member, given, layer.gate_up, [&](int64_t row, int64_t column, F low, F high) {
            lora.add(row, column, low, high);
            out(row, column, low, high);
        }, lora.target(nullptr, 0));
    });
    meet(member, s.m.group, [&](Written &written) {
        const int64_t width = layer.gate_up.n / (layer.gated ? 2 : 1);
        if (inner.rounded) written.add_rounded(inner.rounded, inner.layout, inner.first, width);
        else written.add_columns(s.inner, s.inner_stride, rows, inner.first, width);
    });
    const LoraRows more = add_lora(member, s, layer, LORA_DOWN, between, last);
    add_linear(member, s, between, layer.down, layer.mlp_output_norm, residual, more);
}
