// What adapters add, a few rows of one adapter at a time.
#include "steps/lora.h"

#include <algorithm>

namespace {

constexpr int MOST_PARTS = PG_LORA_PARTS, CHUNK = 32, BLOCK = 16;  // features; ranks
constexpr int64_t MOST_RANKS = 256;
// How far asking for adapters is ahead of the linears' work, in layers.  Less is late for gate's and up's, the largest,
// before which a layer has done a quarter of its work; with more it was slower (docs/measurements/adapters.md).
constexpr double LEAD = 0.55;

// A linear's rows: float32, or rounded to bfloat16 as the linear reads them.
struct LoraInput {
    const float *x;
    int64_t stride;
    const uint16_t *rounded;  // or NULL
    RowLayout layout;
};

// Of one group's rows, from the first chunk of features on.
template <int ROWS>
struct RoundedRows {
    const uint16_t *at[ROWS];
    int64_t gap[ROWS];  // from a chunk to the next

    RoundedRows(const LoraInput &given, const int64_t *rows) {
        for (int row = 0; row < ROWS; row++) {
            at[row] = given.layout.pair(const_cast<uint16_t *>(given.rounded), rows[row], 0);
            gap[row] = given.layout.gap(rows[row]) / 2;
        }
    }
};

// A place so many bytes ahead of what an item reads.  The item's end is followed by the next's beginning.
class Place {
  public:
    Place(int64_t distance, const void *begin, const void *stop, const void *behind)
        : distance_(distance), at_((const char *)begin + distance), end_((const char *)stop), next_((const char *)behind) {
        pass();
    }
    PG_INLINE const char *advance(int64_t bytes) {
        const char *at = at_;
        at_ += bytes;
        pass();
        return at;
    }

  private:
    PG_INLINE void pass() {
        if (at_ >= end_) at_ = next_, end_ = at_ + distance_;
    }

    int64_t distance_;
    const char *at_, *end_, *next_;
};

// What an item reads comes into the caches while what is before it is computed: into the second-level one early enough
// for memory, then into the nearest one.
struct Stream {
    Place near, far;

    Stream(const void *begin, const void *stop, const void *behind)
        : near(8 << 10, begin, stop, behind), far(64 << 10, begin, stop, behind) {}
    // Asks for what is to be fetched while so many bytes are computed.
    PG_INLINE void fetch(int64_t bytes) {
        const char *soon = near.advance(bytes), *later = far.advance(bytes);
        for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(soon + i, _MM_HINT_T0), _mm_prefetch(later + i, _MM_HINT_T1);
    }
};

PG_INLINE F columns_of(const float *p) { return load<F>(p); }
PG_INLINE F columns_of(const uint16_t *p) { return from_bf16(p); }

// ROWS rows times RANKS ranks of A; a sum's order is that of the lanes' features, whatever the two are.  The first ranks
// of a block fetch for all of them (`fetched`, of each 32 features), which the others then find in the cache.
template <int ROWS, int RANKS>
PG_INLINE void add_pairs(const U (&given)[ROWS], const uint16_t *down, F (&acc)[ROWS][RANKS]) {
#pragma GCC unroll 16
    for (int r = 0; r < RANKS; r++) {
        const U w = load<U>(down + r * CHUNK);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) acc[row][r] = dot(acc[row][r], given[row], w);
    }
}

template <int ROWS, int RANKS>
PG_INLINE void reduce_pairs(const uint16_t *down, int64_t ranks, const RoundedRows<ROWS> &x, int64_t k, F (&acc)[ROWS][RANKS],
                            int64_t fetched, Stream &ahead) {
    const int64_t whole = k / CHUNK;
    U given[ROWS];
    for (int64_t c = 0; c < whole; c++) {
        if (fetched) ahead.fetch(fetched);
        for (int64_t i = 0; i < CHUNK; i += 2 * W) {
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) given[row] = load<U>(x.at[row] + c * x.gap[row] + i);
            add_pairs<ROWS, RANKS>(given, down + c * ranks * CHUNK + i, acc);
        }
    }
    for (int64_t i = 0; i < k % CHUNK; i += 2 * W) {  // half a step, of 16 features
        for (int row = 0; row < ROWS; row++) {
            given[row] = U{};
            memcpy(&given[row], x.at[row] + whole * x.gap[row] + i, 32);
        }
        add_pairs<ROWS, RANKS>(given, down + whole * ranks * CHUNK + i, acc);
    }
}

