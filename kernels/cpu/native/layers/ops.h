// The row-wise ops of a decoder layer, and the linear that picks its microkernel.
#pragma once
#include "linears/gemm.h"

// Buffers that grow to the largest step seen and stay.
class Buffer {
  public:
    template <class T>
    T *get(int64_t count) {
        return static_cast<T *>(bytes(count * (int64_t)sizeof(T)));
    }
    ~Buffer();

  private:
    void *bytes(int64_t size);
    void *data_ = nullptr;
    int64_t size_ = 0;
};

void norm_row(const PgNorm &norm, const float *x, float eps, int64_t n, float *out);  // out may be x
void round_row(float *x, int64_t n);                               // to bfloat16, in place
// Rows for dot products, n a multiple of 16; from 64 bytes of `out` to the next ones: RowLayout::gap.
void to_bf16_row(const float *x, int64_t n, uint16_t *out, int64_t gap = 64);
float quantize_row(const float *x, int64_t n, uint8_t *out, int64_t gap = 64);  // value + 128; returns the scale
void rotate_head(float *x, const float *cos, const float *sin, int64_t head_dim);

int64_t largest(const float *values, int64_t n);  // its id, the lowest among equals

// What truncation is told of a row: log(min_p) or -inf, top_k or 0, top_p or 1.
struct Limits {
    double depth;
    int64_t top_k;
    double top_p;
};
constexpr Limits NO_LIMITS{-__builtin_inf(), 0, 1.0};
inline bool is_greedy(const PgSampling &sampling, int64_t seq) {
    return !sampling.temperature || sampling.temperature[seq] == 0.0f;
}
inline Limits limits_of(const PgSampling &sampling, int64_t seq) {
    return sampling.top_k ? Limits{sampling.depth[seq], sampling.top_k[seq], sampling.top_p[seq]} : NO_LIMITS;
}
void truncate_row(const float *values, int64_t vocab, const Limits &limits, float *cut, int64_t *last_tied);

// The token that a row of logits, divided in place, takes: see PgSampling.
int64_t draw_row(float *logits, int64_t vocab, float temperature, int64_t seed, int64_t position, const Limits &limits);

constexpr int64_t CONVERTED_MORE = 64;  // elements of two bytes that a converted row may take beyond its own

// Activations of one linear after another, converted to what the microkernel of the weight's format reads.
struct Activations {
    float *x;        // [m, stride]
    int64_t stride;  // elements
    int64_t m;
    bool round;      // to bfloat16
    void *converted;  // [m, stride + CONVERTED_MORE] of two bytes
    float *scales;    // [m]
    int64_t apart = 0;  // bytes from one member's `converted` to the next one's, where there is one for each
    bool ready = false;  // `converted` holds them already, as the next linear reads them
    bool own = false;    // `x`, of one row, is this member's alone
    bool taken = false;  // `converted` and `scales` are, see take_copy

    // One row alone: each member makes it ready for itself, in less time than all would wait for one of them.
    bool is_alone() const { return m == 1 && apart; }
    void take_copy(int member) {
        if (!taken) converted = (uint8_t *)converted + member * apart, scales += member, taken = true;
    }
};

// Whether a linear reads its rows in bfloat16: what comes before it can then write them so, in groups of 32.
inline bool reads_rounded(const PgLinear &w, bool round) { return kernel_of(w, round) == DOT_BF16 && w.k % 32 == 0; }

// The first `count` of W values, zeros behind them.
PG_INLINE F load_some(const float *p, int64_t count) {
    if (count >= W) return load<F>(p);
    F v{};
    for (int64_t i = 0; i < count; i++) v[i] = p[i];
    return v;
}
PG_INLINE void store_some(float *p, F v, int64_t count) {
    if (count >= W) return store(p, v);
    for (int64_t i = 0; i < count; i++) p[i] = v[i];
}

PG_INLINE void add_bias(const PgLinear &w, int64_t column, F &low, F &high) {
    if (!w.bias) return;
    low = low + load_some(w.bias + column, w.n - column);
    high = high + load_some(w.bias + column + W, w.n - column - W);
}

// Rows in `converted`, ready for this linear, where its kernel reads such; then behind a barrier, if others read them too.
inline void convert(Member &member, Activations &a, const PgLinear &w) {
    const Kernel kernel = kernel_of(w, a.round);
    if (a.ready || kernel == FLOAT_F32 || kernel == FLOAT_BF16) return;
    Clock::enter(PG_CONVERTING);
    if (a.is_alone()) a.take_copy(member.id);
    uint8_t *converted = (uint8_t *)a.converted;
    const RowLayout layout = layout_of(kernel, w, a.m);
    const auto convert_row = [&](int64_t row) {
        const float *x = a.x + row * a.stride;
        uint8_t *to = converted + layout.at(row);
        if (kernel == DOT_I8) a.scales[row] = quantize_row(x, w.k, to, layout.gap(row));
        else if (kernel == DOT_I4) quantize_groups(x, w, to);
        else to_bf16_row(x, w.k, (uint16_t *)to, layout.gap(row));
    };
    a.ready = true;
    if (a.is_alone()) return convert_row(0);
    member.for_each(a.m, a.m < 4 * member.count ? 1 : 4, [&](int64_t row, int64_t end) {
        for (; row < end; row++) convert_row(row);
    });
    member.barrier();
}

// out(row, first column, low half, high half), each half a vector of W columns; columns beyond n are zeros.
template <class Out>
void linear(Member &member, const Activations &given, const PgLinear &w, Out &&out, const Target &target = {}) {
    const auto finish = [&](int64_t row, int64_t column, F low, F high) {
        add_bias(w, column, low, high);
        out(row, column, low, high);
    };
    Activations a = given;
    convert(member, a, w);
    const Kernel kernel = kernel_of(w, a.round);
    if (a.ready) {
        const Rows rows = layout_of(kernel, w, a.m).rows(kernel, a.converted, a.scales);
        return multiply(member, kernel, rows, a.m, w, finish, target);
    }
    Clock::enter(PG_CONVERTING);
    if (a.round && a.own) {
        round_row(a.x, w.k);  // the only row
    } else if (a.round) {
        member.for_each(a.m, a.m < 4 * member.count ? 1 : 4, [&](int64_t row, int64_t end) {
            for (; row < end; row++) round_row(a.x + row * a.stride, w.k);
        });
        member.barrier();
    }
    multiply(member, kernel, {a.x, a.stride, nullptr}, a.m, w, finish, target);
}
