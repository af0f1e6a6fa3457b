"""Picks one token per position: the most likely, or the best of processed logits / temperature + Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.noise import DRAFT_STREAM
from kernels.provider import SamplingKernels
from shared.messages.steps import DraftDistribution
from shared.modeling.processing import SampleBatch, process_logits
from shared.modeling.proposals import certain, pack_distributions
from shared.modeling.sampling_columns import Ints
from shared.modeling.target import Target, read_target
from shared.modeling.truncation import keep_most_likely

MAX_PROPOSED = 64  # tokens of a proposal's distribution: exact for any, and the rest has little mass


class Sampler:
    """A pure function of logits, parameters, seed, position."""

    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels

    def sample(
        self,
        logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
        batch: SampleBatch,
    ) -> Tensor:  # [num_sampled] int64
        process_logits(logits, batch)
        chosen = self._kernels.argmax(logits)
        places = batch.columns.drawn(batch.rows)
        if len(places) == len(chosen):
            return self._draw(read_target(logits, chosen, batch.columns, batch.rows, batch.lengths))
        if len(places):
            where, target = _target_of(logits, chosen, batch, places)
            chosen[where] = self._draw(target)
        return chosen

    def propose(
        self,
        logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
        batch: SampleBatch,
    ) -> tuple[Tensor, list[DraftDistribution]]:  # token ids [num_sampled] int64, and what each was drawn from
        """Draft tokens for rejection sampling: their noise is not that of the target's own tokens.

        The distribution is cut to MAX_PROPOSED tokens, of which the draft is then drawn: what is exact for every
        proposal is so for this one.
        """
        process_logits(logits, batch)
        chosen = self._kernels.argmax(logits)
        places = batch.columns.drawn(batch.rows)
        if not len(places):
            return chosen, [certain(token) for token in chosen.tolist()]
        where, target = _target_of(logits, chosen, batch, places)
        keep_most_likely(target.kept, target.values, MAX_PROPOSED)
        drawn = self._draw(target, DRAFT_STREAM)
        chosen[where] = drawn
        found = [certain(token) for token in chosen.tolist()]
        for place, distribution in zip(places, pack_distributions(target, drawn), strict=True):
            found[place] = distribution
        return chosen, found

    def _draw(self, target: Target, stream: int = 0) -> Tensor:  # [n] int64
        kept = target.kept
        return self._kernels.gumbel_argmax(target.values, kept.cut, kept.last_tied, target.keys(stream))


def _target_of(
    logits: Tensor,  # [num_sampled, vocab_size]
    likeliest: Tensor,  # [num_sampled] int64
    batch: SampleBatch,
    places: Ints,  # [n] of positions that sample
) -> tuple[Tensor, Target]:  # the places on the device [n] int64, and a target that holds copies
    where = torch.from_numpy(places).to(logits.device)
    rows, lengths = batch.rows[places], batch.lengths[places]
    return where, read_target(logits[where], likeliest[where], batch.columns, rows, lengths)
