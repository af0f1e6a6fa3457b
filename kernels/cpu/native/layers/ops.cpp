#include "layers/ops.h"

#include <stdlib.h>
#include <sys/mman.h>

constexpr int64_t HUGE_PAGE = 2 << 20;

Buffer::~Buffer() { free(data_); }

void *Buffer::bytes(int64_t size) {
    if (size > size_) {
        free(data_);
        const int64_t unit = size < 2 * HUGE_PAGE ? 4096 : HUGE_PAGE;  // rows of a large one lie on a page each
        const int64_t rounded = (size + size / 4 + unit - 1) / unit * unit;
        data_ = aligned_alloc(unit, rounded);
        if (!data_) abort();
        if (unit == HUGE_PAGE) madvise(data_, rounded, MADV_HUGEPAGE);  // a wish
        size_ = rounded;
    }
    return data_;
}

namespace {

void rms_norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    F squares[2] = {};
    for (int64_t i = 0; i < n; i += W) {
        const F v = load<F>(x + i);
        squares[i / W % 2] = fma(v, v, squares[i / W % 2]);
    }
    const float mean = reduce_add(squares[0] + squares[1]) / (float)n;
    const float scale = 1.0f / __builtin_sqrtf(mean + eps);
    for (int64_t i = 0; i < n; i += W) store(out + i, load<F>(x + i) * scale * load<F>(weight + i));
}

// The variance is of what is left without the mean: no digits are lost where the mean is large.
void layer_norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    F sums[2] = {}, squares[2] = {};
    for (int64_t i = 0; i < n; i += W) sums[i / W % 2] = sums[i / W % 2] + load<F>(x + i);
    const float mean = reduce_add(sums[0] + sums[1]) / (float)n;
    for (int64_t i = 0; i < n; i += W) {
        const F v = load<F>(x + i) - mean;
        squares[i / W % 2] = fma(v, v, squares[i / W % 2]);
    }
    const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares[0] + squares[1]) / (float)n + eps);
    for (int64_t i = 0; i < n; i += W) store(out + i, (load<F>(x + i) - mean) * scale * load<F>(weight + i));
}

}  // namespace

void norm_row(const PgNorm &norm, const float *x, float eps, int64_t n, float *out) {
    if (norm.kind == PG_RMS_NORM)
        rms_norm_row(x, norm.weight, eps, n, out);
    else
        layer_norm_row(x, norm.weight, eps, n, out);
    for (int64_t i = 0; norm.bias && i < n; i += W) store(out + i, load<F>(out + i) + load<F>(norm.bias + i));
}

void round_row(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += W) store(x + i, round_bf16(load<F>(x + i)));
}

void to_bf16_row(const float *x, int64_t n, uint16_t *out, int64_t gap) {
    const int64_t skip = gap / 2 - 32;
    for (int64_t i = 0; i < n; i += W) store_bf16(out + i + i / 32 * skip, load<F>(x + i));
}

float quantize_row(const float *x, int64_t n, uint8_t *out, int64_t gap) {
    F largest{};
    for (int64_t i = 0; i < n; i += W) largest = max(largest, abs(load<F>(x + i)));
    const float peak = reduce_max(largest), factor = peak > 0 ? 127.0f / peak : 0.0f;
    for (int64_t i = 0; i < n; i += W) {
        const I q = __builtin_convertvector(round_even(load<F>(x + i) * factor), I) + 128;
        store(out + i + i / 64 * (gap - 64), __builtin_convertvector(q, I8));
    }
    return peak / 127.0f;
}

void rotate_head(float *x, const float *cos, const float *sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    if (half % W) {
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += W) {
        const F a = load<F>(x + i), b = load<F>(x + i + half), c = load<F>(cos + i), s = load<F>(sin + i);
        store(x + i, a * c - b * s);
        store(x + i + half, b * c + a * s);
    }
}
