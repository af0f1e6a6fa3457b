// Single ops, for tests and study: the code that a step runs, on rows from outside.
#include "steps/step.h"

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

extern "C" void pg_norm(const PgNorm *norm, const float *x, float eps, int64_t m, int64_t hidden, float *out) {
    for (int64_t i = 0; i < m; i++) norm_row(*norm, x + i * hidden, eps, hidden, out + i * hidden);
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

extern "C" void pg_attention(const PgModel *model, const PgLayer *layer, const PgStep *step, const float *query,
                             float *out) {
    PgModel one = *model;
    one.layers = layer, one.num_layers = 1;
    Tokens tokens;
    tokens.list(one, *step);
    const std::vector<AttentionItem> &items = tokens.items_of(*layer).all;
    const int64_t width = layer->num_heads * layer->head_dim;
    const int64_t out_width = layer->latent ? layer->num_heads * layer->latent->rank : width;
    const Attention a = attention_of(one, *layer, query, width, out, out_width);
    parallel([&](Member &member) {
        member.for_each((int64_t)items.size(), 1, [&](int64_t i, int64_t) { attend(a, items[i], nullptr); });
    });
}

extern "C" void pg_feed_forward(const PgModel *model, const PgLayer *layer, const float *x, int64_t m, float *out) {
    PgLayer alone = *layer;
    alone.mlp_output_norm.weight = nullptr;
    PgModel one = *model;
    one.layers = &alone, one.num_layers = 1, one.residual_scale = 1.0f;
    const Tokens none;
    const PgStep nothing{};
    const Step s = make_step(one, nothing, none, m, m);
    for (int64_t row = 0; row < m; row++) {
        memcpy(s.normed + row * s.hidden_stride, x + row * one.hidden, one.hidden * 4);
        memset(s.residual + row * s.hidden_stride, 0, one.hidden * 4);
    }
    parallel([&](Member &member) {
        if (alone.experts) return mix_experts(member, s, alone, s.residual, m);
        feed_forward(member, s, alone, s.activations(s.normed, s.hidden_stride, m), s.residual);
    });
    for (int64_t row = 0; row < m; row++) memcpy(out + row * one.hidden, s.residual + row * s.hidden_stride, one.hidden * 4);
}
