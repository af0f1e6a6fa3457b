// Weights from rows into panels, once at load.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "layers/ops.h"
#include "packing/pack.h"
#include "packing/transpose.h"

namespace {

// Vectors of 32 bits, which are a float or two of bfloat16.  `sum` takes a block of them with the source's words, the
// first at `word` of a piece.
struct Floats {
    static constexpr int64_t FEATURES = 1;
    static U read(const float *p) { return load<U>(p); }
    static U read(const uint16_t *p) { return (U)from_bf16(p); }
    static PG_INLINE void sum(PieceSums &sums, const U *block, int64_t word, const float *) { sums.take_pairs(block, word); }
    static PG_INLINE void sum(PieceSums &sums, const U *block, int64_t word, const uint16_t *) {
        sums.take_uppers(block, word);
    }
};
struct Pairs {
    static constexpr int64_t FEATURES = 2;
    static U read(const float *p) {
        const U16 halves[2] = {to_bf16(load<F>(p)), to_bf16(load<F>(p + W))};
        return load<U>(halves);
    }
    static U read(const uint16_t *p) { return load<U>(p); }
    static PG_INLINE void sum(PieceSums &sums, const U *block, int64_t word, const uint16_t *) {
        sums.take_pairs(block, word);
    }
};

// A panel of vectors from the source's values of type T; `sums` of each part.
template <class To, class T>
void pack_vectors(const Source &s, int64_t panel, RowSums *sums, uint32_t *out) {
    constexpr int64_t MANY = W * To::FEATURES;  // features of a vector
    constexpr int64_t PIECE = RowSums::PIECE / sizeof(T);
    constexpr bool IN_LANES = !std::is_same_v<To, Pairs> || !std::is_same_v<T, float>;  // the source's words, unrounded
    const int64_t bytes = s.row_bytes();
    for (int64_t half = 0; half < NR; half += W) {
        Row rows[W];
        bool summed = false;
        for (int r = 0; r < W; r++) {
            rows[r] = s.row(panel * NR + half + r);
            summed |= rows[r].summed;
        }
        if (!IN_LANES) sum_rows(rows, W, bytes, sums);
        PieceSums piece;
        for (int64_t i = 0; i < s.k; i += MANY) {
            const int64_t left = std::min(s.k - i, MANY);
            U block[W];
            for (int r = 0; r < W; r++) {
                const T *values = (const T *)rows[r].values + i;
                T rest[MANY] = {};
                if (rows[r].values && left < MANY) values = (const T *)memcpy(rest, values, left * sizeof(T));
                block[r] = rows[r].values ? To::read(values) : U{};
            }
            transpose(block);
            for (int64_t c = 0; c < left / To::FEATURES; c++) store(out + (i / To::FEATURES + c) * NR + half, block[c]);
            if constexpr (IN_LANES) {
                if (!summed) continue;
                To::sum(piece, block, i % PIECE * sizeof(T) / 2, (const T *)nullptr);
                if ((i + MANY) % PIECE && i + MANY < s.k) continue;
                const I found = piece.sums();
                for (int r = 0; r < W; r++)
                    if (rows[r].summed)
                        sums[rows[r].part].add(RowSums::number(rows[r].index, bytes, i * sizeof(T)), found[r]);
                piece = {};
            }
        }
    }
}

template <class To>
void pack_vectors(const Source &s, int64_t panel, RowSums *sums, void *packed) {
    uint32_t *out = (uint32_t *)packed + panel * NR * s.k / To::FEATURES;
    if (s.format == PG_F32) pack_vectors<To, float>(s, panel, sums, out);
    else pack_vectors<To, uint16_t>(s, panel, sums, out);
}

void pack_i8(const Source &s, int64_t panel, int64_t columns, RowSums *part_sums, int8_t *out) {
    float *scales = (float *)(out + columns * s.k);
    int32_t *sums = (int32_t *)(scales + columns);
    Row rows[NR];
    for (int64_t j = 0; j < NR; j++) rows[j] = s.row(panel * NR + j);
    for (int64_t j = 0; j < NR; j++) {
        const int64_t column = panel * NR + j;
        const void *row = rows[j].values;
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
    sum_rows(rows, NR, s.row_bytes(), part_sums);  // last: the loops above fetch the rows while they compute
}

void pack(const Source &s, int32_t format, int32_t group, void *packed) {
    const Nibbles nibbles = nibbles_of(packed, s.k, format, group);
    const int64_t panels = (s.n + NR - 1) / NR;
    parallel([&](Member &member) {
        std::vector<RowSums> sums(s.num_parts);
        // As many panels as AT_ONCE says; fewer where there are not many pieces for each member.
        const int64_t panel_bytes = std::max<int64_t>(NR * s.row_bytes(), 1);
        const int64_t many = std::min(AT_ONCE / panel_bytes, panels / (4 * member.count));
        member.for_each(panels, std::max<int64_t>(many, 1), [&](int64_t panel, int64_t end) {
            for (; panel < end; panel++) {
                if (format == PG_F32) pack_vectors<Floats>(s, panel, sums.data(), packed);
                if (format == PG_BF16) pack_vectors<Pairs>(s, panel, sums.data(), packed);
                if (format == PG_I4) pack_nibbles(s, panel, nibbles, sums.data());
                if (format == PG_I8) pack_i8(s, panel, panels * NR, sums.data(), (int8_t *)packed);
            }
        });
        for (int32_t part = 0; part < s.num_parts; part++)
            if (s.parts[part].sums) sums[part].add_to(s.parts[part].sums);
    });
}

}  // namespace

extern "C" int64_t pg_packed_bytes(int64_t n, int64_t k, int32_t format, int32_t group) {
    const int64_t columns = (n + NR - 1) / NR * NR;
    if (is_nibbles(format)) return columns / NR * nibbles_of(nullptr, k, format, group).panel_bytes();
    return format == PG_F32 ? columns * k * 4 : format == PG_BF16 ? columns * k * 2 : columns * (k + 8);
}

extern "C" void pg_pack_linear(const PgRows *parts, int32_t num_parts, int32_t by_turns, int32_t source_format, int64_t k,
                               int32_t format, int32_t group, void *packed) {
    int64_t n = 0;
    for (int32_t part = 0; part < num_parts; part++) n += parts[part].n;
    pack({parts, num_parts, source_format, by_turns != 0, n, k}, format, group, packed);
}

extern "C" void pg_copy(const void *source, int32_t source_format, int64_t n, int64_t k, int32_t format, void *target,
                        uint64_t *sums) {
    const int64_t bytes = k * (source_format == PG_F32 ? 4 : 2), out_bytes = k * (format == PG_F32 ? 4 : 2);
    parallel([&](Member &member) {
        RowSums found;
        member.for_each(n, std::max<int64_t>(AT_ONCE / std::max<int64_t>(bytes, 1), 1), [&](int64_t begin, int64_t end) {
            const auto copy = [&](int64_t row, int64_t first, int64_t last) {
                const uint8_t *from = (const uint8_t *)source + row * bytes;
                uint8_t *to = (uint8_t *)target + row * out_bytes;
                if (format == source_format) memcpy(to + first, from + first, last - first);
                else for (int64_t i = first / 2; i < last / 2; i++) ((float *)to)[i] = value_at(from, source_format, i);
            };
            if (sums) found.add_rows(begin, end, (const uint8_t *)source, bytes, copy);
            else for (int64_t row = begin; row < end; row++) copy(row, 0, bytes);
        });
        if (sums) found.add_to(sums);
    });
}
