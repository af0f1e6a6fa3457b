// A step from the embeddings of its tokens to their hidden states.
#include <algorithm>
#include <atomic>

#include "steps/lora.h"

namespace {

// Heads outside groups: the keys and values of one head are then read again while they are near.
void add_items(const AttentionItems &shape, std::vector<AttentionItem> &items, const int64_t *table, int64_t position,
               int64_t count, int64_t row) {
    const int64_t most = MAX_QUERY_ROWS / shape.share;
    for (int64_t head = 0; head < shape.groups; head++)
        for (int64_t i = 0; i < count; i += most)
            items.push_back({{table, position + i, std::min(most, count - i), row + i}, head});
}

bool has_shape(const AttentionItems &items, const PgLayer &layer) {
    const int64_t share = query_share(layer);
    return items.share == share && items.groups == layer.num_heads / share;
}

// An empty list for each shape that the layers' heads have; memory of the last step is used again.
void begin_items(const PgModel &m, std::vector<AttentionItems> &items) {
    size_t count = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (layer.delta) continue;
        size_t known = 0;
        while (known < count && !has_shape(items[known], layer)) known++;
        if (known < count) continue;
        if (count == items.size()) items.emplace_back();
        items[count].share = query_share(layer), items[count].groups = layer.num_heads / items[count].share;
        items[count].all.clear(), items[count].last.clear();
        count++;
    }
    items.resize(count);
}

// The buffers of a step, as large as the largest so far.
struct Scratch {
    Tokens tokens;
    Buffer residual, normed, mixed, attended, queries, inner, kept, converted, scales, added;
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
    if (is_nibbles(m.head.format)) return read_nibbles(nibbles_of(m.head), id, out);
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

void embed(const PgModel &m, int64_t id, int64_t position, int64_t adapter, float *out) {
    read_embedding(m, id, out);
    if (adapter >= 0) add_embedding(m, adapter, id, out);
    if (m.embed_scale != 1.0f)
        for (int64_t i = 0; i < m.hidden; i += W) store(out + i, load<F>(out + i) * m.embed_scale);
    const float *added = m.positions ? m.positions + position * m.hidden : nullptr;
    for (int64_t i = 0; added && i < m.hidden; i += W) store(out + i, load<F>(out + i) + load<F>(added + i));
}

// What enters a layer, where it is asked for.
void capture(Member &member, const Step &s, int32_t layer, int64_t rows) {
    const int64_t n = s.m.hidden, width = s.given.num_captured * n;
    for (int64_t at = 0; at < s.given.num_captured; at++) {
        if (s.given.captured[at] != layer) continue;
        member.for_each(rows, 1, [&](int64_t row, int64_t) {
            memcpy(s.given.captures + row * width + at * n, s.residual + row * s.hidden_stride, n * 4);
        });
        member.barrier();
    }
}

bool has_embedding(const PgModel &m, int64_t id) { return id >= m.first_vocab && id < m.first_vocab + m.head.n; }

// Every rank has the embeddings then, or what stands in their place, and all have read the same step.
void begin_forward(Member &member, const Step &s) {
    const PgModel &m = s.m;
    if (!m.group || !is_linked(*m.group)) return agree(member, m.group);
    meet(member, m.group, [&](Written &written) {
        for (size_t row = 0; row < s.tokens.ids.size(); row++)
            if (s.given.inputs ? leads(*m.group) : has_embedding(m, s.tokens.ids[row]))
                written.add_columns(s.residual + row * s.hidden_stride, 0, 1, 0, m.hidden);
    });
}

void embed_all(Member &member, const Step &s) {
    const PgModel &m = s.m;
    const int64_t all = (int64_t)s.tokens.ids.size();
    member.for_each(all, 1, [&](int64_t row, int64_t) {
        if (s.given.inputs) {
            if (s.given.inputs != s.residual)  // else the leader puts them there
                memcpy(s.residual + row * s.hidden_stride, s.given.inputs + row * m.hidden, m.hidden * 4);
            return;
        }
        const int64_t adapter = s.tokens.adapters.empty() ? -1 : s.tokens.adapters[row];
        const int64_t id = s.tokens.ids[row];
        if (m.group && !has_embedding(m, id)) return;  // each rank has some tokens'
        embed(m, id - m.first_vocab, s.tokens.positions[row], adapter, s.residual + row * s.hidden_stride);
    });
    begin_forward(member, s);
}

void compute_layer(Member &member, const Step &s, int32_t i) {
    const PgModel &m = s.m;
    const int64_t all = (int64_t)s.tokens.ids.size(), kept = (int64_t)s.tokens.wanted.size();
    const bool last = i == m.num_layers - 1;
    capture(member, s, i, all);
    attention_half(member, s, m.layers[i], last);
    if (!last || kept) feed_forward_half(member, s, m.layers[i], last ? s.kept : s.residual, last ? kept : all);
}

void norm_kept(Member &member, const Step &s, float *hidden) {
    const PgModel &m = s.m;
    const int64_t kept = (int64_t)s.tokens.wanted.size();
    if (m.group && !leads(*m.group)) return;
    member.for_each(kept, 1, [&](int64_t row, int64_t) {
        const float *from = s.kept + row * s.hidden_stride;
        if (m.norm.weight)
            norm_row(m.norm, from, m.eps, m.hidden, hidden + row * m.hidden);
        else
            memcpy(hidden + row * m.hidden, from, m.hidden * 4);
    });
}

constexpr size_t FEW_ROWS = 16;  // memory is what all wait for then

// A step of few rows as a job in parts, which end between two layers; another one in one part.
class Forward {
  public:
    // Many rows take a member's part of the arithmetic, however late it comes, and ranks wait for each other anyway.
    Forward(const Step &s, float *hidden) : in_parts(s.tokens.ids.size() <= FEW_ROWS && !s.m.group), s_(s), hidden_(hidden) {}
    const bool in_parts;

