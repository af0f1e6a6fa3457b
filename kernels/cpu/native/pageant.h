// The C interface of the native CPU kernels: what kernels/cpu/binding/native.py binds with ctypes.
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

#define PG_ABI 24
#define PG_DIGEST_WORDS 4  // kernels/ops/digest.py

// PG_I4 and PG_U4 are of weights alone: 4 bits, with scales of groups; PG_I4's are float16, and its zeros 8.
// PG_E4M3 and PG_E5M2 are of the KV pool: floats of 8 bits.  PG_E4M3, PG_E2M1 (floats of 4 bits), PG_W4 and PG_W8
// (integers) are of weights that are decoded while they are multiplied (coded.h); PG_F16 is of their scales alone.
enum PgFormat {
    PG_F32 = 0,
    PG_BF16 = 1,
    PG_I8 = 2,
    PG_I4 = 3,
    PG_U4 = 4,
    PG_E4M3 = 5,
    PG_E5M2 = 6,
    PG_E2M1 = 7,
    PG_W4 = 8,
    PG_W8 = 9,
    PG_F16 = 10
};

// How a weight that is decoded while it is multiplied is packed.
typedef struct {
    int32_t format;   // of its codes
    int32_t scales;   // PG_F32, PG_BF16 or PG_F16
    int32_t zeros;    // 1: of each group, of integers; 0: all in the middle
    int32_t decoded;  // PG_F32 or PG_BF16: what it is multiplied as; not looked at where it is packed
} PgCoding;

// y = x W^T + b, the weight packed by pg_pack_linear.
typedef struct {
    const void *packed;
    const float *bias;  // [n], or NULL
    int32_t n, k;       // out_features, in_features
    int32_t format;     // of the packed weight
    int32_t group;      // input features of a scale, of a weight of 4 bits or one that is decoded
    const int32_t *gather;  // [k]: column k is of input feature gather[k], of a weight of 4 bits; or NULL: of k
    PgCoding coding;        // of a weight that is decoded, whose codes' format `format` is too
} PgLinear;

enum PgNormKind { PG_RMS_NORM = 0, PG_LAYER_NORM = 1 };
typedef struct {
    const float *weight, *bias;  // of each feature; weight NULL: there is no norm; bias NULL: none
    int32_t kind;
} PgNorm;

// PG_CLAMPED_SWIGLU, for gated layers only: gate = min(gate, 7), up = clamp(up, -7, 7),
// gate * sigmoid(1.702 gate) * (up + 1).
enum PgActivation { PG_SILU = 0, PG_GELU_TANH = 1, PG_CLAMPED_SWIGLU = 2 };

// What a router's logits become.  Of these scores a token takes the top_k largest, ranked by score + correction with the
// lowest id first among equals; its weights are their scores, without the correction, times `scale`.
enum PgScore {
    PG_SOFTMAX = 0,            // over all experts
    PG_SOFTMAX_OF_CHOSEN = 1,  // the top_k of the logits, then the softmax over these
    PG_SIGMOID = 2,
};

// A mixture: a token's result is the sum of its experts' times their weights in order of rank, then the shared expert's;
// where tiles multiply bfloat16, in order of experts.
typedef struct {
    int32_t count, top_k, inner;  // experts, of which each token takes top_k, of `inner` features each
    int32_t score, renormalise;   // PgScore; 1: the chosen weights are divided by their sum
    int32_t groups, kept_groups;  // groups of neighbours, of which a token keeps some: those whose
    int32_t group_best;           // best, or two best, are largest together
    float scale;                  // of the weights
    const float *correction;      // [count], or NULL
    PgLinear router;              // [count, hidden], PG_F32 or PG_BF16
    PgLinear *gate_up, *down;     // [count] each, as PgLayer has them
    PgLinear shared_gate;  // [1, hidden]: its sigmoid scales the shared expert; packed NULL: not scaled
    uint64_t *holders;  // [count] a bit for each rank of the group that has the whole expert; of others, gate_up and down
                        // are not looked at.  NULL: each rank has a part of every expert
    int64_t *loads;     // [count] rows that went to each expert, added up; or NULL
} PgExperts;

// An expert that another rank gets whole, in the place of one that it has.  Both are packed alike.
typedef struct {
    int64_t expert, from;  // a rank that has it
    int64_t dropped, to;   // an expert that the rank `to` has and gives up
} PgExpertMove;

