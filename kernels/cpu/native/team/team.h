// A team of threads that goes through phases together.
//
// Inside parallel(), every member calls the same loops and barriers in the same order.  A loop's work is cut into one
// range per member, and a range into tickets; who is done with its own range helps with the next ones, so that a member
// whose core is busy with something else does less.  Who computes what never changes a result.
//
// A barrier waits for all, though: for a member that has no core yet, and for one that loses its core to another process
// in the middle of a piece.  So a job may be done in parts.  Those who are there begin, and others join them with the
// next part; and where a member lost its core, the last one leaves its own to the others for a while.
#pragma once
#include <atomic>
#include <cstdint>

#include "team/profile.h"

class Member {
  public:
    static constexpr int MOST = 256, HELPED = 4;  // members of a team; ranges that a member works on
    Member(int id, int count) : id(id), count(count), visited_(count < HELPED ? count : HELPED) {}
    const int id, count;

    // Calls body(begin, end) for pieces of [0, n) of `piece` items.  No barrier: call barrier() after it.
    template <class Body>
    void for_each(int64_t n, int64_t piece, Body &&body) {
        const int64_t pieces = (n + piece - 1) / piece;
        for (int i = 0; i < visited_; i++) {
            const int range = (id + i) % count;
            const int64_t first = pieces * range / count, last = pieces * (range + 1) / count;
            for (int64_t at; (at = first + take(range)) < last;)
                body(at * piece, (at + 1) * piece < n ? (at + 1) * piece : n);
        }
        for (int range = 0; range < count; range++)  // each range was asked in vain once by each of its visitors
            base_[range] += pieces * (range + 1) / count - pieces * range / count + visited_;
    }
    void barrier();

  private:
    int64_t take(int range);
    const int visited_;
    int64_t base_[MOST] = {};  // tickets that earlier loops drew from each range
};

void team_resize(int count, bool pin);
int team_size();
using TeamBody = void (*)(Member &, void *);
void team_run(TeamBody body, void *context);
void team_run_in_parts(TeamBody body, bool (*is_done)(void *), void *context);

// Runs body(member) on every member; returns when all are done.
template <class Body>
void parallel(Body &&body) {
    team_run([](Member &member, void *context) { (*static_cast<Body *>(context))(member); }, &body);
}

// For each member between two pieces of a part.  Tells the first one that the part should end, for others to join or for
// the last member to stay away; all members end it at the same place.
bool should_end(const Member &member);

// Runs work.part(member), again and again until work.is_done(), each time on the members that are there by then.
template <class Work>
void parallel_in_parts(Work &work) {
    team_run_in_parts([](Member &member, void *context) { static_cast<Work *>(context)->part(member); },
                      [](void *context) { return static_cast<Work *>(context)->is_done(); }, &work);
}