template <int ROWS, int RANKS, class T>
PG_INLINE void reduce_floats(const T *down, int64_t ranks, const LoraInput &x, const int64_t *rows, int64_t k,
                             F (&acc)[ROWS][RANKS], int64_t fetched, Stream &ahead) {
    const float *at[ROWS];
    for (int row = 0; row < ROWS; row++) at[row] = x.x + rows[row] * x.stride;
    for (int64_t i = 0; i < k; i += W) {
        F given[ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) given[row] = load<F>(at[row] + i);
        if (fetched) ahead.fetch(fetched * W / CHUNK);
#pragma GCC unroll 16
        for (int r = 0; r < RANKS; r++) {
            const F w = columns_of(down + (i / CHUNK * ranks + r) * CHUNK + i % CHUNK);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) acc[row][r] = fma(given[row], w, acc[row][r]);
        }
    }
}

// What two ranks add to a vector of output features, one rank after the other; in products of bfloat16 first what
// rounding left of them, then the rounded ones.
PG_INLINE F add_ranks(F acc, const float *reduced, const float *up) {
    return fma(splat(reduced[1]), load<F>(up + W), fma(splat(reduced[0]), load<F>(up), acc));
}
PG_INLINE F add_ranks(F acc, const float *reduced, const uint16_t *up) {
    const U both = load<U>(up);
    return fma(splat(reduced[1]), (F)(both & 0xffff0000u), fma(splat(reduced[0]), (F)(both << 16), acc));
}
PG_INLINE F add_ranks(F acc, const uint32_t *reduced, const uint16_t *up) {
    const U both = load<U>(up);
    return dot(dot(acc, splat_u(reduced[1]), both), splat_u(reduced[0]), both);
}

// Of each pair of ranks the rounded ones in one word, and what that left of them, rounded too, in the next.  One
// bfloat16 alone would be 2^-9 off, which a float32 sum of ranks is not.
void split_ranks(int64_t rank, const float *reduced, uint32_t *halves) {
    for (int64_t r = 0; r < (rank + 1) / 2 * 2; r++) {
        uint16_t *own = (uint16_t *)(halves + r / 2 * 2) + r % 2;
        own[0] = to_bf16(reduced[r]);
        own[2] = to_bf16(reduced[r] - from_bf16(own[0]));
    }
}

// ROWS rows times VECTORS vectors of output features, in order of ranks.
template <int ROWS, int VECTORS, class R, class T>
PG_INLINE void expand_tile(const T *up, int64_t pairs, const R *reduced, float *const *out, int64_t column,
                           Stream &ahead) {
    F acc[ROWS][VECTORS] = {};
    for (int64_t pair = 0; pair < pairs; pair++) {
        ahead.fetch(VECTORS * 2 * W * sizeof(T));
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++)
                acc[row][v] = add_ranks(acc[row][v], reduced + row * MOST_RANKS + pair * 2, up + (v * pairs + pair) * 2 * W);
    }
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) store(out[row] + column + v * W, acc[row][v]);
}

template <int ROWS, class R, class T>
PG_INLINE void expand(const PgLoraPart &part, const T *up, const R *reduced, float *const *out, Stream &ahead) {
    constexpr int VECTORS = ROWS <= 2 ? 8 : 4;
    const int64_t vectors = part.n / W, pairs = (part.rank + 1) / 2;
    int64_t v = 0;
    for (; v + VECTORS <= vectors; v += VECTORS)
        expand_tile<ROWS, VECTORS>(up + v * pairs * 2 * W, pairs, reduced, out, v * W, ahead);
    for (; v < vectors; v++) expand_tile<ROWS, 1>(up + v * pairs * 2 * W, pairs, reduced, out, v * W, ahead);
}

// Calls tile(ranks at once as a constant, first rank, ranks of its block) until all are done.
template <int ROWS, class Tile>
PG_INLINE void for_each_tile(int64_t rank, Tile &&tile) {
    constexpr int AT_ONCE = ROWS == 1 ? 16 : ROWS == 2 ? 8 : 4;
    for (int64_t block = 0; block < rank; block += BLOCK) {
        const int64_t ranks = rank - block < BLOCK ? rank - block : BLOCK;
        int64_t r = 0;
        for (; r + AT_ONCE <= ranks; r += AT_ONCE) tile(std::integral_constant<int, AT_ONCE>(), block, r, ranks);
        for (; AT_ONCE > 4 && r + 4 <= ranks; r += 4) tile(std::integral_constant<int, 4>(), block, r, ranks);
        for (; r < ranks; r++) tile(std::integral_constant<int, 1>(), block, r, ranks);
    }
}

