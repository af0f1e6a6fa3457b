// Weights from rows into panels, once at load.
#include "ops.h"

namespace {

float value_at(const void *source, int32_t format, int64_t index) {
    return format == PG_F32 ? ((const float *)source)[index] : from_bf16(((const uint16_t *)source)[index]);
}

// Where rows come from: one matrix, or gate and up taken by turns, W columns of each to a panel.
struct Source {
    const void *first, *second;
    int32_t format;
    int64_t n, k;

    float at(int64_t row, int64_t feature) const {
        if (!second) return value_at(first, format, row * k + feature);
        const int64_t within = row % NR, inner = row / NR * W + within % W;
        return value_at(within < W ? first : second, format, inner * k + feature);
    }
};

void pack_f32(const Source &s, int64_t panel, float *out) {
    for (int64_t j = 0; j < NR; j++)
        for (int64_t i = 0; i < s.k; i++)
            out[(panel * s.k + i) * NR + j] = panel * NR + j < s.n ? s.at(panel * NR + j, i) : 0.0f;
}

void pack_bf16(const Source &s, int64_t panel, uint16_t *out) {
    for (int64_t j = 0; j < NR; j++)
        for (int64_t i = 0; i < s.k; i++) {
            const float v = panel * NR + j < s.n ? s.at(panel * NR + j, i) : 0.0f;
            out[panel * s.k * NR + (i / 2 * NR + j) * 2 + i % 2] = to_bf16(v);
        }
}

void pack_i8(const Source &s, int64_t panel, int64_t columns, int8_t *out) {
    float *scales = (float *)(out + columns * s.k);
    int32_t *sums = (int32_t *)(scales + columns);
    for (int64_t j = 0; j < NR; j++) {
        const int64_t row = panel * NR + j;
        float peak = 0;
        for (int64_t i = 0; row < s.n && i < s.k; i++) {
            const float v = s.at(row, i), size = v < 0 ? -v : v;
            peak = size > peak ? size : peak;
        }
        const float factor = peak > 0 ? 127.0f / peak : 0.0f;
        int32_t sum = 0;
        for (int64_t i = 0; i < s.k; i++) {
            const F v = splat(row < s.n ? s.at(row, i) : 0.0f);
            const int8_t q = (int8_t)round_even(v * factor)[0];
            out[panel * s.k * NR + (i / 4 * NR + j) * 4 + i % 4] = q;
            sum += q;
        }
        scales[row] = peak / 127.0f;
        sums[row] = 128 * sum;
    }
}

void pack(const Source &s, int32_t format, void *packed) {
    const int64_t panels = (s.n + NR - 1) / NR;
    parallel([&](Member &member) {
        member.for_each(panels, 1, [&](int64_t panel, int64_t) {
            if (format == PG_F32) pack_f32(s, panel, (float *)packed);
            if (format == PG_BF16) pack_bf16(s, panel, (uint16_t *)packed);
            if (format == PG_I8) pack_i8(s, panel, panels * NR, (int8_t *)packed);
        });
    });
}

}  // namespace

extern "C" int64_t pg_packed_bytes(int64_t n, int64_t k, int32_t format) {
    const int64_t columns = (n + NR - 1) / NR * NR;
    return format == PG_F32 ? columns * k * 4 : format == PG_BF16 ? columns * k * 2 : columns * (k + 8);
}

extern "C" void pg_pack_linear(const void *source, int32_t source_format, int64_t n, int64_t k, int32_t format,
                               void *packed) {
    pack({source, nullptr, source_format, n, k}, format, packed);
}

extern "C" void pg_pack_gate_up(const void *gate, const void *up, int32_t source_format, int64_t inner, int64_t k,
                                int32_t format, void *packed) {
    pack({gate, up, source_format, 2 * inner, k}, format, packed);
}