    void part(Member &member) {
        const int32_t layers = s_.m.num_layers;
        int32_t i = next_;
        if (i == 0) embed_all(member, s_);
        for (; i < layers; i++) {
            // The first member says so a layer ahead: before the others look, they pass this layer's barriers.
            if (i == end_.load(std::memory_order_relaxed)) break;
            if (in_parts && should_end(member)) end_.store(i + 1, std::memory_order_relaxed);
            compute_layer(member, s_, i);
        }
        if (i == layers) norm_kept(member, s_, hidden_);
        member.barrier();
        if (member.id) return;
        next_ = i, end_.store(-1, std::memory_order_relaxed);
    }
    bool is_done() const { return next_ == s_.m.num_layers; }

  private:
    const Step &s_;
    float *hidden_;
    int32_t next_ = 0;              // layer
    std::atomic<int32_t> end_{-1};  // of this part
};

// What a layer's first linears give, and what its attention gives.
int64_t mixed_width(const PgLayer &layer) {
    if (layer.delta) return gates_offset(*layer.delta) + padded(2 * layer.delta->value_heads);
    return ((layer.attention_gate ? 2 : 1) * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
}
int64_t attended_width(const PgLayer &layer) {
    return layer.delta ? value_features(*layer.delta) : layer.num_heads * layer.head_dim;
}

bool is_served(const PgLatent &l) {
    return (l.rank | l.rotated | l.plain | l.value_dim | l.query_rank) % 16 == 0;
}

bool is_served(const PgDelta &d) {
    return d.key_heads > 0 && d.value_heads % d.key_heads == 0 && d.key_dim % 16 == 0 && d.value_dim % 16 == 0 &&
           d.width >= 2 && d.width <= 4;
}

// Of every token its sequence's adapter, where any has one.
void list_adapters(const PgStep &s, Tokens &tokens) {
    tokens.adapters.clear(), tokens.wanted_adapters.clear();
    const auto is_one = [](int64_t adapter) { return adapter >= 0; };
    if (s.adapters && std::any_of(s.adapters, s.adapters + s.num_seqs, is_one))
        for (int64_t i = 0; i < s.num_seqs; i++) {
            tokens.adapters.insert(tokens.adapters.end(), s.scheduled[i], s.adapters[i]);
            tokens.wanted_adapters.insert(tokens.wanted_adapters.end(), s.wanted[i], s.adapters[i]);
        }
    group_adapters(tokens.adapters, tokens.groups);
    group_adapters(tokens.wanted_adapters, tokens.wanted_groups);
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
    ids.clear(), positions.clear(), blocks.clear(), wanted.clear();
    list_adapters(s, *this);
    list_reads(m, groups, (int64_t)adapters.size(), ahead);
    begin_items(m, items);
    list_sequences(s, sequences);
    for (int64_t i = 0; i < s.num_seqs; i++) {
        const int64_t first = s.computed[i], count = s.scheduled[i], last = s.wanted[i], row = (int64_t)ids.size();
        const int64_t *given = s.listed ? s.listed + row - first : s.tokens + s.rows[i] * s.tokens_stride;
        const int64_t *table = s.tables + s.rows[i] * s.tables_stride;
        for (int64_t p = first; p < first + count; p++) {
            ids.push_back(given[p]);
            positions.push_back(p);
            blocks.push_back(table + p / m.block_size);
        }
        for (AttentionItems &shape : items) {
            add_items(shape, shape.all, table, first, count, row);
            add_items(shape, shape.last, table, first + count - last, last, (int64_t)wanted.size());
        }
        for (int64_t j = count - last; j < count; j++) wanted.push_back(row + j);
    }
}

const AttentionItems &Tokens::items_of(const PgLayer &layer) const {
    size_t i = 0;
    while (!has_shape(items[i], layer)) i++;
    return items[i];
}

Step make_step(const PgModel &m, const PgStep &given, const Tokens &tokens, int64_t rows, int64_t kept) {
    const int64_t hidden_stride = row_stride(m.hidden);
    int64_t mixed_stride = 0, attended_stride = 0, queries_stride = 0, inner_stride = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        mixed_stride = std::max(mixed_stride, row_stride(mixed_width(layer)));
        attended_stride = std::max(attended_stride, row_stride(attended_width(layer)));
        if (const PgLatent *l = layer.latent) {
            const int64_t width = layer.num_heads * (l->plain + l->rotated);
            mixed_stride = std::max(mixed_stride, row_stride(latent_first(layer) + layer.head_dim));
            attended_stride = std::max(attended_stride, row_stride(width));
            queries_stride = std::max(queries_stride, row_stride(layer.num_heads * std::max(layer.head_dim, l->value_dim)));
            inner_stride = std::max(inner_stride, row_stride(latent_first(layer)));
        }
        inner_stride = std::max({inner_stride, attended_stride, row_stride(layer.inner)});
    }
    GroupAreas shared{};
    if (m.group) {  // whose strides all ranks agree on
        shared = areas_of(*m.group, m.hidden);
        queries_stride = attended_stride, inner_stride = row_stride(m.group->inner);
        attended_stride = row_stride(m.group->attended);
    }
    const int64_t added_stride = tokens.adapters.empty() ? 0 : row_stride(widest_linear(m));
    const int64_t beside = given.beside ? row_stride(m.layers[0].qkv.k) : 0;
    const int64_t widest = std::max(
        {hidden_stride, beside, inner_stride, attended_stride, queries_stride, queries_stride ? mixed_stride : 0});
    const auto common = [&](float *area, Buffer &own, int64_t count) { return m.group ? area : own.get<float>(count); };
    const int64_t copies = std::max<int64_t>(rows, team_size());  // of a row alone each member has one
    float *normed = scratch.normed.get<float>(copies * hidden_stride), *queries = scratch.queries.get<float>(rows * queries_stride);
    float *inner = common(shared.inner, scratch.inner, rows * inner_stride);
    return {m,
            given,
            tokens,
            hidden_stride,
            mixed_stride,
            attended_stride,
            queries_stride,
            inner_stride,
            reserve_experts(m, rows),
            common(shared.residual, scratch.residual, rows * hidden_stride),
            normed,
            scratch.mixed.get<float>(rows * mixed_stride),
            common(shared.attended, scratch.attended, rows * attended_stride),
            queries,
            inner,
            common(shared.kept, scratch.kept, kept * hidden_stride),
            scratch.converted.get<uint16_t>(copies * (widest + CONVERTED_MORE)),
            (widest + CONVERTED_MORE) * 2,
            scratch.scales.get<float>(copies),
            scratch.added.get<float>(rows * added_stride),
            added_stride,
            m.group ? queries : inner,
            m.group ? shared.joined : normed};
}

Activations spread(const float *x, int64_t rows, int64_t width, bool round) {
    const int64_t stride = row_stride(width);
    float *copy = scratch.normed.get<float>(rows * stride);
    for (int64_t row = 0; row < rows; row++) memcpy(copy + row * stride, x + row * width, width * 4);
    const int64_t copies = std::max<int64_t>(rows, team_size()), apart = stride + CONVERTED_MORE;
    return {copy, stride, rows, round, scratch.converted.get<uint16_t>(copies * apart), scratch.scales.get<float>(copies), apart * 2};
}

extern "C" void pg_forward(const PgModel *model, const PgStep *step, float *hidden) {
    if (model->group && leads(*model->group) && !order_forward(*model, *step)) return;
    Tokens &tokens = scratch.tokens;
    tokens.list(*model, *step);
    const Step s = make_step(*model, *step, tokens, (int64_t)tokens.ids.size(), (int64_t)tokens.wanted.size());
    Forward forward(s, hidden);
    if (forward.in_parts) parallel_in_parts(forward);
    else parallel([&](Member &member) { forward.part(member); });
}

extern "C" int32_t pg_abi(void) { return PG_ABI; }

extern "C" const char *pg_target(void) {
    if (W < 16) return "avx2";
    if (HAS_TILES && tiles_allowed()) return "avx512+bf16+amx3";
    return HAS_BF16_DOT ? "avx512+bf16.2" : "avx512";
}

extern "C" void pg_set_threads(int32_t count, int32_t pin) { team_resize(count, pin != 0); }

extern "C" int32_t pg_supports(const PgModel *model) {
    if (model->hidden % 16) return 2;
    if (model->block_size < W) return 3;
    for (int32_t i = 0; i < model->num_layers; i++) {
        const PgLayer &layer = model->layers[i];
        if (layer.head_dim % 16 || layer.head_dim > MAX_HEAD_DIM) return 1;
        if (!layer.latent && layer.num_heads > MAX_QUERY_ROWS * layer.num_kv_heads) return 4;
        if (layer.latent && !is_served(*layer.latent)) return 9;
        if (layer.inner % 16) return 2;
        if (layer.activation == PG_CLAMPED_SWIGLU && !layer.gated) return 5;
        if (layer.delta && !is_served(*layer.delta)) return 10;
        const int32_t reason = layer.experts ? why_unsupported(*layer.experts) : 0;
        if (reason) return reason;
    }
    return 0;
}
