// Prefetching of what a step reads between its linears, such as adapters, while the linears compute.
//
// A linear of many rows waits for arithmetic and leaves the memory idle.  So each of its tickets asks for a part of what
// will be read later, in proportion to its part of the step's work; results do not depend on it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

class Beside;

// All that a step will read between its linears, in order of reading.
struct Ahead {
    struct Stretch {
        const char *at;
        int64_t before;  // bytes of all stretches before it
    };
    std::vector<Stretch> stretches;
    std::vector<double> shares;  // [linears + 1]: the part of all linears' work that is done before each, and 1
    int64_t bytes = 0;           // of all stretches
    int64_t lead = 0;            // bytes by which asking is ahead of the work done

    void clear() { stretches.clear(), shares.clear(), bytes = lead = 0; }
    void add(const void *at, int64_t count) {
        if (!stretches.empty()) {  // what follows closely is one stretch
            const int64_t gap = (const char *)at - (stretches.back().at + bytes - stretches.back().before);
            if (gap >= 0 && gap < CLOSE) {
                bytes += gap + count;
                return;
            }
        }
        stretches.push_back({(const char *)at, bytes});
        bytes += count;
    }
    Beside share_of(int64_t linear, int64_t ticket, int64_t tickets) const;

  private:
    static constexpr int64_t CLOSE = 128;  // bytes
};

// What one ticket of a linear asks for: bytes [from, to) of all.
class Beside {
  public:
    Beside() = default;
    Beside(const Ahead &all, int64_t from, int64_t to) : all_(&all), from_(from), to_(std::min(to, all.bytes)) {
        const auto is_behind = [](int64_t place, const Ahead::Stretch &stretch) { return place < stretch.before; };
        const auto found = std::upper_bound(all.stretches.begin(), all.stretches.end(), from, is_behind);
        stretch_ = (size_t)(found - all.stretches.begin()) - 1;
    }
    // Where the next `count` bytes begin; those behind the end of a stretch are of no use.  NULL: nothing is left.
    const char *take(int64_t count) {
        if (from_ >= to_) return nullptr;
        const Ahead::Stretch &own = all_->stretches[stretch_];
        const bool is_last = stretch_ + 1 == all_->stretches.size();
        const int64_t end = is_last ? all_->bytes : all_->stretches[stretch_ + 1].before;
        const char *at = own.at + (from_ - own.before);
        from_ += count;
        if (from_ >= end) from_ = end, stretch_++;
        return at;
    }

  private:
    const Ahead *all_ = nullptr;
    int64_t from_ = 0, to_ = 0;
    size_t stretch_ = 0;
};

inline Beside Ahead::share_of(int64_t linear, int64_t ticket, int64_t tickets) const {
    const double begin = shares[linear], work = shares[linear + 1] - begin;
    const auto place = [&](int64_t t) { return (int64_t)((begin + work * t / tickets) * bytes) / 64 * 64 + lead; };
    return {*this, place(ticket), place(ticket + 1)};
}