// Into `reduced` [ROWS, MOST_RANKS]: a row's product with A, a zero behind an odd rank.
template <int ROWS, class T>
PG_INLINE void reduce(const PgLoraPart &part, const LoraInput &given, const int64_t *rows, int64_t k, float *reduced,
                      Stream &ahead) {
    const T *down = (const T *)part.down;
    const int64_t features = (k + CHUNK - 1) / CHUNK * CHUNK;
    for_each_tile<ROWS>(part.rank, [&](auto at_once, int64_t block, int64_t r, int64_t ranks) {
        constexpr int RANKS = decltype(at_once)::value;
        F acc[ROWS][RANKS] = {};
        const T *own = down + block * features + r * CHUNK;
        const int64_t fetched = r ? 0 : ranks * CHUNK * sizeof(T);
        if constexpr (sizeof(T) == 2) {
            if (given.rounded) reduce_pairs<ROWS, RANKS>(own, ranks, RoundedRows<ROWS>(given, rows), k, acc, fetched, ahead);
            else reduce_floats<ROWS, RANKS>(own, ranks, given, rows, k, acc, fetched, ahead);
        } else {
            reduce_floats<ROWS, RANKS>(own, ranks, given, rows, k, acc, fetched, ahead);
        }
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < RANKS; i++)
                reduced[row * MOST_RANKS + block + r + i] = reduce_add(acc[row][i]) * part.scale;
    });
    for (int row = 0; row < ROWS && part.rank % 2; row++) reduced[row * MOST_RANKS + part.rank] = 0;
}

template <int ROWS, class T>
void add_part(const PgLoraPart &part, const LoraInput &given, const int64_t *rows, int64_t k, float *const *out,
              Stream ahead) {
    alignas(64) float reduced[ROWS * MOST_RANKS];
    reduce<ROWS, T>(part, given, rows, k, reduced, ahead);
    const T *up = (const T *)part.up;
    if constexpr (sizeof(T) == 2) {
        if (given.rounded) {
            alignas(64) uint32_t halves[ROWS * MOST_RANKS];
            for (int row = 0; row < ROWS; row++) split_ranks(part.rank, reduced + row * MOST_RANKS, halves + row * MOST_RANKS);
            return expand<ROWS>(part, up, halves, out, ahead);
        }
    }
    expand<ROWS>(part, up, reduced, out, ahead);
}

template <class T>
void add_rows(const PgLoraPart &part, const LoraInput &given, const int64_t *rows, int64_t count, int64_t k,
              float *const *out, const Stream &ahead) {
    if (count == 4) add_part<4, T>(part, given, rows, k, out, ahead);
    else if (count == 3) add_part<3, T>(part, given, rows, k, out, ahead);
    else if (count == 2) add_part<2, T>(part, given, rows, k, out, ahead);
    else add_part<1, T>(part, given, rows, k, out, ahead);
}

// Rounded rows as floats, one behind the other, which hold until the next call.
LoraInput widened(const LoraInput &given, const LoraGroup &group, int64_t k) {
    static thread_local std::vector<float> rows;
    rows.resize(LoraGroup::MOST_ROWS * k);
    for (int64_t row = 0; row < group.count; row++)
        for (int64_t i = 0; i < k; i += W)
            store(rows.data() + row * k + i,
                  from_bf16(given.layout.pair(const_cast<uint16_t *>(given.rounded), group.rows[row], i)));
    return {rows.data(), k, nullptr, {}};
}

int64_t bytes_of(const PgLora &lora, const PgLoraPart &part) {
    return (int64_t)part.n * ((part.rank + 1) / 2 * 2) * (lora.format == PG_BF16 ? 2 : 4);
}

// What a part adds to a group's rows of `added`: zeros where it adds nothing, of which others of its linear do.  `behind`:
// what will be read next.
void add_any(const PgLora &lora, int32_t index, const LoraInput &given, const LoraGroup &group, int64_t k, float *added,
             int64_t stride, const void *behind) {
    static constexpr int64_t IN_ORDER[LoraGroup::MOST_ROWS] = {0, 1, 2, 3};
    const PgLoraPart &part = lora.parts[index];
    for (int32_t before = 0; before < index; before++) added += lora.parts[before].n;
    float *out[LoraGroup::MOST_ROWS];
    for (int64_t row = 0; row < group.count; row++) {
        out[row] = added + group.rows[row] * stride;
        if (!part.rank) memset(out[row], 0, part.n * 4);
    }
    if (!part.rank) return;
    const char *end = (const char *)part.up + bytes_of(lora, part);
    const Stream ahead(part.down, end, behind ? behind : end);
    if (lora.format == PG_BF16) return add_rows<uint16_t>(part, given, group.rows, group.count, k, out, ahead);
    if (given.rounded) return add_rows<float>(part, widened(given, group, k), IN_ORDER, group.count, k, out, ahead);
    add_rows<float>(part, given, group.rows, group.count, k, out, ahead);
}