// Latent attention.  `qkv` gives what queries are made of, a latent of `rank` features and `rotated` features that turn
// with the position.  The cache holds the normed latent and the turned part as the key of the only KV head, and the
// latent is the value as well.  Queries are [num_heads, plain + rotated]: key_up makes of a head's plain part what
// meets latents, and value_up makes of its sum of latents the head's values.
typedef struct {
    int32_t rank, rotated, plain, value_dim;  // features, multiples of 16
    int32_t query_rank;                       // of what `query` makes queries of; 0: qkv gives them as they are
    float eps;                                // of query_norm [query_rank] and key_norm [rank]
    PgLinear query;                           // [num_heads * (plain + rotated), query_rank]
    const PgLinear *key_up, *value_up;        // [num_heads] of [rank, plain] and [value_dim, rank], PG_F32 or PG_BF16
} PgLatent;

// Linear attention in place of attention: a causal convolution of each channel, then the gated delta rule
// (kernels/ops/states/causal_conv.py, kernels/ops/states/delta_rule.py).  The layer's qkv gives queries, keys and values, which are
// convolved, and a gate of each value feature: output reads norm(result of each head) * silu(gate).  A sequence's state
// has the slot of its row; one whose step has `computed` 0 begins with zeros.
typedef struct {
    int32_t key_heads, value_heads, key_dim, value_dim;  // neighbouring value heads share a key head; dims in sixteens
    int32_t width;             // tokens that the convolution sees, its own included: 2 ... 4
    PgLinear gates;            // [2 value_heads, hidden]: what becomes beta, then what becomes the decay
    const float *taps;         // [width, channels]: 2 key_heads * key_dim + value_heads * value_dim; the last: its own
    const float *rate, *bias;  // [value_heads]: decay = exp(-rate * softplus(x + bias))
    PgNorm norm;               // [value_dim]
    float *inputs;             // [slots, width - 1, channels] of the convolution, the oldest first
    float *states;             // [slots, value_heads, value_dim / 16, key_dim, 16]
} PgDelta;

// h = input_norm(x); x += residual_scale * attention_norm(output(attention(qkv(h))))
// h = mlp_norm(x);   x += residual_scale * mlp_output_norm(down(activation(gate_up(h))))
typedef struct {
    PgNorm input_norm, attention_norm, mlp_norm, mlp_output_norm;  // [hidden]
    int32_t num_heads, num_kv_heads, head_dim;
    PgNorm query_norm, key_norm;  // [head_dim] of each head, or [heads * head_dim] of all together
    int32_t norm_whole;           // 1: of all heads together
    PgNorm value_norm;            // [head_dim] of each head's values
    PgLinear qkv, output;
    const PgLatent *latent;       // NULL: none; else num_kv_heads is 1, head_dim rank + rotated, and `keys` unused
    PgLinear gate_up, down;    // the MLP's, or the shared expert's; gate_up.packed NULL: there is none
    const PgExperts *experts;  // NULL: a plain MLP
    const float *cos, *sin;    // [max_positions, head_dim / 2]; NULL: no rotation
    const float *layer_scale;  // [1] of what leaves the layer, or NULL
    const float *sinks;        // [num_heads] logits, each one more term of its softmaxes' sums; or NULL
    float scale;               // of scores; 0: 1 / sqrt(head_dim)
    float softcap;             // scores become softcap * tanh(score / softcap); 0: they stay
    int32_t window;            // tokens that a query sees, itself included; 0: all
    int32_t inner;             // features of the MLP or the shared expert
    int32_t gated;             // 1: activation(gate) * up, gate_up packed by pg_pack_gate_up; 0: activation(gate_up)
    int32_t activation;        // PgActivation
    uint8_t *keys, *values;    // this layer's pool: blocks of pg_key_bytes and pg_value_bytes
    int64_t table;             // columns of the step's tables before those of this layer's blocks
    int32_t attention_gate;    // 1: qkv has a gate behind the values, [heads * head_dim], whose sigmoid scales what
                               // attention gives
    const PgDelta *delta;      // linear attention; NULL: attention
    const float *key_scales, *value_scales;  // [num_kv_heads] that a pool of 8-bit floats is divided by; NULL: 1
    int32_t first_attended;    // of a rank of a group: features of what attention gives before its own heads',
    int32_t first_inner;       // and of the MLP, or the shared expert, before its own,
    int32_t first_expert;      // and of each expert
} PgLayer;

