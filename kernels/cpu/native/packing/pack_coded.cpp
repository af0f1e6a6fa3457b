// Codes of a checkpoint into the panels of coded.h.
#include <atomic>
#include <vector>

#include "linears/coded.h"
#include "packing/pack.h"
#include "team/team.h"

namespace {

constexpr uint8_t NO_NUMBER = 0x7f;  // of PG_E4M3, with either sign

void put_scale(float value, int32_t format, uint8_t *at) {
    const uint16_t half = format == PG_BF16 ? to_bf16(value)
                                            : (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), 0), 0);
    if (format == PG_F32) memcpy(at, &value, 4);
    else memcpy(at, &half, 2);
}

// The codes of one group and column, a word at a time.
uint32_t word_of(int32_t format, const uint8_t *codes) {
    if (format == PG_W8) return codes[0] | codes[1] << 8 | codes[2] << 16 | (uint32_t)codes[3] << 24;
    if (format == PG_E4M3) return codes[0] | codes[2] << 8 | codes[1] << 16 | (uint32_t)codes[3] << 24;
    uint32_t word = 0;
    for (int i = 0; i < 8; i++) word |= (uint32_t)codes[i] << 4 * i;
    return word;
}

}  // namespace

extern "C" int64_t pg_coded_bytes(int64_t n, int64_t k, int32_t group, const PgCoding *coding) {
    return (n + NR - 1) / NR * coded_of(nullptr, k, group, *coding).panel_bytes();
}

extern "C" int64_t pg_pack_coded(const PgCodes *parts, int32_t num_parts, int32_t by_turns, int64_t k, int32_t group,
                                 const PgCoding *coding, void *packed) {
    int64_t n = 0;
    for (int32_t i = 0; i < num_parts; i++) n += parts[i].n;
    const Coded out = coded_of(packed, k, group, *coding);
    const int64_t groups = out.groups(), word = out.word();
    const uint8_t middle = out.format == PG_W8 ? 128 : 8;
    const std::vector<uint8_t> none(k, out.zeros || !(out.format == PG_W4 || out.format == PG_W8) ? 0 : middle);
    std::atomic<int64_t> no_numbers{0};
    parallel([&](Member &member) {
        int64_t found = 0;
        member.for_each((n + NR - 1) / NR, 1, [&](int64_t panel, int64_t) {
            uint8_t *head = (uint8_t *)packed + panel * out.panel_bytes();
            for (int64_t j = 0; j < NR; j++) {
                int64_t row = panel * NR + j;
                const PgCodes *part = part_of(parts, num_parts, by_turns != 0, row);
                const uint8_t *codes = part ? part->codes + row * k : none.data();
                for (int64_t i = 0; out.format == PG_E4M3 && i < k; i++) found += (codes[i] & NO_NUMBER) == NO_NUMBER;
                for (int64_t g = 0; g < groups; g++) {
                    uint8_t *at = head + g * out.group_bytes();
                    put_scale(part ? part->scales[row * groups + g] : 0.0f, out.scales, at + j * out.scale_bytes());
                    if (out.zeros)
                        at[NR * out.scale_bytes() + j] = part && part->zeros ? part->zeros[row * groups + g] : 0;
                    at += out.head_bytes() + j * 4;
                    for (int64_t i = 0; i < out.features(g); i += word, codes += word, at += NR * 4) {
                        const uint32_t made = word_of(out.format, codes);
                        memcpy(at, &made, 4);
                    }
                }
            }
        });
        no_numbers += found;
    });
    return no_numbers;
}
