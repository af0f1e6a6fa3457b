// Attention in products of bfloat16, by tiles or by vectors.
//
// Keys are looked at in the tiles of attention.h's positions, whatever the group of queries is; what a row does not see
// has exactly no part in its sums.  So a row's bits are a matter of its own query, keys and values alone.
#include "attention/attention_rounded.h"

namespace {

constexpr int64_t TILE = KEY_TILE, CHUNK = 2 * W;  // keys looked at together; probabilities that are stored together
constexpr int64_t MOST_ROWS = TILE_ROWS > MAX_ROWS ? TILE_ROWS : MAX_ROWS;  // of one product
constexpr float LOWEST = -1e30f, HIDDEN = -2e30f;

struct alignas(64) Workspace {
    uint16_t queries[MAX_QUERY_ROWS * MAX_HEAD_DIM];  // as the way of multiplying has them
    float scores[MOST_ROWS * TILE];                   // [rows, TILE]
    uint16_t probabilities[MOST_ROWS * TILE];         // as the way of multiplying has them
    uint16_t values[TILE * MAX_HEAD_DIM];             // of tiles: [TILE / 2][D][2], zeros behind the last token
    float mixed[MAX_QUERY_ROWS * MAX_HEAD_DIM];       // [rows, D]
    F sums[MAX_QUERY_ROWS];                           // of the probabilities, by position modulo W
    float peaks[MAX_QUERY_ROWS];                      // of the scores so far
    int64_t positions[MAX_QUERY_ROWS];
};

// Results too small for a normal number are zeros, as they are to products of bfloat16; anything else would be slow.
class NoDenormals {
  public:
    NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_TO_ZERO); }
    ~NoDenormals() { _mm_setcsr(before_); }

  private:
    static constexpr unsigned FLUSH_TO_ZERO = 0x8000;
    const unsigned before_;
};

const uint8_t *head_of(const Attention &a, const uint8_t *pool, const KeyTile &t, int64_t head, int64_t token) {
    const KVShape &s = a.shape;
    return pool + t.blocks[s.block_of(token)] * s.block_bytes() + head * s.head_bytes();
}

// Lines of the keys and values that are read next, asked for a few at a time beside products: blocks lie scattered, and
// nothing else foresees them.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const Attention &a, const KeyTile &t, int64_t head)
        : a_(&a), t_(t), head_(head), num_(2 * (a.shape.block_of(t.count - 1) + 1)) {}

    PG_INLINE void next(int lines) {
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++, at_ += 64, left_ -= 64) {
            if (left_ <= 0 && !turn()) return;
            _mm_prefetch(at_, _MM_HINT_T1);
        }
    }
    void rest() {
        while (left_ > 0 || turned_ < num_) next(4);
    }

  private:
    // To the next stretch: a block's keys, then its values.
    __attribute__((noinline)) bool turn() {
        if (turned_ >= num_) return false;
        const uint8_t *pool = turned_ % 2 ? a_->values : a_->keys;
        at_ = (const char *)head_of(*a_, pool, t_, head_, turned_ / 2 << a_->shape.shift);
        left_ = a_->shape.head_bytes();
        turned_++;
        return true;
    }

    const Attention *a_ = nullptr;
    KeyTile t_{};
    int64_t head_ = 0, num_ = 0, turned_ = 0;  // stretches
    int64_t left_ = 0;                         // bytes of this one
    const char *at_ = nullptr;
};

// What this thread has asked for last.
struct Asked {
    const uint8_t *keys = nullptr;  // of which layer
    const AttentionItem *item = nullptr;

    bool is(const Attention &a, const AttentionItem &one) const { return keys == a.keys && item == &one; }
};

// Products by tiles: queries and probabilities in groups of rows, as RowLayout has them.
struct ByTiles {
    static constexpr int64_t ROWS = TILE_ROWS;
    static constexpr bool FETCHES = false;

    static int64_t query_at(int64_t row, int64_t) { return row * 32; }
    static int64_t query_gap(int64_t count) { return 64 * count; }
    static int64_t probability_at(int64_t row) { return row * CHUNK; }
    static int64_t probability_gap(int64_t count) { return count * CHUNK; }