// What an adapter adds to one of the projections that a linear joins: y += B (scale * A x).  In the order in which a step
// reads them, with zeros where k is no multiple of 32 and where the rank is odd:
//     A, for every 16 ranks (the last ones: fewer), which are R   [k / 32][R][32]
//     B in bfloat16   [n / pg_lora_width()][rank / 2][pg_lora_width()][2]
//       in float32    [n / pg_lora_width()][rank][pg_lora_width()]
typedef struct {
    const void *down;  // A
    const void *up;    // B, right behind it where that is to be fetched ahead
    int32_t rank, n;   // up to 256, 0: it adds nothing; output features, a multiple of 16
    float scale;
} PgLoraPart;

#define PG_LORA_PARTS 4  // queries, keys, values, and gates of attention

// To one linear, of which gate and up take turns.
typedef struct {
    PgLoraPart parts[PG_LORA_PARTS];
    int32_t num_parts;  // 0: it adds nothing
    int32_t format;     // of A and B: PG_F32 or PG_BF16
} PgLora;

// Why a group of ranks is there no more.
enum PgEnd { PG_ALIVE = 0, PG_LEFT = 1, PG_DISAGREED = 2, PG_NO_ROOM = 3, PG_RANK_DIED = 4, PG_RANK_SILENT = 5 };

// A rank's place in a group, which computes one model together (group.h).  Linears have the rank's outputs, attention its
// heads; `k` of output and down, `inner` of a layer, `hidden` and `vocab` of the model are of all ranks together.
typedef struct {
    void *memory;  // that all ranks share, or that this rank alone has; of pg_group_bytes, zero at first
    int64_t bytes;  // of it
    const int32_t *links;  // NULL: all ranks share the memory; or sockets: the leader's to ranks 1, 2, ...; another's to it
    int32_t rank, ranks;
    int32_t spins;            // rounds of waiting, of some 50 ns, before a rank sleeps
    int32_t attended, inner;  // features of all ranks, of the widest layer
    int32_t vocab;
    int32_t joins;  // 1: some layer has a norm behind its output or down
    int32_t sequence_parallel;  // 1: ranks divide the rows of norms before linears, and have all of them then
    int64_t expert_bytes;     // pg_expert_bytes
    int64_t slot_bytes;       // pg_slot_bytes, where ranks have whole experts; else 0
    int64_t max_tokens, max_seqs, max_rows, table_columns;  // of a step; rows of logits; of a step's tables
    uint64_t digest;  // of the orders so far, as this rank read them; at first of what the ranks have agreed on
} PgGroup;

typedef struct {
    int32_t num_layers, hidden, vocab;
    int32_t block_size;         // tokens
    int32_t kv_format;          // of the pool
    int32_t round_activations;  // 1: to bfloat16 before each linear (and bf16 dot products where the processor has them)
    int32_t max_positions;
    float eps;
    float embed_scale, residual_scale, logit_scale;  // of embeddings, of what a layer adds, of logits; 1: as they are
    float logit_softcap;       // logits become logit_softcap * tanh(logit / logit_softcap); 0: they stay
    PgNorm norm;               // the last one
    PgLinear head;             // [vocab, hidden]
    const void *embedding;     // [vocab, hidden] in rows, or NULL: read out of the head's packing
    int32_t embedding_format;  // PG_F32 or PG_BF16
    const float *positions;    // [max_positions, hidden], added to the embeddings; or NULL
    const PgLayer *layers;
    const PgLora *const *adapters;  // that are held, or NULL: each [num_layers, 4] of qkv, output, gate_up and down, and
                                    // behind these the head's, and the embedding's, whose A is [vocab][rank, even]
    int32_t round_attention;  // 1: queries and probabilities to bfloat16, where products of it read a pool of bfloat16
    PgGroup *group;             // NULL: this process computes the model alone
    int32_t first_hidden, first_vocab;  // of a rank: what output and down, and the head and the embedding, begin with
} PgModel;

