#include "attention/attention.h"

#include "attention/attention_rounded.h"

namespace {

constexpr int64_t TILE = KEY_TILE;
constexpr float LOWEST = -1e30f;

constexpr int64_t column_bytes(int format) { return format == PG_F32 || format == PG_BF16 ? 4 : 1; }

// What one thread needs to attend to one group.
struct alignas(64) Workspace {
    float queries[MAX_QUERY_ROWS * MAX_HEAD_DIM];  // [rows, D], scaled
    float scores[MAX_QUERY_ROWS * TILE];           // [rows, TILE], then probabilities
    float mixed[MAX_QUERY_ROWS * MAX_HEAD_DIM];    // [rows, D]
    F sums[MAX_QUERY_ROWS];                        // of the probabilities, by position modulo W
    float peaks[MAX_QUERY_ROWS];
    int64_t positions[MAX_QUERY_ROWS];
};

template <int FORMAT, int MR>
__attribute__((noinline)) void score(const Attention &a, const KeyTile &t, int64_t head, const float *x, float *out) {
    constexpr int NC = MR <= 4 && W == 16 ? 4 : 2;
    const KVShape &s = a.shape;
    constexpr int64_t SIZE = column_bytes(FORMAT);
    const auto column = [&](int64_t token) {
        return a.keys + t.blocks[s.block_of(token)] * s.block_bytes() + head * s.head_bytes() + s.offset_of(token) * SIZE;
    };
    const int64_t last = s.block_of(t.count - 1);  // block of this tile that is read last
    for (int64_t token = 0; token < t.count; token += NC * W) {
        const uint8_t *columns[NC];
        for (int c = 0; c < NC; c++) {  // vectors beyond the last block repeat it; they are not looked at
            const int64_t at = token + c * W;
            columns[c] = column(s.block_of(at) <= last ? at : last << s.shift);
        }
        F acc[MR][NC] = {};
        accumulate<FORMAT>(acc, x, s.head_dim, s.head_dim, s.block_size, [&](int c) { return columns[c]; }, [] {});
        for (int c = 0; c < NC; c++) {
            const int64_t at = token + c * W;
            if (at >= t.count) break;
            F scale = splat(1.0f);
            if (FORMAT == PG_I8)
                scale = load<F>(s.scales(a.keys + t.blocks[s.block_of(at)] * s.block_bytes(), head) + s.offset_of(at));
            for (int i = 0; i < MR; i++) store(out + i * TILE + at, FORMAT == PG_I8 ? acc[i][c] * scale : acc[i][c]);
        }
    }
}

// The products of a token that is the first of its pair; what an earlier sequence left in the second's place is not looked
// at, for zero times what is no number is none.
template <int FORMAT, int MR, int NC, class Column>
PG_INLINE void add_last(F (&acc)[MR][NC], const float *p, int64_t token, int64_t dims, Column &&column) {
    for (int c = 0; c < NC; c++) {
        const F value = load_pair<FORMAT>(column(c), token, dims, 0).even;
        for (int i = 0; i < MR; i++) acc[i][c] = fma(splat(p[i * TILE]), value, acc[i][c]);
    }
}

template <int FORMAT, int MR>
__attribute__((noinline)) void mix(const Attention &a, const KeyTile &t, int64_t head, const float *p, float *mixed) {
    const KVShape &s = a.shape;
    const auto columns = [&](auto width, int64_t d) {
        constexpr int NC = decltype(width)::value;
        F acc[MR][NC];
        for (int i = 0; i < MR; i++)
            for (int c = 0; c < NC; c++) acc[i][c] = load<F>(mixed + i * s.head_dim + d + c * W);
        for (int64_t token = 0; token < t.count; token += s.block_size) {
            const uint8_t *base = a.values + t.blocks[s.block_of(token)] * s.block_bytes() + head * s.head_bytes() +
                                  d * column_bytes(FORMAT);
            const int64_t count = t.count - token < s.block_size ? t.count - token : s.block_size;
            const auto column = [&](int c) { return base + c * W * column_bytes(FORMAT); };
            accumulate<FORMAT>(acc, p + token, TILE, count / 2 * 2, s.head_dim, column, [] {});
            if (count % 2) add_last<FORMAT>(acc, p + token + count - 1, count - 1, s.head_dim, column);
        }
        for (int i = 0; i < MR; i++)
            for (int c = 0; c < NC; c++) store(mixed + i * s.head_dim + d + c * W, acc[i][c]);
    };
    constexpr int WIDE = MR <= 4 && W == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + WIDE * W <= a.value_dim; d += WIDE * W) columns(std::integral_constant<int, WIDE>(), d);
    for (; d < a.value_dim; d += W) columns(std::integral_constant<int, 1>(), d);
}