const PgLinear &linear_of(const PgLayer &layer, LoraSlot slot) {
    return slot == LORA_QKV       ? layer.qkv
           : slot == LORA_OUTPUT  ? layer.output
           : slot == LORA_GATE_UP ? layer.gate_up
                                  : layer.down;
}

}  // namespace

namespace {

// Of each group what find(its adapter) adds to its rows.
template <class Find>
void add_groups(Member &member, const std::vector<LoraGroup> &groups, Find &&find, const PgLinear &w, Activations &given,
                float *added, int64_t stride) {
    const bool rounded = kernel_of(w, given.round) == DOT_BF16;
    if (rounded) convert(member, given, w);
    Clock::enter(PG_ADAPTERS);
    const LoraInput rows{given.x, given.stride, rounded ? (const uint16_t *)given.converted : nullptr,
                         layout_of(DOT_BF16, w, given.m)};
    const int64_t items = (int64_t)groups.size() * MOST_PARTS;
    member.for_each(items, 1, [&](int64_t item, int64_t) {
        const LoraGroup &group = groups[item / MOST_PARTS];
        const PgLora &lora = find(group.adapter);
        const int32_t index = (int32_t)(item % MOST_PARTS);
        if (index < lora.num_parts) {
            const void *behind = nullptr;
            if (index + 1 < lora.num_parts) behind = lora.parts[index + 1].down;
            else if (item + MOST_PARTS < items) behind = find(groups[item / MOST_PARTS + 1].adapter).parts[0].down;
            add_any(lora, index, rows, group, w.k, added, stride, behind);
        } else if (!lora.num_parts && index == 0) {
            for (int64_t row = 0; row < group.count; row++) memset(added + group.rows[row] * stride, 0, padded(w.n) * 4);
        }
    });
    member.barrier();
}

Buffer head_added;

}  // namespace

LoraRows add_lora(Member &member, const Step &s, const PgLayer &layer, LoraSlot slot, Activations &given, bool last) {
    const std::vector<int64_t> &adapters = last ? s.tokens.wanted_adapters : s.tokens.adapters;
    if (adapters.empty() || given.m == 0) return {};
    const int64_t place = (&layer - s.m.layers) * LORA_SLOTS + slot;
    const PgLinear &w = linear_of(layer, slot);
    const auto find = [&](int64_t adapter) -> const PgLora & { return s.m.adapters[adapter][place]; };
    add_groups(member, last ? s.tokens.wanted_groups : s.tokens.groups, find, w, given, s.added, s.added_stride);
    const Ahead *ahead = s.tokens.ahead.bytes ? &s.tokens.ahead : nullptr;
    return {s.added, s.added_stride, adapters.data(), slot == LORA_GATE_UP && layer.gated ? w.n / 2 : 0, ahead, place};
}

HeadLora::HeadLora(const PgModel &m, const int64_t *given, int64_t rows) {
    for (int64_t row = 0; given && row < rows; row++) {
        const bool changes = given[row] >= 0 && lora_end(m, given[row], LORA_HEAD).num_parts;
        adapters.push_back(changes ? given[row] : -1);
    }
    group_adapters(adapters, groups);
    if (groups.empty()) return;
    stride = (m.vocab + 31) / 32 * 32;  // as many columns as B has in any build
    added = head_added.get<float>(rows * stride);
}

LoraRows HeadLora::make(Member &member, const PgModel &m, Activations &given) const {
    if (groups.empty()) return {};
    const auto find = [&](int64_t adapter) -> const PgLora & { return lora_end(m, adapter, LORA_HEAD); };
    add_groups(member, groups, find, m.head, given, added, stride);
    return {added, stride, adapters.data(), 0};
}

