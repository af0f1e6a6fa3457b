// Frames of ranks over sockets.
#include "ranks/links.h"

#include <errno.h>
#include <immintrin.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "ranks/group.h"

namespace {

constexpr int LOOK_MILLISECONDS = 50;  // of sleep, between looks at whether the group has ended
constexpr int SPINS_PER_TRY = 8;       // a look at a socket takes as long as some rounds of waiting for memory

struct FrameHead {
    Order order;  // kind 0: a gather
    uint64_t digest, number;  // of the sender: of the orders so far; of its gathers so far
    int64_t stretches, bytes;
    int64_t behind() const { return stretches * (int64_t)sizeof(Stretch) + bytes; }
};

using Frame = std::vector<uint8_t>;
FrameHead &head_of(Frame &frame) { return *reinterpret_cast<FrameHead *>(frame.data()); }

bool has_ended(const PgGroup &g) { return pg_group_state(&g) != PG_ALIVE; }

// One socket: what is to leave there, and the frame that is coming.
class Link {
  public:
    int socket = -1;
    Frame frame;

    void begin(int wanted) { outgoing_.clear(), sent_ = 0, wanted_ = wanted, got_ = 0; }
    void send(const Frame &whole) { outgoing_.push_back(&whole); }
    bool is_busy() const { return !outgoing_.empty() || wanted_; }
    short awaited() const { return (wanted_ ? POLLIN : 0) | (outgoing_.empty() ? 0 : POLLOUT); }  // events

