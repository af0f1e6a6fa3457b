/* How fast memory can be read: every thread sums its part of an array; returns the seconds that all took. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define MOST_THREADS 64

struct part {
    const uint64_t *words;
    size_t count;
    uint64_t sum;
};

static void *sum_part(void *argument)
{
    struct part *part = argument;
    uint64_t sum = 0;
    for (size_t i = 0; i < part->count; i++)
        sum += part->words[i];
    part->sum = sum;
    return NULL;
}

double read_seconds(const uint64_t *words, size_t count, int num_threads, uint64_t *sum)
{
    pthread_t threads[MOST_THREADS];
    struct part parts[MOST_THREADS];
    struct timespec begin, end;
    size_t share = count / num_threads;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < num_threads; i++) {
        parts[i] = (struct part){words + i * share, share, 0};
        pthread_create(&threads[i], NULL, sum_part, &parts[i]);
    }
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        *sum += parts[i].sum;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}