// Latents lie in rows: a score is a sum over vectors of features, whose lanes are added last.
constexpr int AT_ONCE = W == 16 ? 4 : 2;  // tokens, and rows

template <int FORMAT>
PG_INLINE void load_rows(const uint8_t *base, int64_t token, int64_t d, int64_t dims, F (&rows)[AT_ONCE]) {
    if constexpr (FORMAT == PG_BF16) {
        for (int j = 0; j < AT_ONCE; j += 2) {
            const U both = load<U>((const uint32_t *)base + (token + j) / 2 * dims + d);
            rows[j] = (F)(both << 16), rows[j + 1] = (F)(both & 0xffff0000u);
        }
    } else if constexpr (FORMAT == PG_F32) {
        for (int j = 0; j < AT_ONCE; j++) rows[j] = load<F>((const float *)base + (token + j) * dims + d);
    } else if constexpr (is_f8(FORMAT)) {
        for (int j = 0; j < AT_ONCE; j++) rows[j] = from_f8<FORMAT>(base + (token + j) * dims + d);
    } else {
        for (int j = 0; j < AT_ONCE; j++)
            rows[j] = __builtin_convertvector(load<I8>((const int8_t *)base + (token + j) * dims + d), F);
    }
}

template <int FORMAT, int MR>
__attribute__((noinline)) void score_latents(const Attention &a, const KeyTile &t, const float *x, float *out) {
    const KVShape &s = a.shape;
    const int64_t dims = s.head_dim;
    for (int64_t token = 0; token < t.count; token += AT_ONCE) {  // of one block: its size is a multiple
        const uint8_t *block = a.values + t.blocks[s.block_of(token)] * s.block_bytes();
        const int64_t offset = s.offset_of(token);
        F acc[MR][AT_ONCE] = {};
        for (int64_t d = 0; d < dims; d += W) {
            F rows[AT_ONCE];
            load_rows<FORMAT>(block, offset, d, dims, rows);
#pragma GCC unroll 4
            for (int i = 0; i < MR; i++) {
                const F q = load<F>(x + i * dims + d);
#pragma GCC unroll 4
                for (int j = 0; j < AT_ONCE; j++) acc[i][j] = fma(q, rows[j], acc[i][j]);
            }
        }
        for (int j = 0; j < AT_ONCE; j++) {
            const float scale = FORMAT == PG_I8 ? s.scales(block, 0)[offset + j] : 1.0f;
            for (int i = 0; i < MR; i++) out[i * TILE + token + j] = reduce_add(acc[i][j]) * scale;
        }
    }
}

template <int FORMAT, int MR = AT_ONCE>
void score_some(int count, const Attention &a, const KeyTile &t, const float *x, float *out) {
    for (; count >= MR; count -= MR) {
        score_latents<FORMAT, MR>(a, t, x, out);
        x += MR * a.shape.head_dim, out += MR * TILE;
    }
    if constexpr (MR > 1) score_some<FORMAT, MR - 1>(count, a, t, x, out);
}

