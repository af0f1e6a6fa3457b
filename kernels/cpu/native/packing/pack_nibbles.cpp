// Weights of 4 bits into panels (nibbles.h), from codes that are there or quantised here.
#include <vector>

#include "packing/pack.h"
#include "team/team.h"

namespace {

uint16_t to_half(float v) { return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(v), 0), 0); }
float from_half(uint16_t v) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(v))); }

// One column of a panel: what of its row is in group g.
struct Column {
    const Nibbles &out;
    int64_t panel, column;  // in the panel

    uint8_t *group(int64_t g) const {
        return const_cast<uint8_t *>(out.packed) + panel * out.panel_bytes() + g * out.group_bytes();
    }

    void put(int64_t g, const uint8_t *codes, float scale, uint8_t zero) const {
        uint8_t *at = group(g);
        if (out.wide) {
            const uint16_t wide = zero;
            memcpy(at + column * 4, &scale, 4);
            memcpy(at + NR * 4 + column * 2, &wide, 2);
        } else {
            const uint16_t half = to_half(scale);
            memcpy(at + column * 2, &half, 2);
        }
        at += out.head_bytes() + column * 4;
        for (int64_t i = 0; i < out.features(g); i += 8, codes += 8, at += NR * 4)
            for (int b = 0; b < 4; b++) at[b] = (uint8_t)(codes[b] | codes[4 + b] << 4);
    }
};

// A group's scale, of its first value of largest size; and its codes.
float quantize_group(const float *values, int64_t n, uint8_t *codes) {
    float peak = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const float size = __builtin_fabsf(values[i]);
        if (size > peak) peak = size, largest = values[i];
    }
    float wanted = largest / -8.0f;
    wanted = wanted > 65504.0f ? 65504.0f : wanted < -65504.0f ? -65504.0f : wanted;
    const float scale = from_half(to_half(wanted)), inverse = scale == 0 ? 0.0f : 1.0f / scale;
    for (int64_t i = 0; i < n; i++) {
        float q = values[i] * inverse;
        q = q < -8.0f ? -8.0f : q > 7.0f ? 7.0f : q;
        codes[i] = (uint8_t)(int32_t)((q + MAGIC) - MAGIC + 8.0f);
    }
    return scale;
}

}  // namespace

void pack_nibbles(const Source &s, int64_t panel, const Nibbles &out, RowSums *sums) {
    std::vector<float> values(s.k);
    std::vector<uint8_t> codes(s.k, (uint8_t)ZERO);
    Row rows[NR];
    for (int64_t j = 0; j < NR; j++) {
        const Row row = rows[j] = s.row(panel * NR + j);
        const Column column{out, panel, j};
        for (int64_t i = 0; i < s.k; i++) values[i] = row.values ? value_at(row.values, s.format, i) : 0.0f;
        for (int64_t g = 0; g < out.groups(); g++) {
            uint8_t *own = codes.data() + g * out.group;
            const float scale = quantize_group(values.data() + g * out.group, out.features(g), own);
            column.put(g, own, scale, (uint8_t)ZERO);
        }
    }
    sum_rows(rows, NR, s.row_bytes(), sums);
}

namespace {

// Octets around 128 as signed ones, with the scales and column sums behind them (gemm.h).
void pack_octets(const PgCodes *parts, int32_t num_parts, bool by_turns, int64_t n, int64_t k, int8_t *packed) {
    const int64_t panels = (n + NR - 1) / NR;
    float *scales = (float *)(packed + panels * NR * k);
    int32_t *sums = (int32_t *)(scales + panels * NR);
    parallel([&](Member &member) {
        member.for_each(panels, 1, [&](int64_t panel, int64_t) {
            for (int64_t column = panel * NR; column < (panel + 1) * NR; column++) {
                int64_t row = column;
                const PgCodes *part = part_of(parts, num_parts, by_turns, row);
                int8_t *at = packed + panel * NR * k + column % NR * 4;
                int32_t sum = 0;
                for (int64_t i = 0; i < k; i++) {
                    const int8_t q = part ? (int8_t)(part->codes[row * k + i] ^ 128) : 0;
                    at[i / 4 * NR * 4 + i % 4] = q;
                    sum += q;
                }
                scales[column] = part ? part->scales[row] : 0.0f;
                sums[column] = 128 * sum;
            }
        });
    });
}

}  // namespace

extern "C" void pg_pack_codes(const PgCodes *parts, int32_t num_parts, int32_t by_turns, int64_t k, int32_t format,
                              int32_t group, void *packed) {
    int64_t n = 0;
    for (int32_t i = 0; i < num_parts; i++) n += parts[i].n;
    if (format == PG_I8) return pack_octets(parts, num_parts, by_turns != 0, n, k, (int8_t *)packed);
    const Nibbles out = nibbles_of(packed, k, format, group);
    const int64_t groups = out.groups();
    const std::vector<uint8_t> none(k, (uint8_t)ZERO);
    parallel([&](Member &member) {
        member.for_each((n + NR - 1) / NR, 1, [&](int64_t panel, int64_t) {
            for (int64_t j = 0; j < NR; j++) {
                int64_t row = panel * NR + j;
                const PgCodes *part = part_of(parts, num_parts, by_turns != 0, row);
                const uint8_t *codes = part ? part->codes + row * k : none.data();
                for (int64_t g = 0, at = row * groups; g < groups; g++, at++, codes += out.group) {
                    const uint8_t zero = part && part->zeros ? part->zeros[at] : 0;
                    Column{out, panel, j}.put(g, codes, part ? part->scales[at] : 0.0f, zero);
                }
            }
        });
    });
}
