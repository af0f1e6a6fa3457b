#include "team/team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
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

// What the members of a job wait for: the next phase, or a part of the job to take part in.  A futex.
struct alignas(64) Phase {
    std::atomic<uint32_t> number{0};
    std::atomic<int> sleepers{0};
} phase, part;
static_assert(sizeof phase.number == sizeof(uint32_t));

std::atomic<int> spins_in_step{SPINS_IN_STEP};
std::atomic<int64_t> switches{0};  // of all members since the last look

double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

// A process that takes a core is seldom the last: what follows a step, several processes do one after the other while the next
// one is computed.  A member that stays away as long costs its part of the speed, which is little where all wait for memory.
constexpr double AWAY = 1;  // milliseconds
double last_is_away_until = 0;

// How long the last piece of a part took, after which members may join: a piece without a member is worth so much waiting.
constexpr double WORTH_WAITING = 0.05, MOST_WAITING = 0.2;  // of the piece; milliseconds
double piece = 0, piece_began = 0;                          // milliseconds
std::atomic<bool> interrupted{false};  // a member, since the first one asked

// Whether another process took this thread's core since it was last asked.
bool was_interrupted() {
    thread_local int64_t seen = 0;
    rusage used;
    if (getrusage(RUSAGE_THREAD, &used)) return false;
    const bool found = used.ru_nivcsw != seen;
    seen = used.ru_nivcsw;
    return found;
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

void await_after(Phase &phase, uint32_t now) {
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

void begin_after(Phase &phase, uint32_t now) {
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

// The job of now, done in parts, which are numbered through: a job's first PARTS_OF_JOB numbers belong to the next one.
// A member that comes to it says so and waits for the next part; `part` says then whether it takes part, and `id` as which member.
constexpr uint32_t PARTS_OF_JOB = 1024, NOT_BEGUN = 0, OVER = PARTS_OF_JOB - 1;
struct Job {
    TeamBody body;
    void *context;
    uint32_t first = 0;  // of the part numbers
    int count = 1;       // members of the part
    struct alignas(64) {
        std::atomic<uint32_t> came_to{0}, part{0};
        std::atomic<int> id{0};
    } members[Member::MOST];

    bool has_come(int i) const { return members[i].came_to.load(std::memory_order_acquire) == first; }
} current;

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
        const int64_t now = job.value.load(std::memory_order_acquire);
        if (now != done) return now;
        _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex);
    sleepers++;
    wake.wait(lock, [&] { return job.value.load(std::memory_order_relaxed) != done; });
    sleepers--;
    return job.value.load(std::memory_order_relaxed);
}

void work(Member &&member) {
    Clock::begin();
    current.body(member, current.context);
    member.barrier();
    Clock::end();
}

void serve(int own, bool pin, int64_t done) {
    auto &self = current.members[own];
    if (pin) pin_to(own);
    for (;;) {
        done = await_job(done);
        if (stopping) return;
        const uint32_t first = (uint32_t)done * PARTS_OF_JOB;
        self.came_to.store(first, std::memory_order_release);
        for (uint32_t now = first + NOT_BEGUN;;) {
            await_after(part, now);
            now = part.number.load(std::memory_order_acquire);
            if (now - first >= OVER) break;  // or another job's
            if (self.part.load(std::memory_order_relaxed) == now) work({self.id.load(std::memory_order_relaxed), current.count});
        }
        look_around(false);
    }
}

void start_job() {
    std::lock_guard<std::mutex> lock(mutex);
    job.value.fetch_add(1, std::memory_order_release);
    if (sleepers) wake.notify_all();
}

void begin_job(TeamBody body, void *context) {
    current.body = body, current.context = context;
    if (size == 1) return;
    current.first = (uint32_t)(job.value.load(std::memory_order_relaxed) + 1) * PARTS_OF_JOB;
    part.number.store(current.first + NOT_BEGUN, std::memory_order_seq_cst);
    start_job();
}

bool takes_part(int i) { return current.has_come(i) && (i < size - 1 || milliseconds() > last_is_away_until); }

// With all, who may come later, or with those who have come.
void run_part(bool with_all) {
    const uint32_t now = part.number.load(std::memory_order_relaxed);
    int count = 1;
    for (int i = 1; i < size; i++) {
        if (!with_all && !takes_part(i)) continue;
        current.members[i].id.store(count++, std::memory_order_relaxed);
        current.members[i].part.store(now + 1, std::memory_order_relaxed);
    }
    for (int range = 0; range < count; range++) tickets[range].value.store(0, std::memory_order_relaxed);
    current.count = count;
    if (count > 1) begin_after(part, now);
    work({0, count});
}

void end_job() {
    if (size == 1) return;
    begin_after(part, current.first + OVER - 1);
    look_around(true);
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
        begin_after(phase, now);
    } else {
        await_after(phase, now);
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
    for (int id = 1; id < size; id++) threads.emplace_back(serve, id, pin, done);
}

bool should_end(const Member &member) {
    if (member.count > 1 && was_interrupted()) interrupted.store(true, std::memory_order_relaxed);
    if (member.id) return false;
    const double now = milliseconds();
    if (piece_began) piece = now - piece_began;
    piece_began = now;
    if (member.count > 1 && interrupted.exchange(false, std::memory_order_relaxed) && piece < AWAY) {
        last_is_away_until = now + AWAY;
        return true;
    }
    int count = 1;
    for (int i = 1; i < size && count <= member.count; i++) count += takes_part(i);
    return count > member.count;
}

void team_run(TeamBody body, void *context) {
    begin_job(body, context);
    run_part(true);
    end_job();
}

void team_run_in_parts(TeamBody body, bool (*is_done)(void *), void *context) {
    begin_job(body, context);
    const auto all_have_come = [] {
        int i = 1;
        while (i < size && current.has_come(i)) i++;
        return i == size;
    };
    const double until = milliseconds() + std::min(WORTH_WAITING * piece, MOST_WAITING);
    while (!all_have_come() && milliseconds() < until) _mm_pause();
    for (; !is_done(context); piece_began = 0) run_part(false);
    end_job();
}
