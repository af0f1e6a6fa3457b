#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

// Numbers of MR rows, one after the other.  Three rows share a pointer, for a loop has not registers enough for twelve.
template <int MR>
class RowPointers {
  public:
    PG_INLINE RowPointers(const void *rows, int64_t stride) : stride_(stride) {  // bytes
        for (int i = 0; i < COUNT; i++) at_[i] = (const char *)rows + 3 * i * stride;
    }
    template <class T>
    PG_INLINE T get(int row, int64_t ahead = 0) const {
        T value;
        memcpy(&value, at_[row / 3] + row % 3 * stride_ + ahead, sizeof value);
        return value;
    }
    PG_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) {
            at_[i] += bytes;
            asm("" : "+r"(at_[i]));  // or the compiler makes a pointer of each row
        }
    }

  private:
    static constexpr int COUNT = (MR + 2) / 3;
    const char *at_[COUNT];
    int64_t stride_;
};
