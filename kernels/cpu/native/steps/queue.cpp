// Steps behind each other: a thread of the library goes from one to the next without waiting for a caller.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "steps/step.h"

namespace {

struct Queued {
    const PgModel *model;
    PgStep step;
    PgSampling sampling;
    int64_t *ids;
    double *seconds;
};

// Never destroyed: the thread sleeps here until the process is gone.
std::mutex &mutex = *new std::mutex;
std::condition_variable &has_come = *new std::condition_variable, &is_done = *new std::condition_variable;
std::deque<Queued> &queued = *new std::deque<Queued>;
int64_t num_queued = 0, num_done = 0;

void compute_all() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        has_come.wait(lock, [] { return !queued.empty(); });
        const Queued next = queued.front();
        queued.pop_front();
        lock.unlock();
        const auto begin = std::chrono::steady_clock::now();
        step_tokens(*next.model, next.step, next.sampling, next.ids);
        *next.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        lock.lock();
        num_done++;
        is_done.notify_all();
    }
}

}  // namespace

extern "C" int64_t pg_queue(const PgModel *model, const PgStep *step, const PgSampling *sampling, int64_t *ids,
                            double *seconds) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!num_queued) std::thread(compute_all).detach();
    queued.push_back({model, *step, *sampling, ids, seconds});
    has_come.notify_one();
    return ++num_queued;
}

extern "C" int32_t pg_await(int64_t number, int32_t *called) {
    std::unique_lock<std::mutex> lock(mutex);
    is_done.wait(lock, [&] { return num_done >= number || (called && *called); });
    if (num_done >= number) return 1;
    *called = 0;
    return 0;
}

extern "C" void pg_call(int32_t *called) {
    std::lock_guard<std::mutex> lock(mutex);
    *called = 1;
    is_done.notify_all();
}
