// The C interface of the native CPU kernels: what kernels/cpu/native.py binds with ctypes.
//
// Floats are float32 unless a format says otherwise; sizes are in elements; every pointer is aligned to 64 bytes unless
// it is a table of the step.  All functions share one team of threads and may be called from one thread at a time.
// A result for one row of tokens never depends on the other rows of the call: every sum has one order, fixed by
// positions and features alone.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PG_ABI 6
#define PG_DIGEST_WORDS 8  // kernels/ops/digest.py

enum PgFormat { PG_F32 = 0, PG_BF16 = 1, PG_I8 = 2 };

// y = x W^T + b, the weight packed by pg_pack_linear.
typedef struct {
    const void *packed;
    const float *bias;  // [n], or NULL
    int32_t n, k;       // out_features, in_features
    int32_t format;     // of the packed weight
} PgLinear;

typedef struct {
    const float *input_norm, *post_norm;  // [hidden]
    const float *query_norm, *key_norm;   // [head_dim], or NULL
    PgLinear qkv, output, gate_up, down;  // gate_up packed by pg_pack_gate_up
    uint8_t *keys, *values;               // this layer's pool: blocks of pg_key_bytes and pg_value_bytes
    int32_t window;                       // tokens that a query sees, itself included; 0: all
} PgLayer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, inner, vocab;
    int32_t block_size;         // tokens
    int32_t kv_format;          // of the pool
    int32_t round_activations;  // 1: to bfloat16 before each linear (and bf16 dot products where the processor has them)
    int32_t max_positions;
    float eps;
    const float *cos, *sin;  // [max_positions, head_dim / 2]
    const float *norm;       // [hidden]
    PgLinear head;           // [vocab, hidden]
    const void *embedding;   // [vocab, hidden] in rows, or NULL: read out of the head's packing
    int32_t embedding_format;  // PG_F32 or PG_BF16
    const PgLayer *layers;
} PgModel;

// One step.  `rows` index the tables; a sequence's tokens are those at positions computed ... computed + scheduled - 1.
typedef struct {
    int64_t num_seqs;
    const int64_t *rows, *computed, *scheduled;  // [num_seqs]
    const int64_t *wanted;                       // [num_seqs] last tokens whose hidden states are returned
    const int64_t *tokens;                       // [rows, tokens_stride] token ids
    const int64_t *tables;                       // [rows, tables_stride] block ids
    int64_t tokens_stride, tables_stride;
} PgStep;

int32_t pg_abi(void);
const char *pg_target(void);             // the instruction sets compiled for, such as "avx512+vnni"
void pg_set_threads(int32_t count, int32_t pin);  // 1 ... 256; pin: one core each, of those that this process may use
int32_t pg_supports(const PgModel *model);  // 0, or which dimension is not served: see native.py

// Packing.  Sources are in rows, PG_F32 or PG_BF16; PG_I8 quantises per output channel.
typedef struct {
    const void *rows;  // [n, k], wherever they lie
    int64_t n;
    uint64_t *sums;  // as pg_digest has them, or NULL
} PgRows;
int64_t pg_packed_bytes(int64_t n, int64_t k, int32_t format);
void pg_pack_linear(const PgRows *parts, int32_t num_parts, int32_t source_format, int64_t k, int32_t format,
                    void *packed);  // the parts one below the other
void pg_pack_gate_up(const PgRows *gate_and_up, int32_t source_format, int64_t k, int32_t format,
                     void *packed);  // two parts of the same n, as [2 n, k]
// A matrix [n, k] in the format that it has, or from PG_BF16 to PG_F32; `sums` of the source, or NULL.
void pg_copy(const void *source, int32_t source_format, int64_t n, int64_t k, int32_t format, void *target,
             uint64_t *sums);
int64_t pg_key_bytes(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim);
int64_t pg_value_bytes(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim);

// A whole step: embedding, layers, final norm.  hidden: [sum of wanted, hidden], in order of sequences and positions.
void pg_forward(const PgModel *model, const PgStep *step, float *hidden);
// logits [m, vocab] of hidden states; greedy ids [m] (the lowest among equals) without making the logits.
void pg_logits(const PgModel *model, const float *hidden, int64_t m, float *logits);
void pg_greedy(const PgModel *model, const float *hidden, int64_t m, int64_t *ids);
// `count` tokens for each sequence, one after the other, as many steps in one call: ids [count, num_seqs].  Each is the
// largest of logits / temperature + Gumbel noise, or of the logits where the temperature is 0, and is appended to the
// step's `tokens`.  The first step is the one given, its `wanted` all 1; its blocks cover what is to come.
void pg_extend(const PgModel *model, const PgStep *step, int64_t count, const float *temperature, const int64_t *seeds,
               int64_t *ids);

// Single ops, for tests and study: the same code that pg_forward runs.
void pg_linear(const PgLinear *weight, int32_t round_activations, const float *x, int64_t m, float *out);
void pg_rms_norm(const float *x, const float *weight, float eps, int64_t m, int64_t hidden, float *out);
void pg_store_kv(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim, const float *key,
                 const float *value, const int64_t *slots, int64_t m, uint8_t *keys, uint8_t *values);
// query [tokens, num_heads, head_dim], the step's tokens in order; keys of its positions are stored already.
void pg_attention(const PgModel *model, const PgLayer *layer, const PgStep *step, const float *query, float *out);

// What tells one content of n rows from another is added to sums [PG_DIGEST_WORDS], zero before.
void pg_digest(const void *rows, int64_t n, int64_t bytes, uint64_t *sums);

// Sampling over logits [m, vocab]: the best of value + Gumbel noise among the tokens above `cut`, and of those equal
// to it the ones with ids up to `last_tied` (kernels/ops/gumbel_argmax.py).
void pg_argmax(const float *logits, int64_t m, int64_t vocab, int64_t *ids);
void pg_gumbel_argmax(const float *values, int64_t m, int64_t vocab, const float *cut, const int64_t *last_tied,
                      const int64_t *first_keys, const int64_t *second_keys, int64_t *ids);
// That boundary, from log(min_p) or -inf, top_k or 0 and top_p or 1 of each row (kernels/ops/truncation.py).
void pg_truncation(const float *values, int64_t m, int64_t vocab, const double *depth, const int64_t *top_k,
                   const double *top_p, float *cut, int64_t *last_tied);

#ifdef __cplusplus
}
#endif
