// The wall clock of every process that this library is loaded into (LD_PRELOAD) is off by as many seconds as a file says
// (PAGEANT_TEST_CLOCK: one 64-bit integer, mapped), so that a test steps the clocks of running processes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *file;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("PAGEANT_TEST_CLOCK");
    const int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0) return;
    void *page = mmap(NULL, sizeof *file, PROT_READ, MAP_SHARED, descriptor, 0);
    if (page != MAP_FAILED) file = page;
    close(descriptor);
}

static int64_t offset(void) { return file ? *file : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    const int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    const int result = real(now, zone);
    if (!result) now->tv_sec += offset();
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

// The kernel's clock was not stepped: who waits until a time of the wall clock waits until the kernel's.
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec kernels = *until;
    if (kernels.tv_sec > 500000000) kernels.tv_sec -= offset();  // not a time since the machine's start
    return real(condition, mutex, &kernels);
}
