"""From raw to processed logits: constraints, then penalties.  Rows without a feature are not touched by it.

Order: what grammars allow, allowed tokens, bad words, ends before min_tokens, logit bias; then repetition over prompt
and output, frequency and presence over the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.columns import Constraints, Floats, Ints, SamplingColumns
from kernels.interface import ForbidWords, Penalise
from kernels.ops.sampling.bad_words import PAIR_FIELDS
from kernels.ops.steps.transfer import to_device

MASKED = float("-inf")
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The rows that take a token in this step."""

    rows: Ints  # [num_sampled]
    lengths: Ints  # [num_sampled] tokens of each history: the position of the token to be sampled
    tokens: Tensor  # [all rows, max_model_len + 1] int64 histories
    columns: SamplingColumns
    allowance: Allowance | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the grammars of some positions allow."""

    places: Ints  # [n] among the sampled, ascending
    allowed: Flags  # [n, vocab_size]


def process_logits(
    logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
    batch: SampleBatch,
    penalise: Penalise | None = None,  # a kernel for all penalties, where there is one
    forbid_words: ForbidWords | None = None,  # and one for bad words
) -> None:
    columns, rows = batch.columns, batch.rows
    if batch.allowance is not None:
        _hold_to(logits, batch.allowance)
    constrained = np.flatnonzero(columns.constrained[rows])
    if len(constrained):
        _constrain_rows(logits, batch, constrained.tolist(), forbid_words)
    if penalise is not None:
        _penalise_by(penalise, logits, batch)
    else:
        _penalise(logits, batch)


def _hold_to(
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    allowance: Allowance,
) -> None:
    forbidden = to_device(~allowance.allowed, logits.device)
    if len(forbidden) == len(logits):
        logits.masked_fill_(forbidden, MASKED)
        return
    for place, row in zip(allowance.places.tolist(), forbidden, strict=True):  # in place: rows may be long
        logits[place].masked_fill_(row, MASKED)


def _penalise(
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    batch: SampleBatch,
) -> None:
    columns, rows = batch.columns, batch.rows
    places = np.flatnonzero(columns.repetition[rows] != 1.0)
    if len(places):
        _penalise_repetition(logits, batch, places)
    places = np.flatnonzero((columns.frequency[rows] != 0.0) | (columns.presence[rows] != 0.0))
    if len(places):
        _penalise_counts(logits, batch, places)


def _penalise_by(
    penalise: Penalise,
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    batch: SampleBatch,
) -> None:
    columns, rows, device = batch.columns, batch.rows, logits.device
    factors = [column[rows] for column in (columns.repetition, columns.frequency, columns.presence)]
    if not ((factors[0] != 1.0) | (factors[1] != 0.0) | (factors[2] != 0.0)).any():
        return
    where, lengths, prompts = (to_device(column, device) for column in (rows, batch.lengths, columns.num_prompt[rows]))
    repetition, frequency, presence = (to_device(factor, device).to(logits.dtype) for factor in factors)
    penalise(logits, batch.tokens, where, lengths, prompts, (repetition, frequency, presence))


def _constrain_rows(
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    batch: SampleBatch,
    places: list[int],  # of rows with constraints
    forbid_words: ForbidWords | None,
) -> None:
    columns, rows = batch.columns, batch.rows
    held = {place: logits[place].clone() for place in places if columns.has_grammar[rows[place]]}
    constrained = [(place, columns.of(int(rows[place]))) for place in places]
    if forbid_words is not None:
        _forbid_words_by(forbid_words, logits, batch, constrained)
    for place, constraints in constrained:
        length = int(batch.lengths[place])
        if constraints.bad_words and forbid_words is None:
            logits[place, _bad_tokens(constraints.bad_words, batch.tokens[rows[place], :length])] = MASKED
        _constrain(logits[place], constraints, length)
    for place, before in held.items():  # what the grammar demands goes before all other wishes
        logits[place] = torch.where((logits[place] == MASKED).all(), before, logits[place])


def _constrain(
    logits: Tensor,  # [vocab_size], changed in place
    constraints: Constraints,
    length: int,  # of the history
) -> None:
    device = logits.device
    if constraints.allowed is not None:
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        logits.masked_fill_(forbidden.index_fill_(0, to_device(constraints.allowed, device), False), MASKED)
    if length < constraints.min_length:
        logits.index_fill_(0, to_device(constraints.ends, device), MASKED)
    if len(constraints.biased):
        logits.index_add_(0, to_device(constraints.biased, device), to_device(constraints.biases, device))


def _bad_tokens(
    bad_words: tuple[tuple[int, ...], ...],
    history: Tensor,  # [length] int64
) -> list[int]:
    """Tokens that would complete a bad word."""
    longest = max(len(word) for word in bad_words) - 1
    tail = tuple(history[-longest:].tolist()) if longest else ()
    return [word[-1] for word in bad_words if len(word) == 1 or tail[-(len(word) - 1) :] == word[:-1]]


def _forbid_words_by(
    forbid_words: ForbidWords,
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    batch: SampleBatch,
    constrained: list[tuple[int, Constraints]],  # place among the sampled, and what its row has
) -> None:
    """The words of all rows in one copy, and one launch."""
    concerned = [(place, constraints) for place, constraints in constrained if constraints.bad_words]
    if not concerned:
        return
    places = np.repeat([place for place, _ in concerned], [len(one.word_lens) for _, one in concerned])
    counts = np.concatenate([one.word_lens for _, one in concerned])
    words = np.concatenate([one.word_tokens for _, one in concerned])
    pairs = np.stack((places, batch.rows[places], batch.lengths[places], np.cumsum(counts) - counts, counts), axis=1)
    packed = to_device(np.concatenate((pairs.ravel().astype(np.int32), words)), logits.device)
    table, flat = torch.split(packed, [pairs.size, len(words)])
    forbid_words(logits, batch.tokens, flat, table.view(-1, PAIR_FIELDS))


def _penalise_repetition(
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    batch: SampleBatch,
    places: Ints,  # [n]
) -> None:
    """l / r where l > 0, else l * r, for every token of the history; a token met twice is penalised once."""
    seen = _history(batch, places, np.zeros_like(places))[0]
    where = to_device(places, logits.device)[:, None]
    penalty = _column(batch.columns.repetition, batch.rows[places], logits)
    values = logits[where, seen]
    logits[where, seen] = torch.where(values > 0, values / penalty, values * penalty)  # equal where written twice


def _penalise_counts(
    logits: Tensor,  # [num_sampled, vocab_size], changed in place
    batch: SampleBatch,
    places: Ints,  # [n]
) -> None:
    """l - frequency * count - presence * [count > 0], over the output so far."""
    rows = batch.rows[places]
    output, real = _history(batch, places, batch.columns.num_prompt[rows])
    where = to_device(places, logits.device)[:, None]
    table = logits.new_zeros(len(places), logits.shape[1]).scatter_add_(1, output, real.float())
    counts = table.gather(1, output)
    frequency, presence = (
        _column(column, rows, logits) for column in (batch.columns.frequency, batch.columns.presence)
    )
    logits[where, output] = logits[where, output] - frequency * counts - presence * (counts > 0)


def _history(batch: SampleBatch, places: Ints, begins: Ints) -> tuple[Tensor, Tensor]:
    """Tokens from `begins` to the end, [n, longest], and which are real; the rest repeat the row's first token."""
    rows, lengths = batch.rows[places], batch.lengths[places]
    offsets = begins[:, None] + np.arange(max(1, int((lengths - begins).max())))
    real = offsets < lengths[:, None]
    columns = to_device(np.where(real, offsets, 0), batch.tokens.device)
    tokens = batch.tokens[to_device(rows, columns.device)[:, None], columns]
    return tokens, to_device(real, tokens.device)


def _column(
    values: Floats,  # [all rows]
    rows: Ints,  # [n]
    like: Tensor,
) -> Tensor:  # [n, 1] of the dtype and device of `like`
    return to_device(values[rows], like.device).to(like.dtype)[:, None]