namespace {

template <class T>
void add_embedding_of(const PgLoraPart &part, int64_t id, float *out) {
    const int64_t even = (part.rank + 1) / 2 * 2;
    const T *own = (const T *)part.down + id * even;
    alignas(64) float reduced[MOST_RANKS];
    for (int64_t r = 0; r < even; r++) {
        if constexpr (sizeof(T) == 2) reduced[r] = from_bf16(own[r]) * part.scale;
        else reduced[r] = own[r] * part.scale;
    }
    std::vector<float> added(part.n);
    Stream ahead(part.up, (const char *)part.up + part.n * even * sizeof(T), part.up);
    float *to = added.data();
    expand<1>(part, (const T *)part.up, reduced, &to, ahead);
    for (int64_t i = 0; i < part.n; i++) out[i] += added[i];
}

}  // namespace

void add_embedding(const PgModel &m, int64_t adapter, int64_t id, float *out) {
    const PgLora &lora = lora_end(m, adapter, LORA_EMBEDDING);
    if (!lora.num_parts) return;
    if (lora.format == PG_BF16) return add_embedding_of<uint16_t>(lora.parts[0], id, out);
    add_embedding_of<float>(lora.parts[0], id, out);
}

void group_adapters(const std::vector<int64_t> &adapters, std::vector<LoraGroup> &groups) {
    groups.clear();
    std::vector<size_t> last;  // of each adapter the group that was begun last, and one
    for (int64_t row = 0; row < (int64_t)adapters.size(); row++) {
        const int64_t adapter = adapters[row];
        if (adapter < 0) continue;
        if (adapter >= (int64_t)last.size()) last.resize(adapter + 1);
        if (!last[adapter] || groups[last[adapter] - 1].count == LoraGroup::MOST_ROWS) {
            groups.push_back({adapter, 0, {}});
            last[adapter] = groups.size();
        }
        LoraGroup &group = groups[last[adapter] - 1];
        group.rows[group.count++] = row;
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const LoraGroup &a, const LoraGroup &b) { return a.adapter < b.adapter; });
}

void list_reads(const PgModel &m, const std::vector<LoraGroup> &groups, int64_t rows, Ahead &ahead) {
    ahead.clear();
    if (groups.empty() || rows <= MAX_ROWS) return;
    double work = 0;
    for (int64_t place = 0; place < (int64_t)m.num_layers * LORA_SLOTS; place++) {
        for (size_t i = 0; i < groups.size(); i++) {
            if (i && groups[i].adapter == groups[i - 1].adapter) continue;
            const PgLora &lora = m.adapters[groups[i].adapter][place];
            for (int32_t part = 0; part < lora.num_parts; part++) {
                const PgLoraPart &own = lora.parts[part];
                if (own.rank) ahead.add(own.down, (const char *)own.up + bytes_of(lora, own) - (const char *)own.down);
            }
        }
        const PgLinear &w = linear_of(m.layers[place / LORA_SLOTS], (LoraSlot)(place % LORA_SLOTS));
        ahead.shares.push_back(work);
        work += (double)w.n * w.k;
    }
    ahead.shares.push_back(work);
    for (double &share : ahead.shares) share /= work;
    ahead.lead = (int64_t)(LEAD * ahead.bytes / m.num_layers) / 64 * 64;
}

int64_t widest_linear(const PgModel &m) {
    int64_t widest = 0;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        widest = std::max<int64_t>({widest, layer.qkv.n, layer.output.n, layer.gate_up.n, layer.down.n});
    }
    return widest;
}

extern "C" int32_t pg_lora_width(void) { return W; }

extern "C" void pg_lora(const PgLora *const *adapters, const float *x, int64_t m, int64_t k, int64_t n, int32_t round,
                        float *out) {
    const RowLayout layout{k * 2, m, false};
    std::vector<uint16_t> rounded(round && HAS_BF16_DOT ? m * RowLayout::stride(k * 2) / 2 : 0);
    for (int64_t row = 0; row < m && !rounded.empty(); row++) to_bf16_row(x + row * k, k, layout.pair(rounded.data(), row, 0));
    const LoraInput rows{x, k, rounded.empty() ? nullptr : rounded.data(), layout};
    parallel([&](Member &member) {
        member.for_each(m, 1, [&](int64_t row, int64_t) {
            if (!adapters[row]) return;
            std::vector<float> added(n);
            for (int32_t part = 0; part < adapters[row]->num_parts; part++)
                add_any(*adapters[row], part, rows, {0, 1, {row}}, k, added.data() - row * n, n, nullptr);
            for (int64_t i = 0; i < n; i++) out[row * n + i] += added[i];
        });
    });
}
