// Ranks that share no memory: each has the group's memory for itself, and what it writes there for the others goes to
// them over sockets, through the leader.
//
// A frame is a head, a table of stretches, and the bytes of these.  It says where its bytes belong, so that no rank needs to
// know another rank's shares; a stretch that leaves the memory's areas ends the group.  Each gather's frames carry the
// sender's digest of the orders so far, which the receiver compares before it uses any of them.
#pragma once
#include <vector>

#include "linears/gemm.h"

// `count` pieces of `width` bytes, from byte `first` of the group's memory on, `stride` bytes from one to the next.
struct Stretch {
    int64_t first, count, stride, width;
};

// What a rank has written for the others since the last gather.
class Written {
  public:
    explicit Written(const PgGroup &g) : memory_(static_cast<const uint8_t *>(g.memory)) {}

    void add(const void *at, int64_t count, int64_t stride, int64_t width) {
        if (count && width) stretches.push_back({(const uint8_t *)at - memory_, count, stride, width});
    }
    // Features [first, first + n) of rows of so many floats.
    void add_columns(const float *rows, int64_t stride, int64_t count, int64_t first, int64_t n) {
        add(rows + first, count, stride * 4, n * 4);
    }
    // The same of rows of bfloat16 that lie as a linear reads them; `first` is a multiple of 32.
    void add_rounded(const uint16_t *rows, const RowLayout &layout, int64_t first, int64_t n) {
        uint16_t *begin = const_cast<uint16_t *>(rows);
        if (!layout.tiled) return add(layout.pair(begin, 0, first), layout.count, layout.stride(layout.bytes), n * 2);
        for (int64_t row = 0; row < layout.count; row += TILE_ROWS)
            add(layout.pair(begin, row, first), 1, 0, (n + 31) / 32 * layout.gap(row));
    }
    std::vector<Stretch> stretches;

  private:
    const uint8_t *memory_;
};

// Every rank gets what all others have written; or the leader alone does, and the others do not wait.
void gather(const PgGroup &g, const Written &written);
void gather_at_leader(const PgGroup &g, const Written &written);

// What the leader orders, with what it has written for that.  Waiting returns false once the group has ended.
struct Order {
    int64_t kind, count, pool;
};
void send_order(const PgGroup &g, const Order &order, const Written &written);
bool await_order(const PgGroup &g, Order &order);