// One step.  `rows` index the tables; a sequence's tokens are those at positions computed ... computed + scheduled - 1.
typedef struct {
    int64_t num_seqs;
    const int64_t *rows, *computed, *scheduled;  // [num_seqs]
    const int64_t *wanted;                       // [num_seqs] last tokens whose hidden states are returned
    const int64_t *tokens;                       // [rows, tokens_stride] token ids
    const int64_t *tables;                       // [rows, tables_stride] block ids: a table of each pool beside the other
    int64_t tokens_stride, tables_stride;
    const int64_t *adapters;  // [num_seqs] of the model's; -1: none; NULL: none anywhere
    const int64_t *listed;    // [sum of scheduled] token ids, in place of `tokens`; or NULL
    const float *inputs;      // [tokens, hidden] in the place of the embeddings; or NULL
    float *beside;            // [tokens, k], changed: what the first layer's qkv reads, in the place of its normed input
    const int32_t *captured;  // [num_captured] layers whose inputs are returned of every token, in rising order
    int64_t num_captured;
    float *captures;          // [tokens, num_captured * hidden]
} PgStep;

// A draft head.  Position i reads the embedding of token i + 1, and of token i what the model has captured, or what the
// head itself made of the position before.  Where a norm has no weight there is none.
typedef struct {
    const PgModel *layers;      // without embeddings and a last norm; its vocabulary is what is drafted from
    const void *embedding;      // [vocab, hidden] in rows
    int32_t embedding_format;   // PG_F32 or PG_BF16
    int32_t vocab;              // of the model
    const int64_t *ids;         // [vocabulary of drafts] of the model, or NULL: the same
    int32_t captured;           // features of a token
    int32_t captured_together;  // that are normed together
    PgNorm capture_norm, embedding_norm, hidden_norm, norm;  // the last one is before the vocabulary
    PgLinear fuse;              // [hidden, captured], or packed NULL: captured features are read as they are
    PgLinear combine;           // [hidden, 2 hidden], or packed NULL: the first layer's qkv reads both
    int32_t norms_residual;     // 1: what goes through the layers is behind hidden_norm
    int32_t feeds_normed;       // 1: the next position reads what is behind the last norm
    int32_t skips_first;        // 1: the embedding that position 0 reads is zero
} PgHead;

// How sequences take their tokens: the largest of logits / temperature + Gumbel noise that truncation leaves, or of the
// logits where the temperature is 0.
typedef struct {
    const float *temperature;     // [num_seqs], or NULL: 0
    const int64_t *seeds, *top_k;  // [num_seqs]; top_k NULL: nothing is truncated
    const double *depth, *top_p;  // [num_seqs] as of pg_truncation
} PgSampling;

// What is drafted behind a step of the head, whose `wanted` is 1 where a sequence gets drafts, else 0.
typedef struct {
    const float *captured;      // [tokens of the model's step, captured features]
    const int64_t *firsts;      // [num_seqs] rows there of the sequences' first tokens
    const int64_t *counts;      // [num_seqs] drafts
    PgSampling sampling;
} PgDrafting;

int32_t pg_abi(void);
const char *pg_target(void);             // the instruction sets compiled for, such as "avx512+vnni"
void pg_set_threads(int32_t count, int32_t pin);  // 1 ... 256; pin: one core each, of those that this process may use
// 0, or what is not served: see native.py.  Of the layers only numbers are looked at.
int32_t pg_supports(const PgModel *model);

// Packing.  Sources are in rows, PG_F32 or PG_BF16; PG_I8 quantises per output channel, PG_I4 in groups of input features
// (kernels/ops/linears/codes.py), of which k is a multiple of 16.  `group` means nothing to other formats.
typedef struct {
    const void *rows;  // [n, k], wherever they lie
    int64_t n;
    uint64_t *sums;  // as pg_digest has them, or NULL
} PgRows;
int64_t pg_packed_bytes(int64_t n, int64_t k, int32_t format, int32_t group);
// The parts one below the other; or by turns, gate and up of the same n, as [2 n, k].
void pg_pack_linear(const PgRows *parts, int32_t num_parts, int32_t by_turns, int32_t source_format, int64_t k,
                    int32_t format, int32_t group, void *packed);
// Of codes that are there, in PG_I4 or PG_U4; or in PG_I8, whose scales are of output channels and whose zeros are 128.
typedef struct {
    const uint8_t *codes;  // [n, k] 0 ... 15, or any octet
    const float *scales;   // [n, groups]; for PG_I4 numbers that float16 can hold
    const uint8_t *zeros;  // [n, groups], or NULL: 0; not looked at for PG_I8
    int64_t n;
} PgCodes;
void pg_pack_codes(const PgCodes *parts, int32_t num_parts, int32_t by_turns, int64_t k, int32_t format, int32_t group,
                   void *packed);
