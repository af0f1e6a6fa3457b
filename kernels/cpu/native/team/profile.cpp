#include "team/profile.h"

#include <immintrin.h>

#include <atomic>
#include <cstring>

namespace {

std::atomic<uint64_t> cycles[PG_PHASES];

}  // namespace

bool Clock::counting = false;
thread_local Clock Clock::clock;

void Clock::move(PgPhase phase) {
    const uint64_t now = __builtin_ia32_rdtsc();
    spent_[phase_] += now - since_;
    since_ = now;
    phase_ = phase;
}

void Clock::begin() {
    if (!counting) return;
    clock = Clock();
    clock.since_ = __builtin_ia32_rdtsc();
}

void Clock::end() {
    if (!counting) return;
    clock.move(PG_OTHER);
    for (int i = 0; i < PG_PHASES; i++) cycles[i].fetch_add(clock.spent_[i], std::memory_order_relaxed);
}

extern "C" void pg_count(int32_t counting) {
    Clock::counting = counting != 0;
    if (!counting) return;
    for (auto &one : cycles) one.store(0, std::memory_order_relaxed);
}

extern "C" void pg_counted(int64_t *found) {
    for (int i = 0; i < PG_PHASES; i++) found[i] = (int64_t)cycles[i].load(std::memory_order_relaxed);
}
