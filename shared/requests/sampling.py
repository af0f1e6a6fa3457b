"""Sampling parameters: what a client may ask for, and the one place where the ranges are enforced.

Ranges, defaults and wording follow the field's custom (vLLM's SamplingParams).  `check_sampling` is called
by the scheduler's admission, which every path into the system passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from shared.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from shared.requests.beam import Beam, check_beam, refuse_beside_beam
from shared.requests.grammar import Grammar, check_grammar
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.reasoning import ThinkingBudget

GREEDY_EPSILON = 1e-5
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 1e4  # of logits; divided by the smallest temperature it is still a number in float32
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters or tokens
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TAG_LENGTH = 64  # tokens of a tag of reasoning
MAX_COUNT = 2**31 - 1  # of tokens, however they are asked for
REPETITION = (1e-6, 1e6)  # beyond these a float32 logit is lost

T = TypeVar("T")


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """The sampling parameters of one request.

    None means "not given": the tokenizer service fills such fields from the model's generation defaults
    (`resolved`), so that past it only `seed`, `logprobs`, `prompt_logprobs` and `allowed_token_ids` can be None.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    speculate: bool = True  # False: without draft tokens, where a deployment has them
    grammar: Grammar | None = None  # that the output is held to
    beam: Beam | None = None  # a beam search instead of sampling
    pooling: Pooling | None = None  # an embedding of the prompt is wanted; it comes with one token, which is dropped
    thinking: ThinkingBudget | None = None  # how long the output may reason
    logprob_token_ids: list[int] = []  # tokens whose log-probabilities are told, in place of the `logprobs` likeliest

    @property
    def is_held(self) -> bool:
        """Whether what may come next depends on an automaton."""
        return self.grammar is not None or self.thinking is not None

    @property
    def greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_EPSILON

    def resolved(self, defaults: GenerationDefaults, *, max_tokens: int) -> SamplingParams:
        """This with every None that has a default filled: the request's, else the model's, else the field's."""
        if self.beam is not None:  # a model's defaults are about sampling
            defaults = GenerationDefaults(temperature=0.0)
        top_k = _first(self.top_k, defaults.top_k, 0)
        return msgspec.structs.replace(
            self,
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=0 if top_k == -1 else top_k,
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
        )


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What generation_config.json says of sampling; None where it is silent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: list[int] = []