// The same of weights that are decoded while they are multiplied: groups of multiples of 8 features, or of 4 in 8 bits.
// Returns how many of the codes are no numbers (of PG_E4M3), which must not be multiplied.
int64_t pg_coded_bytes(int64_t n, int64_t k, int32_t group, const PgCoding *coding);
int64_t pg_pack_coded(const PgCodes *parts, int32_t num_parts, int32_t by_turns, int64_t k, int32_t group,
                      const PgCoding *coding, void *packed);
// A matrix [n, k] in the format that it has, or from PG_BF16 to PG_F32; `sums` of the source, or NULL.
void pg_copy(const void *source, int32_t source_format, int64_t n, int64_t k, int32_t format, void *target,
             uint64_t *sums);
int64_t pg_key_bytes(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim);
int64_t pg_value_bytes(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim);

// A whole step: embedding, layers, final norm.  hidden: [sum of wanted, hidden], in order of sequences and positions.
void pg_forward(const PgModel *model, const PgStep *step, float *hidden);
// logits [m, vocab] of hidden states; greedy ids [m] (the lowest among equals) without making the logits.
void pg_logits(const PgModel *model, const float *hidden, int64_t m, const int64_t *adapters, float *logits);
void pg_greedy(const PgModel *model, const float *hidden, int64_t m, const int64_t *adapters, int64_t *ids);
// `count` tokens for each sequence, one after the other, as many steps in one call: ids [count, num_seqs].  They are
// appended to the step's `tokens`.  The first step is the one given, its `wanted` all 1; its blocks cover what is to come.
// Of one step alone some may be 0, and ids are [sum of wanted].
void pg_extend(const PgModel *model, const PgStep *step, int64_t count, const PgSampling *sampling, int64_t *ids);
// The same of one step, by a thread of the library, which computes what is queued in
// order; nothing else may use the team meanwhile.  Returns a number to wait for.  What it points at must stay until then;
// `seconds` is how long it took.
int64_t pg_queue(const PgModel *model, const PgStep *step, const PgSampling *sampling, int64_t *ids, double *seconds);
// Waits until that one is computed, and all before it: 1; or until pg_call, in any thread, sets `*called`, which is cleared: 0.
int32_t pg_await(int64_t number, int32_t *called);  // called: or NULL
void pg_call(int32_t *called);
// Computes a step of the head, in which all tokens behind the step's are known, and goes on alone: drafts
// [sum of counts], those of a sequence behind each other.  Its tables cover what is drafted.
void pg_draft(const PgHead *head, const PgStep *step, const PgDrafting *asked, int64_t *drafts);

// Groups.  Rank 0 calls what is above as if it were alone; the others compute their parts of it in pg_follow, which returns
// why the group has ended.  Once it has, results mean nothing: a caller looks at the state after each call.  Groups do not
// know pg_extend; each rank's adapters have what is added to its own output features.
// Of what stands between experts' linears, and of what whole experts give, by the dimensions alone.
int64_t pg_expert_bytes(const PgModel *model);
int64_t pg_slot_bytes(const PgModel *model);
int64_t pg_group_bytes(const PgGroup *group, int64_t hidden);
int32_t pg_group_state(const PgGroup *group);  // PgEnd
void pg_group_end(const PgGroup *group, int32_t reason);  // the first reason stays
int32_t pg_follow(const PgModel *model);
float *pg_group_logits(const PgModel *model);  // [max_rows, vocab]: where pg_logits writes them without a copy
// Blocks of the pool that begins at column `pool` of the tables, as pairs [count, 2] of source and destination.
void pg_group_copy(const PgModel *model, int64_t pool, const int64_t *pairs, int64_t count);
// Moves of whole experts of one layer, all at once: what one rank gives up another one may get.
void pg_group_move(const PgModel *model, int64_t layer, const PgExpertMove *moves, int64_t count);
// What `rounds` gathers of `bytes` of each rank take here; called by all ranks, without a step.
void pg_gather(const PgGroup *group, int64_t hidden, const float *columns, int64_t bytes, int64_t rounds,
               int64_t *nanoseconds);

// Single ops, for tests and study: the same code that pg_forward runs.
void pg_linear(const PgLinear *weight, int32_t round_activations, const float *x, int64_t m, float *out);
void pg_norm(const PgNorm *norm, const float *x, float eps, int64_t m, int64_t hidden, float *out);
void pg_store_kv(int32_t format, int32_t block_size, int32_t num_kv_heads, int32_t head_dim, const float *key,
                 const float *value, const int64_t *slots, int64_t m, uint8_t *keys, uint8_t *values);
