"""The sampling parameters of all rows, as columns, so that a step picks its rows' with one indexing each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.ops.sampling.sampled_columns import SampledColumns
from shared.requests.pooling import PoolingKind
from shared.requests.sampling import GREEDY_EPSILON, SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NO_LOGPROBS = -2  # in the logprobs columns; -1 means the whole vocabulary
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Constraints:
    """What few rows have: tokens that they may not take, and biases."""

    allowed: Ints | None  # [n]
    bad_words: tuple[tuple[int, ...], ...]
    word_tokens: NDArray[np.int32]  # [num_tokens] of the bad words, one after the other
    word_lens: Ints  # [num_words]
    ends: Ints  # [n] end-of-sequence and stop tokens
    min_length: int  # ends are masked while the sequence is shorter
    biased: Ints  # [n]
    biases: NDArray[np.float32]  # [n]


class SamplingColumns:
    """One entry per row, filled when a sequence is admitted."""

    def __init__(self, num_rows: int) -> None:
        self.num_prompt: Ints = np.zeros(num_rows, np.int64)
        self.seeds: Ints = np.zeros(num_rows, np.int64)
        self.temperature: Floats = np.ones(num_rows)
        self.top_k: Ints = np.zeros(num_rows, np.int64)  # 0: off
        self.top_p: Floats = np.ones(num_rows)
        self.min_p: Floats = np.zeros(num_rows)
        self.repetition: Floats = np.ones(num_rows)
        self.frequency: Floats = np.zeros(num_rows)
        self.presence: Floats = np.zeros(num_rows)
        self.logprobs: Ints = np.full(num_rows, NO_LOGPROBS)
        self.prompt_logprobs: Ints = np.full(num_rows, NO_LOGPROBS)
        self.named: list[Ints | None] = [None] * num_rows  # tokens that are scored in place of the most likely ones
        self.scores_prompt: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.constrained: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.has_grammar: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.pools: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # hidden states, for an embedding
        self.pools_all: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # those of every token
        self.constraints: list[Constraints | None] = [None] * num_rows
        self.plain: NDArray[np.bool_] = np.ones(num_rows, np.bool_)  # takes the most likely token of the raw logits
        self.altered: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # penalties and constraints change its logits
        self.bare: NDArray[np.bool_] = np.ones(num_rows, np.bool_)  # has nothing but a temperature and a seed
        self.raw: NDArray[np.bool_] = np.ones(num_rows, np.bool_)  # no host looks at its logits

    def fill(self, row: int, num_prompt: int, params: SamplingParams, seed: int, eos_token_ids: Sequence[int]) -> None:
        self.num_prompt[row] = num_prompt
        self.seeds[row] = (seed + 2**63) % 2**64 - 2**63
        self.temperature[row] = 1.0 if params.temperature is None else params.temperature
        self.top_k[row] = max(0, params.top_k or 0)
        self.top_p[row] = 1.0 if params.top_p is None else params.top_p
        self.min_p[row] = params.min_p or 0.0
        self.repetition[row] = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.named[row] = np.array(params.logprob_token_ids, np.int64) if params.logprob_token_ids else None
        self.scores_prompt[row] = params.prompt_logprobs is not None
        self.constraints[row] = read_constraints(num_prompt, params, eos_token_ids)
        self.constrained[row] = self.constraints[row] is not None
        self.has_grammar[row] = params.is_held
        self.pools[row] = params.pooling is not None
        self.pools_all[row] = params.pooling is not None and params.pooling.kind is PoolingKind.MEAN
        self.altered[row] = self._is_altered(row)
        self.raw[row] = not (self.altered[row] or self.logprobs[row] != NO_LOGPROBS)
        self.bare[row] = self._is_bare(row)
        self.plain[row] = self.bare[row] and self.temperature[row] < GREEDY_EPSILON

    def _is_altered(self, row: int) -> bool:
        penalised = self.repetition[row] != 1.0 or self.frequency[row] != 0.0 or self.presence[row] != 0.0
        return bool(penalised or self.constrained[row] or self.has_grammar[row])

    def _is_bare(self, row: int) -> bool:
        truncated = self.top_k[row] > 0 or self.top_p[row] < 1.0 or self.min_p[row] > 0.0
        truncates = truncated and self.temperature[row] >= GREEDY_EPSILON  # the most likely token is always kept
        return bool(self.raw[row] and not truncates)

    def of(self, row: int) -> Constraints:
        """Of a row that is `constrained`."""
        constraints = self.constraints[row]
        assert constraints is not None
        return constraints

    def drawn(self, rows: Ints) -> Ints:
        """Places in `rows` of those that sample; the others take the most likely token."""
        return np.flatnonzero(self.temperature[rows] >= GREEDY_EPSILON)

    def sampled(self, rows: Ints) -> SampledColumns:
        """How these rows draw, where their logits are raw."""
        temperature = self.temperature[rows].astype(np.float32)
        temperature[self.temperature[rows] < GREEDY_EPSILON] = 0.0
        with np.errstate(divide="ignore"):
            depth = np.log(self.min_p[rows])
        return SampledColumns(temperature, self.seeds[rows], self.top_k[rows], depth, self.top_p[rows])


def read_constraints(num_prompt: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> Constraints | None:
    """None where the request has none, as most."""
    if not (params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens or params.logit_bias):
        return None
    min_tokens = params.min_tokens if params.grammar is None else 0  # a grammar knows when it has to end
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    biases = [min(max(bias, -MAX_BIAS), MAX_BIAS) for bias in params.logit_bias.values()]
    return Constraints(
        allowed=np.array(params.allowed_token_ids, np.int64) if params.allowed_token_ids else None,
        bad_words=tuple(tuple(ids) for ids in params.bad_words_token_ids),
        word_tokens=np.array([token for ids in params.bad_words_token_ids for token in ids], np.int32),
        word_lens=np.array([len(ids) for ids in params.bad_words_token_ids], np.int64),
        ends=np.array(sorted(ends), np.int64),
        min_length=num_prompt + min_tokens,
        biased=np.array(list(params.logit_bias), np.int64),
        biases=np.array(biases, np.float32),
    )