class Limits(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a deployment accepts; the scheduler makes it from its configuration and the model."""

    vocab_size: int
    max_model_len: int
    max_input_length: int
    max_logprobs: int = 20
    max_n: int = 64
    max_num_blocks: int = 1 << 30
    block_size: int = 16
    classifies: bool | None = None  # whether the model gives scores to labels, and does not generate; None: not known


def check_sampling(params: SamplingParams, limits: Limits, num_prompt_tokens: int) -> None:
    """Raise RequestError, naming the field and the limit, unless `params` can be served."""
    _check_numbers(params)
    _check_lengths(params, limits, num_prompt_tokens)
    _check_stops(params)
    _check_tokens(params, limits.vocab_size)
    if params.grammar is not None:
        _check_grammar(params, params.grammar)
    if params.beam is not None:
        check_beam(params.beam, n=params.n, max_width=limits.max_n, vocab_size=limits.vocab_size)
        _check_beside_beam(params)
    _check_task(params, classifies=limits.classifies)
    if params.thinking is not None:
        _check_thinking(params, params.thinking, limits.vocab_size)
    held = (params.grammar, params.thinking)
    if params.pooling is not None and (params.n, params.max_tokens, params.beam, *held) != (1, 1, None, None, None):
        raise _bad("pooling", "needs n=1 and max_tokens=1, and neither beam search, a format nor a limit on reasoning")


def _check_numbers(p: SamplingParams) -> None:
    _in_range("temperature", p.temperature, 0, 2)
    _in_range("top_p", p.top_p, 0, 1, low_open=True)
    _in_range("min_p", p.min_p, 0, 1)
    _in_range("frequency_penalty", p.frequency_penalty, -2, 2)
    _in_range("presence_penalty", p.presence_penalty, -2, 2)
    _check_repetition(p.repetition_penalty)
    if p.top_k is not None and p.top_k < -1:
        raise _bad("top_k", f"must be 0 or -1 (disable), or at least 1, got {p.top_k}")
    for field, count in (("top_k", p.top_k), ("max_tokens", p.max_tokens), ("min_tokens", p.min_tokens)):
        if count is not None and count > MAX_COUNT:
            raise _bad(field, f"must be at most {MAX_COUNT}, got {count}")
    if p.seed is not None and not -(2**63) <= p.seed < 2**63:
        raise _bad("seed", f"must be a 64-bit integer, got {p.seed}")


def _check_repetition(penalty: float | None) -> None:
    if penalty is None:
        return
    if not (math.isfinite(penalty) and penalty > 0):
        raise _bad("repetition_penalty", f"must be a finite number greater than zero, got {penalty}")
    _in_range("repetition_penalty", penalty, *REPETITION)


def _check_lengths(p: SamplingParams, limits: Limits, num_prompt_tokens: int) -> None:
    if num_prompt_tokens < 1:
        raise _bad("prompt", "must contain at least one token, got 0")
    if num_prompt_tokens > limits.max_input_length:
        raise too_long("prompt", f"{num_prompt_tokens} tokens", f"max_input_length={limits.max_input_length}")
    if num_prompt_tokens >= limits.max_model_len:
        limit = f"max_model_len={limits.max_model_len} has no room to generate then"
        raise too_long("prompt", f"{num_prompt_tokens} tokens", limit)
    if p.n < 1:
        raise _bad("n", f"must be at least 1, got {p.n}")
    if p.n > limits.max_n:
        raise _bad("n", f"must be at most {limits.max_n}, got {p.n}")
    if p.greedy and p.n > 1 and p.beam is None:
        raise _bad("n", f"must be 1 when using greedy sampling, got {p.n}")
    if p.max_tokens is not None and p.max_tokens < 1:
        raise _bad("max_tokens", f"must be at least 1, got {p.max_tokens}")
    if p.min_tokens < 0:
        raise _bad("min_tokens", f"must be greater than or equal to 0, got {p.min_tokens}")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise _bad("min_tokens", f"must be less than or equal to max_tokens={p.max_tokens}, got {p.min_tokens}")
    _check_named_logprobs(p, limits.max_logprobs)
    for field, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if value is None:
            continue
        if value < -1:
            raise _bad(field, f"must be non-negative or -1, got {value}")
        wanted = limits.vocab_size if value == -1 else value
        if wanted > limits.max_logprobs:
            raise _bad(field, f"asks for {wanted} per token, more than max_logprobs={limits.max_logprobs}")
    reachable = min(limits.max_model_len, num_prompt_tokens + (p.max_tokens or limits.max_model_len))
    needed = -(-reachable // limits.block_size)
    if needed > limits.max_num_blocks:
        raise _bad(
            "max_tokens",
            f"prompt and output of up to {reachable} tokens need {needed} KV blocks, "
            f"more than the {limits.max_num_blocks} that a worker has",
        )


def _check_named_logprobs(p: SamplingParams, max_logprobs: int) -> None:
    count = len(p.logprob_token_ids)
    if count > max_logprobs:
        raise _bad("logprob_token_ids", f"has {count} entries, more than max_logprobs={max_logprobs}")
    if count and p.logprobs != count:  # one count of entries for each position, whichever they are
        raise _bad("logprob_token_ids", f"of {count} tokens need logprobs={count}, got {p.logprobs}")


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOP_STRINGS:
        raise _bad("stop", f"has {len(p.stop)} strings, more than {MAX_STOP_STRINGS}")
    if any(not stop for stop in p.stop):
        raise _bad("stop", "cannot contain an empty string")
    if any(len(stop) > MAX_STOP_LENGTH for stop in p.stop):
        raise _bad("stop", f"contains a string longer than {MAX_STOP_LENGTH} characters")
    if p.stop and not p.detokenize:
        raise _bad("stop", "strings are only supported when detokenize is true")


def _check_tokens(p: SamplingParams, vocab_size: int) -> None:
    if len(p.bad_words) + len(p.bad_words_token_ids) > 3 * MAX_BAD_WORDS or len(p.bad_words) > MAX_BAD_WORDS:
        raise _bad("bad_words", f"has more than {MAX_BAD_WORDS} entries")
    if any(not word for word in p.bad_words) or any(not ids for ids in p.bad_words_token_ids):
        raise _bad("bad_words", "cannot contain an empty entry")
    if any(len(word) > MAX_BAD_WORD_LENGTH for word in (*p.bad_words, *p.bad_words_token_ids)):
        raise _bad("bad_words", f"contains an entry longer than {MAX_BAD_WORD_LENGTH}")
    if len(p.logit_bias) > MAX_BIASED_TOKENS:
        raise _bad("logit_bias", f"has {len(p.logit_bias)} entries, more than {MAX_BIASED_TOKENS}")
    for token, bias in p.logit_bias.items():
        if not abs(bias) <= MAX_BIAS:  # and so no NaN either
            raise _bad("logit_bias", f"of token {token} must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {bias}")
    if len(p.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _bad("stop_token_ids", f"has {len(p.stop_token_ids)} entries, more than {MAX_STOP_TOKEN_IDS}")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise _bad("allowed_token_ids", "must not be empty where it is given")
    if len(p.allowed_token_ids or ()) > vocab_size:
        raise _bad("allowed_token_ids", f"has more entries than the vocabulary, whose size is {vocab_size}")
    check_token_ids("stop_token_ids", p.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", p.logit_bias, vocab_size)
    check_token_ids("allowed_token_ids", p.allowed_token_ids or (), vocab_size)
    check_token_ids("logprob_token_ids", p.logprob_token_ids, vocab_size)
    for ids in p.bad_words_token_ids:
        check_token_ids("bad_words", ids, vocab_size)


def _check_grammar(p: SamplingParams, grammar: Grammar) -> None:
    check_grammar(grammar)
    if p.allowed_token_ids is not None:
        raise _bad("allowed_token_ids", f"cannot be given with {grammar.field}")


def _check_task(p: SamplingParams, *, classifies: bool | None) -> None:
    wants_scores = p.pooling is not None and p.pooling.kind is PoolingKind.CLASSIFY
    if wants_scores and classifies is False:
        raise _bad("model", "has no head that gives scores to texts (an architecture ...ForSequenceClassification)")
    if p.pooling is None and classifies:
        raise _bad("model", "gives scores to texts and generates none; ask /classify, /score or /rerank")


def _check_thinking(p: SamplingParams, budget: ThinkingBudget, vocab_size: int) -> None:
    if not 0 <= budget.num_tokens <= MAX_COUNT:
        raise _bad(budget.field, f"must be from 0 to {MAX_COUNT}, or -1 for no limit, got {budget.num_tokens}")
    tags = (budget.tags.begin, *budget.tags.ends, budget.tags.forced)
    if len(tags) < 3 or not all(0 < len(tag) <= MAX_TAG_LENGTH for tag in tags):
        raise _bad(budget.field, "is not possible without the tokens that open and close reasoning")
    for tag in tags:
        check_token_ids(budget.field, tag, vocab_size)
    if p.allowed_token_ids is not None:
        raise _bad("allowed_token_ids", f"cannot be given with {budget.field}")


def _check_beside_beam(p: SamplingParams) -> None:
    """A beam search follows the likeliest; it neither samples nor bends what is likely, and ends by tokens only."""
    given = {
        "temperature": not (p.temperature is None or p.greedy),
        "top_k": p.top_k not in (None, 0, -1),
        "top_p": p.top_p not in (None, 1.0),
        "min_p": p.min_p not in (None, 0.0),
        "frequency_penalty": p.frequency_penalty != 0.0,
        "presence_penalty": p.presence_penalty != 0.0,
        "repetition_penalty": p.repetition_penalty not in (None, 1.0),
        "logit_bias": bool(p.logit_bias),
        "allowed_token_ids": p.allowed_token_ids is not None,
        "bad_words": bool(p.bad_words or p.bad_words_token_ids),
        "stop": bool(p.stop),
        "prompt_logprobs": p.prompt_logprobs is not None,
        "logprob_token_ids": bool(p.logprob_token_ids),
        p.grammar.field if p.grammar is not None else "grammar": p.grammar is not None,
        p.thinking.field if p.thinking is not None else "thinking": p.thinking is not None,
    }
    for field, is_given in given.items():
        if is_given:
            raise refuse_beside_beam(field)


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError unless every id is in [0, vocab_size)."""
    ids = token_ids if isinstance(token_ids, list) else list(token_ids)
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):  # in C, as long as prompts are
        return
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise _bad(field, f"contains token id {token_id}, which is out of vocabulary: it has {vocab_size} ids")


def _in_range(field: str, value: float | None, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    # A NaN fails both comparisons, so it is refused as any number outside the range.
    if not (low < value <= high if low_open else low <= value <= high):
        raise _bad(field, f"must be in {'(' if low_open else '['}{low}, {high}], got {value}")


def too_long(field: str, size: str, limit: str) -> RequestError:
    """A prompt of more tokens than may be.  Clients look for the words of OpenAI's and vLLM's servers: maximum context
    length."""
    message = f"{field} has {size}, more than the maximum context length allows: {limit}"
    return RequestError(message, field=field, reason=CONTEXT_LENGTH_EXCEEDED)


def _bad(field: str, message: str) -> RequestError:
    return RequestError(f"{field} {message}", field=field)


def _first(*values: T | None) -> T:
    """The first value that is given; the last one always is."""
    return next(value for value in values if value is not None)