// query [tokens, num_heads, head_dim], the step's tokens in order; keys of its positions are stored already.
void pg_attention(const PgModel *model, const PgLayer *layer, const PgStep *step, const float *query, float *out);
// A layer's MLP or mixture: x [m, hidden] after mlp_norm, out [m, hidden] before mlp_output_norm.
void pg_feed_forward(const PgModel *model, const PgLayer *layer, const float *x, int64_t m, float *out);
// Both change their rows in place.  x [tokens, channels]; mixed [tokens, channels]: convolved queries, keys and values,
// of which the values become results; gates [tokens, 2 value_heads], as the linear of the gates gives them.
void pg_causal_conv(const PgDelta *delta, const PgStep *step, float *x);
void pg_delta_rule(const PgDelta *delta, const PgStep *step, float *mixed, float *gates);
// y [m, n] += what each row's adapter adds, its parts behind each other, NULL: nothing; rows of x are rounded to bfloat16
// first where `round` and the processor has such dot products.  pg_lora_width(): floats of a vector.
void pg_lora(const PgLora *const *adapters, const float *x, int64_t m, int64_t k, int64_t n, int32_t round, float *out);
int32_t pg_lora_width(void);
// One part from A [rank, features] and B [n, rank] of the format into what PgLoraPart says; down NULL: B alone.  It may be
// called beside a step.
void pg_pack_lora(const PgLoraPart *stored, int64_t features, int32_t format, void *down, void *up);
// Which experts each token takes, by rank: ids and weights [m, top_k].
void pg_route(const PgModel *model, const PgLayer *layer, const float *x, int64_t m, int64_t *ids, float *weights);

// What tells one content of n rows from another is added to sums [PG_DIGEST_WORDS], zero before.
void pg_digest(const void *rows, int64_t n, int64_t bytes, uint64_t *sums);
// Copies bytes; returns their CRC-32, or -1 where the processor lacks its instructions, and nothing is copied.  It may be
// called from any thread, beside a step, and places need no alignment.
int64_t pg_copy_checked(void *to, const void *from, int64_t bytes);

// Sampling over logits [m, vocab]: the best of value + Gumbel noise among the tokens above `cut`, and of those equal
// to it the ones with ids up to `last_tied` (kernels/ops/sampling/gumbel_argmax.py).
void pg_argmax(const float *logits, int64_t m, int64_t vocab, int64_t *ids);
void pg_gumbel_argmax(const float *values, int64_t m, int64_t vocab, const float *cut, const int64_t *last_tied,
                      const int64_t *first_keys, const int64_t *second_keys, int64_t *ids);
// That boundary, from log(min_p) or -inf, top_k or 0 and top_p or 1 of each row (kernels/ops/sampling/truncation.py).
void pg_truncation(const float *values, int64_t m, int64_t vocab, const double *depth, const int64_t *top_k,
                   const double *top_p, float *cut, int64_t *last_tied);

// Where time goes.  Cycles of the clock (TSC), of all members together, by phase; counted from pg_count(1) to pg_count(0).
enum PgPhase {
    PG_LINEARS = 0,     // their epilogues included
    PG_CONVERTING = 1,  // activations to what linears read
    PG_SCORES = 2,
    PG_SOFTENING = 3,  // softmax
    PG_MIXING = 4,
    PG_ATTENDING = 5,  // the rest of attention
    PG_NORMS = 6,
    PG_PLACING = 7,   // rotation, and storing of keys and values
    PG_WAITING = 8,   // at barriers
    PG_OTHER = 9,
    PG_ADAPTERS = 10,
    PG_PHASES = 11
};
void pg_count(int32_t counting);
void pg_counted(int64_t *cycles);  // [PG_PHASES]
// `rounds` of one instruction by every member, its operands in registers; returns the operations, 0: not on this processor.
enum PgPeak { PG_PEAK_F32 = 0, PG_PEAK_BF16 = 1, PG_PEAK_I8 = 2, PG_PEAK_TILES_BF16 = 3, PG_PEAK_TILES_I8 = 4 };
int64_t pg_peak(int32_t kind, int64_t rounds);
// Reads memory [bytes], whole pieces of 256 KiB, all members together; returns something of it.
int64_t pg_read(const void *memory, int64_t bytes);

#ifdef __cplusplus
}
#endif
