// Ranks that compute one model together: orders, meetings, and the end.
#include "ranks/group.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "steps/step.h"

namespace {

constexpr int64_t PAGE = AREAS_BEGIN / 2;
constexpr int64_t NO_ADAPTER = -1;
constexpr int LOOK_EVERY = 64;  // rounds of waiting, between looks at whether the group has ended

// What ranks sleep at; a futex of several processes.
struct alignas(64) Bell {
    std::atomic<uint32_t> number{0};
    std::atomic<int32_t> sleepers{0};

    void ring() {
        number.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

struct alignas(64) Digest {
    std::atomic<uint64_t> value;
};

// At the beginning of the shared memory.
struct GroupState {
    Bell phase, ordered;
    alignas(64) std::atomic<int32_t> arrived;
    alignas(64) std::atomic<int32_t> ended;  // PgEnd
    Digest digests[MOST_RANKS];
    alignas(64) int64_t kind, count;  // of the latest order: OrderKind; sequences, rows, pairs or moves
    int64_t pool;                     // of blocks that are copied: where it begins in the tables; of experts: the layer
    uint64_t gathers;                 // of ranks that share no memory
};
static_assert(sizeof(GroupState) <= AREAS_BEGIN);

GroupState &state_of(const PgGroup &g) { return *static_cast<GroupState *>(g.memory); }

bool has_ended(const GroupState &s) { return s.ended.load(std::memory_order_acquire) != PG_ALIVE; }

// Until the bell's number is another than `now`, or the group has ended.
void await_bell(GroupState &s, Bell &bell, uint32_t now, int spins) {
    for (int i = 0; i < spins; i++) {
        if (bell.number.load(std::memory_order_acquire) != now) return;
        if (i % LOOK_EVERY == 0 && has_ended(s)) return;
        _mm_pause();
    }
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const timespec second{1, 0};
    while (bell.number.load(std::memory_order_seq_cst) == now && !has_ended(s))
        syscall(SYS_futex, &bell.number, FUTEX_WAIT, now, &second, nullptr, 0);
    bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t mixed_in(uint64_t digest, uint64_t word) {
    digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
    return digest ^ digest >> 29;
}

uint64_t mixed_in(uint64_t digest, const int64_t *words, int64_t count) {
    for (int64_t i = 0; i < count; i++) digest = mixed_in(digest, (uint64_t)words[i]);
    return digest;
}

int64_t blocks_of(const PgModel &m, const GroupAreas &a, int64_t max_seqs, int64_t i) {
    return (a.columns[i] + a.columns[max_seqs + i] + m.block_size - 1) / m.block_size;
}

// What this rank reads of the latest order goes into its digest, which all can see then.
void digest_order(const PgModel &m) {
    PgGroup &g = *m.group;
    GroupState &s = state_of(g);
    const GroupAreas a = areas_of(g, m.hidden);
    uint64_t digest = mixed_in(mixed_in(mixed_in(g.digest, s.kind), s.count), s.pool);
    if (is_step(s.kind)) {
        static thread_local std::vector<int64_t> pools;
        list_pools(m, pools);
        int64_t tokens = 0;
        for (int64_t column = 0; column < 4; column++)
            digest = mixed_in(digest, a.columns + column * g.max_seqs, s.count);
        for (int64_t i = 0; i < s.count; i++) {
            tokens += a.columns[g.max_seqs + i];
            for (int64_t pool : pools)
                digest = mixed_in(digest, a.tables + i * g.table_columns + pool, blocks_of(m, a, g.max_seqs, i));
        }
        digest = mixed_in(digest, a.tokens, tokens);
    } else if (s.kind == ORDER_LOGITS || s.kind == ORDER_GREEDY) {
        digest = mixed_in(digest, a.adapters, s.count);
    } else if (s.kind == ORDER_COPY) {
        digest = mixed_in(digest, a.tokens, 2 * s.count);
    } else if (s.kind == ORDER_MOVE) {
        digest = mixed_in(digest, a.tokens, MOVE_WORDS * s.count);
    }
    g.digest = digest;
    s.digests[g.rank].value.store(digest, std::memory_order_release);
}

// What the leader writes for the others, as it does.
class OrderWriter {
  public:
    explicit OrderWriter(const PgGroup &g) : written(g), linked_(is_linked(g)) {}
    Written written;

    void put(void *to, const void *from, int64_t bytes) {
        memcpy(to, from, bytes);
        if (linked_) written.add(to, 1, 0, bytes);
    }
    // NULL: no row has an adapter.
    void put_adapters(int64_t *to, const int64_t *adapters, int64_t count) {
        for (int64_t i = 0; i < count; i++) to[i] = adapters ? adapters[i] : NO_ADAPTER;
        if (linked_) written.add(to, 1, 0, count * 8);
    }

  private:
    bool linked_;
};

void issue(const PgModel &m, OrderKind kind, int64_t count, int64_t pool, const Written &written) {
    GroupState &s = state_of(*m.group);
    s.kind = kind, s.count = count, s.pool = pool;
    if (is_linked(*m.group)) send_order(*m.group, {kind, count, pool}, written);
    else s.ordered.ring();
    digest_order(m);
}

// Sequences, pairs, moves or rows that an order may have.
int64_t most_of(const PgGroup &g, int64_t kind) {
    if (is_step(kind)) return g.max_seqs;
    return kind == ORDER_COPY ? g.max_tokens / 2 : kind == ORDER_MOVE ? g.max_tokens / MOVE_WORDS : g.max_rows;
}

// Waits for the order behind `done` of them; false once the group has ended.
bool next_order(const PgGroup &g, uint32_t done) {
    GroupState &s = state_of(g);
    if (!is_linked(g)) {
        await_bell(s, s.ordered, done, g.spins);
        return !has_ended(s);
    }
    Order order{};
    if (!await_order(g, order)) return false;
    if (order.count < 0 || order.count > most_of(g, order.kind)) {
        pg_group_end(&g, PG_DISAGREED);
        return false;
    }
    s.kind = order.kind, s.count = order.count, s.pool = order.pool;
    return true;
}

bool can_order(const PgModel &m, bool fits) {
    if (!fits) pg_group_end(m.group, PG_NO_ROOM);
    return !has_ended(state_of(*m.group));
}

// This rank's part of blocks, in the layers of one pool; all are read before any is written.
void copy_blocks(const PgModel &m, int64_t pool, const int64_t *pairs, int64_t count) {
    std::vector<uint8_t> held;
    for (int32_t i = 0; i < m.num_layers; i++) {
        const PgLayer &layer = m.layers[i];
        if (layer.table != pool) continue;
        const int64_t size = pg_key_bytes(m.kv_format, m.block_size, layer.num_kv_heads, layer.head_dim);
        held.resize(count * size);
        for (uint8_t *blocks : {layer.keys, layer.values}) {
            for (int64_t j = 0; j < count; j++) memcpy(&held[j * size], blocks + pairs[2 * j] * size, size);
            for (int64_t j = 0; j < count; j++) memcpy(blocks + pairs[2 * j + 1] * size, &held[j * size], size);
        }
    }
}

// The latest order's step, from the shared memory.
void follow_forward(const PgModel &m, int64_t kind, int64_t num_seqs) {
    static std::vector<int64_t> rows;
    static std::vector<float> hidden;
    const PgGroup &g = *m.group;
    const GroupAreas a = areas_of(g, m.hidden);
    int64_t wanted = 0;
    for (int64_t i = (int64_t)rows.size(); i < num_seqs; i++) rows.push_back(i);
    for (int64_t i = 0; i < num_seqs; i++) wanted += a.columns[2 * g.max_seqs + i];
    hidden.resize(wanted * m.hidden);
    PgStep step{};
    step.num_seqs = num_seqs, step.rows = rows.data();
    step.computed = a.columns, step.scheduled = a.columns + g.max_seqs, step.wanted = a.columns + 2 * g.max_seqs;
    if (m.adapters) step.adapters = a.columns + 3 * g.max_seqs;
    step.listed = a.tokens, step.tables = a.tables, step.tables_stride = g.table_columns;
    if (kind == ORDER_LAYERS) step.inputs = a.residual;
    pg_forward(&m, &step, hidden.data());
}

void agree_and_copy(const PgModel &m) {
    parallel([&](Member &member) { agree(member, m.group); });
    const GroupState &s = state_of(*m.group);
    if (has_ended(s)) return;
    copy_blocks(m, s.pool, areas_of(*m.group, m.hidden).tokens, s.count);
    if (!is_linked(*m.group)) meet_ranks(*m.group);
}

}  // namespace

GroupAreas areas_of(const PgGroup &g, int64_t hidden) {
    int64_t at = AREAS_BEGIN;
    const auto take = [&](int64_t bytes) {
        uint8_t *area = static_cast<uint8_t *>(g.memory) + at;
        at += (bytes + 2 * PAGE - 1) / PAGE * PAGE;
        return area;
    };
    const int64_t row = row_stride(hidden);
    GroupAreas a{};
    a.columns = (int64_t *)take(4 * g.max_seqs * 8);
    a.tokens = (int64_t *)take(g.max_tokens * 8);
    a.tables = (int64_t *)take(g.max_seqs * g.table_columns * 8);
    a.best = (RankBest *)take(g.ranks * g.max_rows * (int64_t)sizeof(RankBest));
    a.given = (float *)take(g.max_rows * hidden * 4);
    a.adapters = (int64_t *)take(g.max_rows * 8);
    a.logits = (float *)take(g.max_rows * g.vocab * 4);
    a.residual = (float *)take(g.max_tokens * row * 4);
    a.kept = (float *)take(g.max_tokens * row * 4);
    a.attended = (float *)take(g.max_tokens * row_stride(g.attended) * 4);
    a.inner = (float *)take(g.max_tokens * row_stride(g.inner) * 4);
    a.joined = (float *)take(g.joins ? g.max_tokens * row * 4 : 0);
    a.experts = (float *)take(g.expert_bytes);
    a.slots = (float *)take(g.slot_bytes);
    a.normed = (float *)take(g.sequence_parallel ? g.max_tokens * row * 4 : 0);
    a.bytes = at;
    return a;
}

void meet_ranks(const PgGroup &g) {
    GroupState &s = state_of(g);
    if (has_ended(s)) return;
    const uint32_t now = s.phase.number.load(std::memory_order_relaxed);
    if (s.arrived.fetch_add(1, std::memory_order_acq_rel) == g.ranks - 1) {
        s.arrived.store(0, std::memory_order_relaxed);
        s.phase.ring();
    } else {
        await_bell(s, s.phase, now, g.spins);
    }
}

uint64_t count_gather(const PgGroup &g) { return ++state_of(g).gathers; }

void agree(Member &member, const PgGroup *g) {
    member.barrier();
    if (!g || is_linked(*g)) return;  // digests come with the next gather
    if (member.id == 0) {
        meet_ranks(*g);
        const GroupState &s = state_of(*g);
        for (int32_t rank = 1; rank < g->ranks; rank++)
            if (s.digests[rank].value.load(std::memory_order_acquire) != s.digests[0].value.load(std::memory_order_acquire))
                pg_group_end(g, PG_DISAGREED);
    }
    member.barrier();
}

void list_pools(const PgModel &m, std::vector<int64_t> &pools) {
    pools.clear();
    for (int32_t i = 0; i < m.num_layers; i++) {
        bool known = false;
        for (int64_t pool : pools) known |= pool == m.layers[i].table;
        if (!known) pools.push_back(m.layers[i].table);
    }
}

bool order_forward(const PgModel &m, const PgStep &step) {
    static std::vector<int64_t> pools;
    const PgGroup &g = *m.group;
    const GroupAreas a = areas_of(g, m.hidden);
    int64_t tokens = 0;
    for (int64_t i = 0; i < step.num_seqs; i++) tokens += step.scheduled[i];
    if (!can_order(m, step.num_seqs <= g.max_seqs && tokens <= g.max_tokens && step.tables_stride <= g.table_columns))
        return false;
    list_pools(m, pools);
    OrderWriter w(g);
    w.put(a.columns, step.computed, step.num_seqs * 8);
    w.put(a.columns + g.max_seqs, step.scheduled, step.num_seqs * 8);
    w.put(a.columns + 2 * g.max_seqs, step.wanted, step.num_seqs * 8);
    w.put_adapters(a.columns + 3 * g.max_seqs, step.adapters, step.num_seqs);
    int64_t *next = a.tokens;
    for (int64_t i = 0; i < step.num_seqs; i++) {
        w.put(next, step.tokens + step.rows[i] * step.tokens_stride + step.computed[i], step.scheduled[i] * 8);
        next += step.scheduled[i];
        const int64_t *table = step.tables + step.rows[i] * step.tables_stride, count = blocks_of(m, a, g.max_seqs, i);
        for (int64_t pool : pools) w.put(a.tables + i * g.table_columns + pool, table + pool, count * 8);
    }
    issue(m, step.inputs ? ORDER_LAYERS : ORDER_FORWARD, step.num_seqs, 0, w.written);
    return true;
}

bool order_rows(const PgModel &m, OrderKind kind, const float *hidden, int64_t rows, const int64_t *adapters) {
    if (!can_order(m, rows <= m.group->max_rows)) return false;
    OrderWriter w(*m.group);
    const GroupAreas a = areas_of(*m.group, m.hidden);
    w.put(a.given, hidden, rows * m.hidden * 4);
    w.put_adapters(a.adapters, adapters, rows);
    issue(m, kind, rows, 0, w.written);
    return true;
}

extern "C" int64_t pg_group_bytes(const PgGroup *group, int64_t hidden) { return areas_of(*group, hidden).bytes; }

extern "C" float *pg_group_logits(const PgModel *model) { return areas_of(*model->group, model->hidden).logits; }

extern "C" int32_t pg_group_state(const PgGroup *group) { return state_of(*group).ended.load(std::memory_order_acquire); }

extern "C" void pg_group_end(const PgGroup *group, int32_t reason) {
    GroupState &s = state_of(*group);
    int32_t alive = PG_ALIVE;
    s.ended.compare_exchange_strong(alive, reason, std::memory_order_seq_cst);
    s.phase.ring();
    s.ordered.ring();
}

extern "C" void pg_group_copy(const PgModel *model, int64_t pool, const int64_t *pairs, int64_t count) {
    if (!can_order(*model, 2 * count <= model->group->max_tokens)) return;
    OrderWriter w(*model->group);
    w.put(areas_of(*model->group, model->hidden).tokens, pairs, 2 * count * 8);
    issue(*model, ORDER_COPY, count, pool, w.written);
    agree_and_copy(*model);
}

extern "C" void pg_group_move(const PgModel *model, int64_t layer, const PgExpertMove *moves, int64_t count) {
    const PgModel &m = *model;
    if (!can_order(m, MOVE_WORDS * count <= m.group->max_tokens)) return;
    OrderWriter w(*m.group);
    w.put(areas_of(*m.group, m.hidden).tokens, moves, MOVE_WORDS * count * 8);
    issue(m, ORDER_MOVE, count, layer, w.written);
    move_experts(m, layer, moves, count);
}

extern "C" int32_t pg_follow(const PgModel *model) {
    const PgModel &m = *model;
    GroupState &s = state_of(*m.group);
    for (uint32_t done = 0;; done++) {
        if (!next_order(*m.group, done)) return s.ended.load(std::memory_order_acquire);
        digest_order(m);
        const GroupAreas a = areas_of(*m.group, m.hidden);
        const int64_t *adapters = m.adapters ? a.adapters : nullptr;
        const int64_t kind = s.kind, count = s.count;  // the next order may come as soon as this one's last meeting is over
        if (is_step(kind)) follow_forward(m, kind, count);
        if (kind == ORDER_LOGITS) pg_logits(model, a.given, count, adapters, nullptr);
        if (kind == ORDER_GREEDY) pg_greedy(model, a.given, count, adapters, nullptr);
        if (kind == ORDER_COPY) agree_and_copy(m);
        if (kind == ORDER_MOVE) move_experts(m, s.pool, (const PgExpertMove *)a.tokens, count);
    }
}

extern "C" void pg_gather(const PgGroup *group, int64_t hidden, const float *columns, int64_t bytes, int64_t rounds,
                          int64_t *nanoseconds) {
    const GroupAreas a = areas_of(*group, hidden);
    uint8_t *mine = (uint8_t *)a.residual + group->rank * bytes, *whole = (uint8_t *)a.residual;
    std::vector<uint8_t> read(bytes * group->ranks);
    const auto meeting = [&](int64_t written) {
        Written own(*group);
        own.add(mine, 1, 0, written);
        is_linked(*group) ? gather(*group, own) : meet_ranks(*group);
    };
    for (int64_t i = 0; i < rounds; i++) {
        timespec begin, end;
        meeting(0);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        memcpy(mine, columns, bytes);
        meeting(bytes);
        memcpy(read.data(), whole, bytes * group->ranks);
        clock_gettime(CLOCK_MONOTONIC, &end);
        nanoseconds[i] = (end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec;
    }
}