    // A tile's values one behind the other, for products of CHUNK tokens.
    static void gather_values(const Attention &a, const KeyTile &t, int64_t head, Workspace &w) {
        const KVShape &s = a.shape;
        const int64_t row = 2 * s.head_dim, wanted = (t.count + CHUNK - 1) / CHUNK * CHUNK;
        uint8_t *to = (uint8_t *)w.values;
        int64_t token = 0;
        for (; token < t.count; token += 16) {
            const uint8_t *from = head_of(a, a.values, t, head, token) + s.offset_of(token) * row;
            memcpy(to + token * row, from, 16 * row);
        }
        if (token < wanted) memset(to + token * row, 0, (wanted - token) * row);
        const int64_t rest = t.count % 16;  // tokens of the last sixteen that are there; whatever lies behind them is not
        if (!rest) return;
        uint16_t *pair = w.values + (token - 16 + rest / 2 * 2) * s.head_dim;
        for (int64_t d = 0; rest % 2 && d < s.head_dim; d++) pair[2 * d + 1] = 0;
        const int64_t whole = token - 16 + (rest + 1) / 2 * 2;
        memset(to + whole * row, 0, (token - whole) * row);
    }

    static void score(const Attention &a, const KeyTile &t, int64_t head, const uint16_t *queries, int64_t count,
                      float *scores, Ahead &) {
        const KVShape &s = a.shape;
        const uint8_t *columns[TILE / 16];
        int64_t num = 0;
        for (int64_t token = 0; token < t.count; token += 16)
            columns[num++] = head_of(a, a.keys, t, head, token) + s.offset_of(token) * 4;
        score_tiles(queries, count, s.head_dim / 32, columns, num, s.block_size * 4, scores, TILE);
    }

    static void mix(const Attention &a, const KeyTile &t, int64_t, int64_t count, Workspace &w, float *mixed, Ahead &) {
        mix_tiles(w.probabilities, count, w.values, (t.count + CHUNK - 1) / CHUNK, a.shape.head_dim, mixed);
    }
};

// Products by vectors, a row's queries and probabilities one behind the other; keys and values as they lie in the pool.
struct ByVectors {
    static constexpr int64_t ROWS = MAX_ROWS;
    static constexpr bool FETCHES = true;
    static constexpr int FEW = W == 16 ? 4 : 0;  // rows, which leave registers for columns of 64 keys or features

    static int64_t query_at(int64_t row, int64_t dims) { return row * dims; }
    static int64_t query_gap(int64_t) { return 64; }
    static int64_t probability_at(int64_t row) { return row * TILE; }
    static int64_t probability_gap(int64_t) { return CHUNK; }

    static void gather_values(const Attention &, const KeyTile &, int64_t, Workspace &) {}

    // With each step of few rows, as many lines as make a tile's in its steps.
    template <int MR>
    PG_INLINE static void beside(Ahead &ahead) {
        if constexpr (MR <= FEW) ahead.next(4);
    }

    // The products of a token that is the first of its pair; the second one is not there.
    template <int MR, int NC>
    PG_INLINE static void add_last(F (&acc)[MR][NC], const uint16_t *p, const uint8_t *const (&columns)[NC], int64_t at) {
        for (int i = 0; i < MR; i++)
            for (int c = 0; c < NC; c++) acc[i][c] = dot(acc[i][c], splat_u(p[i * TILE]), load<U>(columns[c] + at) & 0xffffu);
    }

    template <int MR>
    __attribute__((noinline)) static void score_rows(const Attention &a, const KeyTile &t, int64_t head,
                                                     const uint16_t *queries, float *scores, Ahead &ahead) {
        constexpr int NC = MR <= FEW ? 4 : 2;
        const KVShape &s = a.shape;
        const int64_t dims = s.head_dim, last = s.block_of(t.count - 1);  // block of this tile that is read last
        for (int64_t token = 0; token < t.count; token += NC * W) {
            const uint8_t *columns[NC];
            for (int c = 0; c < NC; c++) {  // vectors beyond the last block repeat it; they are not looked at
                const int64_t at = s.block_of(token + c * W) <= last ? token + c * W : last << s.shift;
                columns[c] = head_of(a, a.keys, t, head, at) + s.offset_of(at) * 4;
            }
            F acc[MR][NC] = {};
            accumulate_dots(acc, queries, dims * 2, dims / 2, columns, s.block_size * 4, [&] { beside<MR>(ahead); });
            for (int i = 0; i < MR; i++)
                for (int c = 0; c < NC; c++) store(scores + i * TILE + token + c * W, acc[i][c]);
        }
    }