    // As much as there is room for; returns whether it was anything.
    bool advance_sending(const PgGroup &g) {
        bool moved = false;
        while (!outgoing_.empty()) {
            const Frame &whole = *outgoing_.front();
            const ssize_t count = ::send(socket, whole.data() + sent_, whole.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (!goes_on(g, count)) break;
            moved = true, sent_ += count;
            if (sent_ == (int64_t)whole.size()) outgoing_.erase(outgoing_.begin()), sent_ = 0;
        }
        return moved;
    }

    // As much as has come; took(*this) with each whole frame.
    template <class Took>
    bool advance_receiving(const PgGroup &g, Took &&took) {
        bool moved = false;
        while (wanted_) {
            constexpr int64_t HEAD = sizeof(FrameHead);
            if (got_ < HEAD) frame.resize(HEAD);
            const ssize_t count = recv(socket, frame.data() + got_, frame.size() - got_, MSG_DONTWAIT);
            if (!goes_on(g, count)) break;
            moved = true, got_ += count;
            if (got_ < (int64_t)frame.size()) continue;
            if (got_ == HEAD) {
                const FrameHead &head = head_of(frame);
                const bool fits = head.bytes >= 0 && head.bytes <= g.bytes && head.stretches >= 0 && head.stretches <= head.bytes;
                if (!fits) {
                    pg_group_end(&g, PG_DISAGREED);
                    break;
                }
                frame.resize(HEAD + head.behind());
                if (head.behind()) continue;
            }
            wanted_--, got_ = 0;
            took(*this);
        }
        return moved;
    }

  private:
    // Whether a call has moved anything; a connection that is lost ends the group.
    bool goes_on(const PgGroup &g, ssize_t count) {
        if (count > 0) return true;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
        pg_group_end(&g, PG_RANK_DIED);
        return false;
    }

    std::vector<const Frame *> outgoing_;
    int64_t sent_ = 0, got_ = 0;  // of the first outgoing frame; of the one that is coming
    int wanted_ = 0;              // frames that are still to come
};

// To all others, or to the leader; buffers stay from gather to gather.
std::vector<Link> &links_of(const PgGroup &g, int wanted) {
    static std::vector<Link> links;
    links.resize(leads(g) ? g.ranks - 1 : 1);
    for (size_t i = 0; i < links.size(); i++) links[i].socket = g.links[i], links[i].begin(wanted);
    return links;
}

// Until all is sent and all has come; false where the group has ended.
template <class Took>
bool transfer(const PgGroup &g, std::vector<Link> &links, Took &&took) {
    const int tries = g.spins / SPINS_PER_TRY;
    std::vector<pollfd> waiting;
    for (int idle = 0; !has_ended(g); idle++) {
        bool busy = false;
        for (Link &link : links) {
            if (link.advance_sending(g)) idle = 0;
            if (link.advance_receiving(g, took)) idle = 0;
        }
        for (const Link &link : links) busy |= link.is_busy();  // a frame that has come may have to leave elsewhere
        if (!busy) return !has_ended(g);
        if (idle < tries) {
            _mm_pause();
            continue;
        }
        waiting.clear();
        for (const Link &link : links)
            if (link.is_busy()) waiting.push_back({link.socket, link.awaited(), 0});
        poll(waiting.data(), waiting.size(), LOOK_MILLISECONDS);
    }
    return false;
}

// Calls body(place, bytes) for each piece of a stretch.
template <class Body>
void for_each_piece(const PgGroup &g, const Stretch &one, Body &&body) {
    uint8_t *at = static_cast<uint8_t *>(g.memory) + one.first;
    for (int64_t i = 0; i < one.count; i++, at += one.stride) body(at, one.width);
}

void pack(const PgGroup &g, const Order &order, uint64_t number, const Written &written, Frame &frame) {
    int64_t bytes = 0;
    for (const Stretch &one : written.stretches) bytes += one.count * one.width;
    const int64_t stretches = (int64_t)written.stretches.size(), table = stretches * (int64_t)sizeof(Stretch);
    frame.resize(sizeof(FrameHead) + table + bytes);
    head_of(frame) = {order, g.digest, number, stretches, bytes};
    uint8_t *next = frame.data() + sizeof(FrameHead);
    if (table) memcpy(next, written.stretches.data(), table);
    next += table;
    for (const Stretch &one : written.stretches)
        for_each_piece(g, one, [&](const uint8_t *at, int64_t width) { memcpy(next, at, width), next += width; });
}

// Whether a stretch lies in the areas of the group's memory, and has no more than so many bytes.
bool is_within(const PgGroup &g, const Stretch &one, int64_t left) {
    if (one.width <= 0 || one.count <= 0 || one.stride < 0 || one.first < AREAS_BEGIN) return false;
    if (one.width > left || one.count > left / one.width) return false;
    const int64_t room = g.bytes - one.first - one.width;
    return room >= 0 && (one.count == 1 || one.stride <= room / (one.count - 1));
}

// To their places; a frame that says what cannot be ends the group.
void unpack(const PgGroup &g, Frame &frame) {
    const FrameHead &head = head_of(frame);
    const Stretch *table = reinterpret_cast<const Stretch *>(frame.data() + sizeof(FrameHead));
    const uint8_t *next = reinterpret_cast<const uint8_t *>(table + head.stretches);
    int64_t left = head.bytes;
    for (int64_t i = 0; i < head.stretches; i++) {
        const Stretch &one = table[i];
        if (!is_within(g, one, left)) return pg_group_end(&g, PG_DISAGREED);
        left -= one.count * one.width;
        for_each_piece(g, one, [&](uint8_t *at, int64_t width) { memcpy(at, next, width), next += width; });
    }
}

void exchange(const PgGroup &g, const Written &written, bool for_all) {
    static Frame own;
    const uint64_t number = count_gather(g);
    std::vector<Link> &links = links_of(g, leads(g) ? 1 : for_all ? g.ranks - 1 : 0);
    pack(g, {}, number, written, own);
    if (for_all || !leads(g))
        for (Link &link : links) link.send(own);
    transfer(g, links, [&](Link &from) {
        const FrameHead &head = head_of(from.frame);
        if (head.order.kind || head.digest != g.digest || head.number != number) return pg_group_end(&g, PG_DISAGREED);
        unpack(g, from.frame);
        if (!for_all || !leads(g)) return;
        for (Link &other : links)
            if (&other != &from) other.send(from.frame);
    });
}

}  // namespace

void gather(const PgGroup &g, const Written &written) { exchange(g, written, true); }

void gather_at_leader(const PgGroup &g, const Written &written) { exchange(g, written, false); }

void send_order(const PgGroup &g, const Order &order, const Written &written) {
    static Frame own;
    std::vector<Link> &links = links_of(g, 0);
    pack(g, order, 0, written, own);
    for (Link &link : links) link.send(own);
    transfer(g, links, [](Link &) {});
}

bool await_order(const PgGroup &g, Order &order) {
    std::vector<Link> &links = links_of(g, 1);
    if (!transfer(g, links, [](Link &) {})) return false;
    order = head_of(links[0].frame).order;
    unpack(g, links[0].frame);
    return !has_ended(g);
}