template <int FORMAT, int MR = MAX_ROWS>
void rows_of(int count, bool scoring, const Attention &a, const KeyTile &t, int64_t head, int64_t row, Workspace &w) {
    if (count == MR) {
        if (scoring)
            score<FORMAT, MR>(a, t, head, w.queries + row * a.shape.head_dim, w.scores + row * TILE);
        else
            mix<FORMAT, MR>(a, t, head, w.scores + row * TILE, w.mixed + row * a.shape.head_dim);
        return;
    }
    if constexpr (MR > 1) rows_of<FORMAT, MR - 1>(count, scoring, a, t, head, row, w);
}

void cap(const Attention &a, const KeyTile &t, float *scores) {
    for (int64_t i = 0; i < t.count; i += W) store(scores + i, softcap(load<F>(scores + i), a.softcap));
}

// The largest score that a row sees in a tile; hidden ones are overwritten with LOWEST.
float hide(const Attention &a, const KeyTile &t, int64_t position, float *scores) {
    const int32_t last = (int32_t)(position - t.begin);
    const int32_t first = a.window ? last - (int32_t)a.window + 1 : 0;
    const int64_t vectors = (t.count + W - 1) / W;
    const bool all = first <= 0 && last >= vectors * W - 1;
    F largest = splat(LOWEST);
    for (int64_t v = 0; v < vectors; v++) {
        F score = load<F>(scores + v * W);
        if (!all) {
            const I at = lanes() + (int32_t)(v * W);
            score = select((at <= last) & (at >= first), score, splat(LOWEST));
            store(scores + v * W, score);
        }
        largest = max(largest, score);
    }
    return reduce_max(largest);
}

// Scores of a row into probabilities below its running peak; what is hidden becomes exactly zero.
void soften(const Attention &a, const KeyTile &t, int64_t head, float peak, int64_t row, Workspace &w) {
    const KVShape &s = a.shape;
    if (peak > w.peaks[row]) {
        const F factor = exp(splat(w.peaks[row] - peak));
        w.sums[row] = w.sums[row] * factor;
        float *mixed = w.mixed + row * s.head_dim;
        for (int64_t d = 0; d < s.head_dim; d += W) store(mixed + d, load<F>(mixed + d) * factor);
        w.peaks[row] = peak;
    }
    float *scores = w.scores + row * TILE;
    const float top = w.peaks[row];
    F sum = w.sums[row];
    for (int64_t v = 0; v < (t.count + W - 1) / W; v++) {
        F p = exp(load<F>(scores + v * W) - top);
        sum = sum + p;
        if (s.format == PG_I8) {
            const uint8_t *block = a.values + t.blocks[s.block_of(v * W)] * s.block_bytes();
            p = select(p > 0.0f, p * load<F>(s.scales(block, head) + s.offset_of(v * W)), F{});  // of what is there
        }
        store(scores + v * W, p);
    }
    w.sums[row] = sum;
}

