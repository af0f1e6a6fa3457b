// The sums of a digest, for functions that read the memory anyway: sums of what is in the cache already take a fraction
// of the time that reading it for them takes.
#pragma once
#include "pageant.h"
#include "simd.h"

// Collects chunks and sums several at once: each key is then loaded once for all of them, and memory that is not in the
// cache is read as several streams.
class ChunkSums {
  public:
    static constexpr int AT_ONCE = 4;
    ~ChunkSums() { flush(); }

    // The chunks of data [bytes] that end in its bytes from `begin` to `end`, which were just read; `sums` is that of
    // the data's first chunk, or NULL for none.
    void add(const void *data, int64_t bytes, int64_t begin, int64_t end, uint64_t *sums);
    void flush();

  private:
    void sum_last(const uint8_t *data, int64_t bytes, uint64_t *sums);
    int count_ = 0;
    const uint8_t *chunks_[AT_ONCE];
    uint64_t *sums_[AT_ONCE];
};