    template <int MR>
    __attribute__((noinline)) static void mix_rows(const Attention &a, const KeyTile &t, int64_t head, const uint16_t *p,
                                                   float *mixed, Ahead &ahead) {
        const KVShape &s = a.shape;
        const int64_t dims = s.head_dim;
        const auto columns_at = [&](auto width, int64_t d) {
            constexpr int NC = decltype(width)::value;
            F acc[MR][NC];
            for (int i = 0; i < MR; i++)
                for (int c = 0; c < NC; c++) acc[i][c] = load<F>(mixed + i * dims + d + c * W);
            for (int64_t token = 0; token < t.count; token += s.block_size) {
                const uint8_t *base = head_of(a, a.values, t, head, token) + 4 * d, *columns[NC];
                const int64_t count = t.count - token < s.block_size ? t.count - token : s.block_size;
                for (int c = 0; c < NC; c++) columns[c] = base + c * W * 4;
                accumulate_dots(acc, p + token, TILE * 2, count / 2, columns, dims * 4, [&] { beside<MR>(ahead); });
                if (count % 2) add_last(acc, p + token + count - 1, columns, count / 2 * dims * 4);
            }
            for (int i = 0; i < MR; i++)
                for (int c = 0; c < NC; c++) store(mixed + i * dims + d + c * W, acc[i][c]);
        };
        constexpr int WIDE = MR <= FEW ? 4 : 2;
        int64_t d = 0;
        for (; d + WIDE * W <= dims; d += WIDE * W) columns_at(std::integral_constant<int, WIDE>(), d);
        for (; d < dims; d += W) columns_at(std::integral_constant<int, 1>(), d);
    }

    // with(rows) for the number of rows that there are.
    template <int MR = MAX_ROWS, class With>
    static void for_count(int64_t count, With &&with) {
        if (count == MR) return with(std::integral_constant<int, MR>());
        if constexpr (MR > 1) for_count<MR - 1>(count, with);
    }

    static void score(const Attention &a, const KeyTile &t, int64_t head, const uint16_t *queries, int64_t count,
                      float *scores, Ahead &ahead) {
        for_count(count, [&](auto rows) { score_rows<decltype(rows)::value>(a, t, head, queries, scores, ahead); });
    }

    static void mix(const Attention &a, const KeyTile &t, int64_t head, int64_t count, Workspace &w, float *mixed,
                    Ahead &ahead) {
        for_count(count, [&](auto rows) { mix_rows<decltype(rows)::value>(a, t, head, w.probabilities, mixed, ahead); });
    }
};

// The largest score that a row sees in a tile; those that it does not see are overwritten with HIDDEN.
PG_INLINE float hide(const Attention &a, const KeyTile &t, int64_t position, int64_t vectors, float *scores) {
    const int32_t last = (int32_t)(position - t.begin);
    const int32_t first = a.window ? last - (int32_t)a.window + 1 : 0;
    F largest[2] = {splat(HIDDEN), splat(HIDDEN)};
    if (first <= 0 && last >= vectors * W - 1) {
        for (int64_t v = 0; v < vectors; v += 2) {
            largest[0] = max(load<F>(scores + v * W), largest[0]);
            largest[1] = max(load<F>(scores + v * W + W), largest[1]);
        }
    } else {
        for (int64_t v = 0; v < vectors; v++) {
            const I at = lanes() + (int32_t)(v * W);
            const F seen = select((at <= last) & (at >= first), load<F>(scores + v * W), splat(HIDDEN));
            store(scores + v * W, seen);
            largest[0] = max(seen, largest[0]);
        }
    }
    return reduce_max(max(largest[0], largest[1]));
}

// A row's scores into probabilities below its peak, each CHUNK `gap` behind the last one; what is hidden becomes exactly
// zero.
PG_INLINE void soften(const float *scores, int64_t vectors, float peak, float scale, F &sums, uint16_t *to, int64_t gap) {
    const F factor = splat(scale), below = splat(-peak * scale);
    F found[2] = {};
    for (int64_t v = 0; v < vectors; v += 2, to += gap) {
        const F low = short_exp2(fma(load<F>(scores + v * W), factor, below));
        const F high = short_exp2(fma(load<F>(scores + v * W + W), factor, below));
        found[0] = found[0] + low;
        found[1] = found[1] + high;
        store_bf16(to, low, high);
    }
    sums = sums + (found[0] + found[1]);
}

// Softmax of the rows [row, row + count) over one tile, as far as that can be said before the last tile.
template <class Way>
void soften_rows(const Attention &a, const KeyTile &t, int64_t row, int64_t count, float scale, Workspace &w) {
    const int64_t dims = a.shape.head_dim, vectors = (t.count + CHUNK - 1) / CHUNK * 2;
    float peaks[MOST_ROWS];
    if (a.softcap)
        for (int64_t j = 0; j < count; j++)
            for (float *s = w.scores + j * TILE, *end = s + vectors * W; s < end; s += W)
                store(s, softcap(load<F>(s) * a.scale, a.softcap));
    for (int64_t j = 0; j < count; j++) peaks[j] = hide(a, t, w.positions[row + j], vectors, w.scores + j * TILE);
    for (int64_t j = 0; j < count; j++) {
        float &peak = w.peaks[row + j];
        if (peaks[j] > peak) {
            const F factor = short_exp2(splat((peak - peaks[j]) * scale));
            w.sums[row + j] = w.sums[row + j] * factor;
            float *mixed = w.mixed + (row + j) * dims;
            for (int64_t d = 0; d < dims; d += W) store(mixed + d, load<F>(mixed + d) * factor);
            peak = peaks[j];
        }
        soften(w.scores + j * TILE, vectors, peak, scale, w.sums[row + j], w.probabilities + Way::probability_at(j),
               Way::probability_gap(count));
    }
}

