// Weights from rows into panels, once at load.
#include <algorithm>

#include "digest.h"
#include "ops.h"

namespace {

constexpr int64_t AT_ONCE = ChunkSums::AT_ONCE * PG_DIGEST_CHUNK;  // bytes of rows that are packed, then summed

float value_at(const void *source, int32_t format, int64_t index) {
    return format == PG_F32 ? ((const float *)source)[index] : from_bf16(((const uint16_t *)source)[index]);
}

// Where rows come from: matrices one below the other, or gate and up taken by turns, W columns of each to a panel.
struct Source {
    const PgRows *parts;
    int32_t num_parts, format;
    bool by_turns;
    int64_t n, k;

    int64_t row_bytes() const { return k * (format == PG_F32 ? 4 : 2); }

    const void *row(int64_t row) const {
        int32_t part = 0;
        if (by_turns) {
            part = row % NR >= W;
            row = row / NR * W + row % W;
        } else {
            while (row >= parts[part].n) row -= parts[part++].n;
        }
        return (const uint8_t *)parts[part].rows + row * row_bytes();
    }

    // Of the chunks that end in the rows of these panels.
    void make_sums(int64_t panel, int64_t end_panel) const {
        ChunkSums chunks;
        for (int64_t part = 0, start = 0; part < num_parts; start += parts[part++].n) {
            const int64_t first = by_turns ? panel * W : std::max<int64_t>(panel * NR - start, 0);
            const int64_t end = by_turns ? end_panel * W : end_panel * NR - start;
            const PgRows &rows = parts[part];
            chunks.add(rows.rows, rows.n * row_bytes(), first * row_bytes(), end * row_bytes(), rows.sums);
        }
    }
};

void pack_f32(const Source &s, int64_t panel, float *out) {
    for (int64_t j = 0; j < NR; j++) {
        const void *row = panel * NR + j < s.n ? s.row(panel * NR + j) : nullptr;
        for (int64_t i = 0; i < s.k; i++) out[(panel * s.k + i) * NR + j] = row ? value_at(row, s.format, i) : 0.0f;
    }
}

void pack_bf16(const Source &s, int64_t panel, uint16_t *out) {
    for (int64_t j = 0; j < NR; j++) {
        const void *row = panel * NR + j < s.n ? s.row(panel * NR + j) : nullptr;
        for (int64_t i = 0; i < s.k; i++)
            out[panel * s.k * NR + (i / 2 * NR + j) * 2 + i % 2] = to_bf16(row ? value_at(row, s.format, i) : 0.0f);
    }
}

void pack_i8(const Source &s, int64_t panel, int64_t columns, int8_t *out) {
    float *scales = (float *)(out + columns * s.k);
    int32_t *sums = (int32_t *)(scales + columns);
    for (int64_t j = 0; j < NR; j++) {
        const int64_t column = panel * NR + j;
        const void *row = column < s.n ? s.row(column) : nullptr;
        float peak = 0;
        for (int64_t i = 0; row && i < s.k; i++) {
            const float v = value_at(row, s.format, i), size = v < 0 ? -v : v;
            peak = size > peak ? size : peak;
        }
        const float factor = peak > 0 ? 127.0f / peak : 0.0f;
        int32_t sum = 0;
        for (int64_t i = 0; i < s.k; i++) {
            const F v = splat(row ? value_at(row, s.format, i) : 0.0f);
            const int8_t q = (int8_t)round_even(v * factor)[0];
            out[panel * s.k * NR + (i / 4 * NR + j) * 4 + i % 4] = q;
            sum += q;
        }
        scales[column] = peak / 127.0f;
        sums[column] = 128 * sum;
    }
}

void pack(const Source &s, int32_t format, void *packed) {
    const int64_t panels = (s.n + NR - 1) / NR;
    parallel([&](Member &member) {
        // Panels whose rows fill some chunks; fewer where there are not many pieces for each member.
        const int64_t panel_bytes = std::max<int64_t>(NR * s.row_bytes(), 1);
        const int64_t many = std::min(AT_ONCE / panel_bytes, panels / (4 * member.count));
        member.for_each(panels, std::max<int64_t>(many, 1), [&](int64_t panel, int64_t end) {
            for (int64_t p = panel; p < end; p++) {
                if (format == PG_F32) pack_f32(s, p, (float *)packed);
                if (format == PG_BF16) pack_bf16(s, p, (uint16_t *)packed);
                if (format == PG_I8) pack_i8(s, p, panels * NR, (int8_t *)packed);
            }
            s.make_sums(panel, end);  // afterwards: packing computes so much that it does not wait for memory
        });
    });
}

}  // namespace

extern "C" int64_t pg_packed_bytes(int64_t n, int64_t k, int32_t format) {
    const int64_t columns = (n + NR - 1) / NR * NR;
    return format == PG_F32 ? columns * k * 4 : format == PG_BF16 ? columns * k * 2 : columns * (k + 8);
}

extern "C" void pg_pack_linear(const PgRows *parts, int32_t num_parts, int32_t source_format, int64_t k, int32_t format,
                               void *packed) {
    int64_t n = 0;
    for (int32_t part = 0; part < num_parts; part++) n += parts[part].n;
    pack({parts, num_parts, source_format, false, n, k}, format, packed);
}

extern "C" void pg_pack_gate_up(const PgRows *gate_and_up, int32_t source_format, int64_t k, int32_t format,
                                void *packed) {
    pack({gate_and_up, 2, source_format, true, 2 * gate_and_up->n, k}, format, packed);
}

extern "C" void pg_copy(const void *source, int32_t source_format, int64_t count, int32_t format, void *target,
                        uint64_t *sums) {
    const int64_t size = source_format == PG_F32 ? 4 : 2, bytes = count * size;
    parallel([&](Member &member) {
        member.for_each(bytes, AT_ONCE, [&](int64_t begin, int64_t end) {
            ChunkSums chunks;
            chunks.add(source, bytes, begin, end, sums);
            chunks.flush();  // before the copy, which would wait for the same memory
            if (format == source_format) {
                memcpy((uint8_t *)target + begin, (const uint8_t *)source + begin, end - begin);
                return;
            }
            for (int64_t i = begin / size; i < end / size; i++)
                ((float *)target)[i] = value_at(source, source_format, i);
        });
    });
}
