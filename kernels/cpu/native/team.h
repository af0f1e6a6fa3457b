// A team of threads that goes through phases together.
//
// Inside run(), every member calls the same loops and barriers in the same order.  Work is taken ticket by ticket, so
// that a member whose core is busy with something else takes less of it; who computes what never changes a result.
#pragma once
#include <atomic>
#include <cstdint>

class Member {
  public:
    Member(int id, int count) : id(id), count(count) {}
    const int id, count;

    // Calls body(begin, end) for pieces of [0, n) of `piece` items.  No barrier: call barrier() after it.
    template <class Body>
    void for_each(int64_t n, int64_t piece, Body &&body) {
        const int64_t pieces = (n + piece - 1) / piece;
        for (int64_t i; (i = take() - base_) < pieces;) {
            const int64_t end = (i + 1) * piece;
            body(i * piece, end < n ? end : n);
        }
        base_ += pieces + count;  // each member drew one ticket too many
    }
    void barrier();

  private:
    friend class Team;
    int64_t take();
    int64_t base_ = 0;
};

void team_resize(int count, bool pin);
int team_size();
void team_run(void (*body)(Member &, void *), void *context);

// Runs body(member) on every member; returns when all are done.
template <class Body>
void parallel(Body &&body) {
    team_run([](Member &member, void *context) { (*static_cast<Body *>(context))(member); }, &body);
}