template <class Way>
void attend_by(const Attention &a, const AttentionItem &item, const AttentionItem *next) {
    static thread_local Workspace w;
    const NoDenormals flushed;
    const QueryGroup &g = item.group;
    const int64_t head = item.head;
    const int64_t share = a.share, rows = g.count * share, dims = a.shape.head_dim;
    const int64_t tiles = (rows + Way::ROWS - 1) / Way::ROWS;
    const float scale = a.softcap ? LOG2_E : a.scale * LOG2_E;  // from scores to powers of two
    int64_t starts[MAX_QUERY_ROWS / Way::ROWS + 2];
    for (int64_t i = 0; i <= tiles; i++) starts[i] = rows * i / tiles;
    for (int64_t i = 0; i < tiles; i++)
        for (int64_t row = starts[i], count = starts[i + 1] - row; row < starts[i + 1]; row++) {
            const float *q = a.query + (g.row + row / share) * a.query_stride + (head * share + row % share) * dims;
            uint16_t *to = w.queries + starts[i] * dims + Way::query_at(row - starts[i], dims);
            to_bf16_row(q, dims, to, Way::query_gap(count));
            w.sums[row] = F{};
            w.peaks[row] = LOWEST;
            w.positions[row] = g.position + row / share;
        }
    memset(w.mixed, 0, rows * dims * 4);
    const int64_t end = g.position + g.count, seen = first_seen(a, g);
    const bool scattered = Way::FETCHES && tiles == 1;  // more rows work long enough for the next keys to come by themselves
    static thread_local Asked asked;
    if (scattered && !asked.is(a, item)) fetch_tile(a, key_tile(a, g, seen), head);
    for (int64_t begin = seen; begin < end; begin += TILE) {
        KeyTile t = key_tile(a, g, begin);
        Ahead ahead;
        if (scattered && begin + TILE < end) ahead = {a, key_tile(a, g, begin + TILE), head};
        else if (scattered && next) {
            ahead = {a, key_tile(a, next->group, first_seen(a, next->group)), next->head};
            asked = {a.keys, next};
        }
        Clock::enter(PG_MIXING);
        Way::gather_values(a, t, head, w);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t row = starts[i], count = starts[i + 1] - row;
            const int64_t visible = w.positions[row + count - 1] + 1 - begin;
            if (visible <= 0) continue;
            t.count = visible < TILE ? visible : TILE;
            Clock::enter(PG_SCORES);
            Way::score(a, t, head, w.queries + row * dims, count, w.scores, ahead);
            Clock::enter(PG_SOFTENING);
            soften_rows<Way>(a, t, row, count, scale, w);
            Clock::enter(PG_MIXING);
            Way::mix(a, t, head, count, w, w.mixed + row * dims, ahead);
        }
        ahead.rest();
        Clock::enter(PG_ATTENDING);
    }
    release_tiles();
    for (int64_t i = 0; i < rows; i++) {
        const float *sink = a.sinks ? a.sinks + head * share + i % share : nullptr;
        const float peak = a.softcap ? w.peaks[i] : w.peaks[i] * a.scale;
        const F factor = splat(normaliser(reduce_add(w.sums[i]), peak, sink));
        const int64_t to = g.row + i / share, first = (head * share + i % share) * dims;
        const float *mixed = w.mixed + i * dims;
        for (int64_t d = 0; d < dims; d += 2 * W) {
            const F low = load<F>(mixed + d) * factor, high = load<F>(mixed + d + W) * factor;
            if (a.rounded) store_bf16(a.layout.pair(a.rounded, to, a.first + first + d), low, high);
            else store(a.out + to * a.out_stride + first + d, low), store(a.out + to * a.out_stride + first + d + W, high);
        }
    }
}

}  // namespace

void attend_rounded(const Attention &a, const AttentionItem &item, const AttentionItem *next) {
    if (HAS_TILES && tiles_allowed()) return attend_by<ByTiles>(a, item, next);
    attend_by<ByVectors>(a, item, next);
}
