#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// A step's phases are some ten microseconds apart, its successor some hundred: so long is worth spinning for.
// Beyond that a member sleeps.  It never yields: a member that yields to a process of lesser priority, such as a compiler
// of grammars that takes idle time only, comes back with the next tick of the clock, milliseconds later; one that sleeps
// comes back at once.
constexpr int SPINS_IN_STEP = 1600, SPINS_BETWEEN = 1000;  // of about 50 ns each
// Where other processes compute on the team's cores, members that sleep soon do better: a core that one leaves takes
// another whose own core is busy.  Such processes show as switches of members that did not wait.
constexpr int SPINS_AMONG_OTHERS = 400;
constexpr double MANY_SWITCHES = 2, LOOK_EVERY = 5;  // per millisecond of the whole team; milliseconds

struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};
Counter tickets[Member::MOST], arrived, job;

// What the members of a step wait for; a futex.
struct alignas(64) Phase {
    std::atomic<uint32_t> number{0};
    std::atomic<int> sleepers{0};
} phase;
static_assert(sizeof phase.number == sizeof(uint32_t));

std::atomic<int> spins_in_step{SPINS_IN_STEP};
std::atomic<int64_t> switches{0};  // of all members since the last look

double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

// Counts this member's switches, at the end of a job; the first one decides for the team.
void look_around(bool decides) {
    thread_local double looked = 0;
    thread_local int64_t seen = 0;
    const double now = milliseconds(), passed = now - looked;
    if (passed < LOOK_EVERY) return;
    looked = now;
    rusage used;
    if (getrusage(RUSAGE_THREAD, &used)) return;
    const int64_t found = switches.fetch_add(used.ru_nivcsw - seen, std::memory_order_relaxed) + used.ru_nivcsw - seen;
    seen = used.ru_nivcsw;
    if (!decides) return;
    switches.store(0, std::memory_order_relaxed);
    spins_in_step.store(found > MANY_SWITCHES * passed ? SPINS_AMONG_OTHERS : SPINS_IN_STEP, std::memory_order_relaxed);
}

void await_after(uint32_t now) {
    const int spins = spins_in_step.load(std::memory_order_relaxed);
    for (int i = 0; i < spins; i++) {
        if (phase.number.load(std::memory_order_acquire) != now) return;
        _mm_pause();
    }
    phase.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (phase.number.load(std::memory_order_seq_cst) == now)
        syscall(SYS_futex, &phase.number, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
    phase.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void begin_after(uint32_t now) {
    phase.number.store(now + 1, std::memory_order_seq_cst);
    if (phase.sleepers.load(std::memory_order_seq_cst))
        syscall(SYS_futex, &phase.number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Never destroyed: the threads sleep here until the process is gone.
std::mutex &mutex = *new std::mutex;
std::condition_variable &wake = *new std::condition_variable;
std::vector<std::thread> &threads = *new std::vector<std::thread>;
int size = 1;
int sleepers = 0;  // guarded by the mutex
bool stopping = false;
void (*current)(Member &, void *) = nullptr;
void *current_context = nullptr;

void pin_to(int index) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && seen++ == index) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one);
            return;
        }
}

int64_t await_job(int64_t done) {
    for (int i = 0; i < SPINS_BETWEEN; i++) {
        if (job.value.load(std::memory_order_acquire) != done) return done + 1;
        _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex);
    sleepers++;
    wake.wait(lock, [&] { return job.value.load(std::memory_order_relaxed) != done; });
    sleepers--;
    return done + 1;
}

void serve(int id, int count, bool pin, int64_t done) {
    if (pin) pin_to(id);
    for (;;) {
        done = await_job(done);
        if (stopping) return;
        Member member(id, count);
        Clock::begin();
        current(member, current_context);
        member.barrier();
        Clock::end();
        look_around(false);
    }
}

void start_job() {
    std::lock_guard<std::mutex> lock(mutex);
    job.value.fetch_add(1, std::memory_order_release);
    if (sleepers) wake.notify_all();
}

}  // namespace

int64_t Member::take(int range) {
    return tickets[range].value.fetch_add(1, std::memory_order_relaxed) - base_[range];
}

void Member::barrier() {
    if (count == 1) return;
    Clock::enter(PG_WAITING);
    const uint32_t now = phase.number.load(std::memory_order_relaxed);
    if (arrived.value.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
        arrived.value.store(0, std::memory_order_relaxed);
        begin_after(now);
    } else {
        await_after(now);
    }
    Clock::enter(PG_OTHER);
}

int team_size() { return size; }

void team_resize(int count, bool pin) {
    if (!threads.empty()) {
        stopping = true;
        start_job();
        for (std::thread &thread : threads) thread.join();
        threads.clear();
        stopping = false;
    }
    size = count < 1 ? 1 : count > Member::MOST ? Member::MOST : count;
    const int64_t done = job.value.load();
    for (int id = 1; id < size; id++) threads.emplace_back(serve, id, size, pin, done);
}

void team_run(void (*body)(Member &, void *), void *context) {
    for (int range = 0; range < size; range++) tickets[range].value.store(0, std::memory_order_relaxed);
    current = body;
    current_context = context;
    if (size > 1) start_job();
    Member member(0, size);
    Clock::begin();
    body(member, context);
    member.barrier();
    Clock::end();
    if (size > 1) look_around(true);
}
