// Attention by the processor's tiles: queries and probabilities rounded to bfloat16, sums in float32.
//
// Keys are looked at in the tiles of kv.h's positions, whatever the group of queries is; what a row does not see has
// exactly no part in its sums.  So a row's bits are a matter of its own query, keys and values alone.
#include "attention_tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

namespace {

constexpr int64_t TILE = 256, CHUNK = 32;  // keys looked at together, and by one product of tiles
constexpr float LOWEST = -1e30f, HIDDEN = -2e30f;

struct alignas(64) Workspace {
    uint16_t queries[MAX_QUERY_ROWS * MAX_HEAD_DIM];       // each TILE_ROWS of them as RowLayout has them
    float scores[TILE_ROWS * TILE];                        // [rows, TILE]
    uint16_t probabilities[TILE_ROWS * TILE];              // [TILE / CHUNK][rows][CHUNK]
    uint16_t values[TILE * MAX_HEAD_DIM];                  // [TILE / 2][D][2], zeros behind the last token
    float mixed[MAX_QUERY_ROWS * MAX_HEAD_DIM];            // [rows, D]
    F sums[MAX_QUERY_ROWS];                                // of the probabilities, by position modulo W
    float peaks[MAX_QUERY_ROWS];                           // of the scores so far
    int64_t positions[MAX_QUERY_ROWS];
};

// One tile: the first of its keys' positions, and how many of them any query sees.
struct KeyTile {
    const int64_t *blocks;
    int64_t begin, count;
};

// Results too small for a normal number are zeros, as they are to tiles; anything else would be slow.
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

// A tile's values one behind the other, for products of CHUNK tokens.
void gather_values(const Attention &a, const KeyTile &t, int64_t head, Workspace &w) {
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

void score(const Attention &a, const KeyTile &t, int64_t head, const uint16_t *queries, int64_t count, Workspace &w) {
    const KVShape &s = a.shape;
    const uint8_t *columns[TILE / 16];
    int64_t num = 0;
    for (int64_t token = 0; token < t.count; token += 16)
        columns[num++] = head_of(a, a.keys, t, head, token) + s.offset_of(token) * 4;
    score_tiles(queries, count, s.head_dim / 32, columns, num, s.block_size * 4, w.scores, TILE);
}

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

// A row's scores into probabilities below its peak, of which `index` is its place; what is hidden becomes exactly zero.
PG_INLINE void soften(const float *scores, int64_t vectors, float peak, float scale, int64_t index, int64_t count,
                      F &sums, uint16_t *probabilities) {
    const F factor = splat(scale), below = splat(-peak * scale);
    F found[2] = {};
    uint16_t *to = probabilities + index * CHUNK;
    for (int64_t v = 0; v < vectors; v += 2, to += count * CHUNK) {
        const F low = short_exp2(fma(load<F>(scores + v * W), factor, below));
        const F high = short_exp2(fma(load<F>(scores + v * W + W), factor, below));
        found[0] = found[0] + low;
        found[1] = found[1] + high;
        store_bf16(to, low, high);
    }
    sums = sums + (found[0] + found[1]);
}

// Softmax of the rows [row, row + count) over one tile, as far as that can be said before the last tile.
void soften_rows(const Attention &a, const KeyTile &t, int64_t row, int64_t count, float scale, Workspace &w) {
    const int64_t dims = a.shape.head_dim, vectors = (t.count + CHUNK - 1) / CHUNK * 2;
    float peaks[TILE_ROWS];
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
        soften(w.scores + j * TILE, vectors, peak, scale, j, count, w.sums[row + j], w.probabilities);
    }
}

}  // namespace

void attend_by_tiles(const Attention &a, const QueryGroup &g, int64_t head) {
    static thread_local Workspace w;
    const NoDenormals flushed;
    const int64_t share = a.share, rows = g.count * share, dims = a.shape.head_dim;
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const float scale = a.softcap ? LOG2_E : a.scale * LOG2_E;  // from scores to powers of two
    int64_t starts[MAX_QUERY_ROWS / TILE_ROWS + 2];
    for (int64_t i = 0; i <= tiles; i++) starts[i] = rows * i / tiles;
    for (int64_t i = 0; i < tiles; i++)
        for (int64_t row = starts[i], count = starts[i + 1] - row; row < starts[i + 1]; row++) {
            const float *q = a.query + (g.row + row / share) * a.query_stride + (head * share + row % share) * dims;
            to_bf16_row(q, dims, w.queries + starts[i] * dims + (row - starts[i]) * 32, 64 * count);
            w.sums[row] = F{};
            w.peaks[row] = LOWEST;
            w.positions[row] = g.position + row / share;
        }
    memset(w.mixed, 0, rows * dims * 4);
    const int64_t end = g.position + g.count;
    const int64_t seen = a.window && g.position >= a.window ? g.position - a.window + 1 : 0;
    const auto tile_at = [&](int64_t begin) {
        return KeyTile{g.table + a.table + a.shape.block_of(begin), begin, end - begin < TILE ? end - begin : TILE};
    };
    for (int64_t begin = seen / TILE * TILE; begin < end; begin += TILE) {
        KeyTile t = tile_at(begin);
        Clock::enter(PG_MIXING);
        gather_values(a, t, head, w);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t row = starts[i], count = starts[i + 1] - row;
            const int64_t visible = w.positions[row + count - 1] + 1 - begin;
            if (visible <= 0) continue;
            t.count = visible < TILE ? visible : TILE;
            Clock::enter(PG_SCORES);
            score(a, t, head, w.queries + row * dims, count, w);
            Clock::enter(PG_SOFTENING);
            soften_rows(a, t, row, count, scale, w);
            Clock::enter(PG_MIXING);
            mix_tiles(w.probabilities, count, w.values, (t.count + CHUNK - 1) / CHUNK, dims, w.mixed + row * dims);
        }
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

#else

void attend_by_tiles(const Attention &, const QueryGroup &, int64_t) {}

#endif