template <int FORMAT>
void attend_as(const Attention &a, const QueryGroup &g, int64_t head, Workspace &w) {
    const int64_t share = a.share, rows = g.count * share, dims = a.shape.head_dim, kv_head = a.latent ? 0 : head;
    const float scale = a.scale * a.shape.unit(a.shape.key_scales, kv_head);
    const float unit = a.shape.unit(a.shape.value_scales, kv_head);
    for (int64_t i = 0; i < rows; i++) {
        const float *q = a.query + (g.row + i / share) * a.query_stride + (head * share + i % share) * dims;
        for (int64_t d = 0; d < dims; d += W) store(w.queries + i * dims + d, load<F>(q + d) * scale);
        for (int64_t d = 0; d < dims; d += W) store(w.mixed + i * dims + d, F{});
        w.sums[i] = F{};
        w.peaks[i] = LOWEST;
        w.positions[i] = g.position + i / share;
    }
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    int64_t starts[MAX_QUERY_ROWS / MAX_ROWS + 2];
    for (int64_t i = 0; i <= tiles; i++) starts[i] = rows * i / tiles;
    const int64_t end = g.position + g.count, seen = first_seen(a, g);
    const bool scattered = tiles == 1;  // more rows than that work long enough on a tile for the next to come by itself
    if (scattered) fetch_tile(a, key_tile(a, g, seen), kv_head);
    for (int64_t begin = seen; begin < end; begin += TILE) {
        KeyTile t = key_tile(a, g, begin);
        if (scattered && begin + TILE < end) fetch_tile(a, key_tile(a, g, begin + TILE), kv_head);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t row = starts[i], count = starts[i + 1] - row;
            const int64_t visible = w.positions[row + count - 1] + 1 - begin;
            if (visible <= 0) continue;
            t.count = visible < TILE ? visible : TILE;
            float peaks[MAX_ROWS];
            Clock::enter(PG_SCORES);
            if (a.latent)
                score_some<FORMAT>((int)count, a, t, w.queries + row * dims, w.scores + row * TILE);
            else
                rows_of<FORMAT>((int)count, true, a, t, kv_head, row, w);
            Clock::enter(PG_SOFTENING);
            for (int64_t j = 0; a.softcap && j < count; j++) cap(a, t, w.scores + (row + j) * TILE);
            for (int64_t j = 0; j < count; j++)
                peaks[j] = hide(a, t, w.positions[row + j], w.scores + (row + j) * TILE);
            for (int64_t j = 0; j < count; j++) soften(a, t, kv_head, peaks[j], row + j, w);
            Clock::enter(PG_MIXING);
            rows_of<FORMAT>((int)count, false, a, t, kv_head, row, w);
            Clock::enter(PG_ATTENDING);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        const float *sink = a.sinks ? a.sinks + head * share + i % share : nullptr;
        const F factor = splat(normaliser(reduce_add(w.sums[i]), w.peaks[i], sink) * unit);
        float *out = a.out + (g.row + i / share) * a.out_stride + (head * share + i % share) * a.value_dim;
        for (int64_t d = 0; d < a.value_dim; d += W) store(out + d, load<F>(w.mixed + i * dims + d) * factor);
    }
}

}  // namespace

void fetch_tile(const Attention &a, const KeyTile &t, int64_t head) {
    const KVShape &s = a.shape;
    for (int64_t token = 0; token < t.count; token += s.block_size) {
        const int64_t at = t.blocks[s.block_of(token)] * s.block_bytes() + head * s.head_bytes();
        for (int64_t i = 0; i < s.head_bytes(); i += 64) {
            _mm_prefetch((const char *)a.keys + at + i, _MM_HINT_T1);
            _mm_prefetch((const char *)a.values + at + i, _MM_HINT_T1);
        }
    }
}

float normaliser(float sum, float peak, const float *sink) {
    if (!sink) return 1.0f / sum;
    if (*sink <= peak) return 1.0f / (sum + exp(splat(*sink - peak))[0]);
    const float factor = exp(splat(peak - *sink))[0];
    return factor / (sum * factor + 1.0f);
}

void attend(const Attention &a, const AttentionItem &item, const AttentionItem *next) {
    const QueryGroup &group = item.group;
    const int64_t head = item.head;
    static thread_local Workspace workspace;
    if (a.rounds) return attend_rounded(a, item, next);
    if (a.shape.format == PG_BF16) return attend_as<PG_BF16>(a, group, head, workspace);
    if (a.shape.format == PG_F32) return attend_as<PG_F32>(a, group, head, workspace);
    if (a.shape.format == PG_E4M3) return attend_as<PG_E4M3>(a, group, head, workspace);
    if (a.shape.format == PG_E5M2) return attend_as<PG_E5M2>(a, group, head, workspace);
    attend_as<PG_I8>(a, group, head, workspace);
}
