"""Picks one token per position: the most likely, or the best of processed logits / temperature + Gumbel noise."""

from __future__ import annotations

from torch import Tensor

from engine.sampling.processing import SampleBatch, process_logits
from engine.sampling.proposals import certain, pack_distributions
from engine.sampling.target import read_target, select_target
from engine.sampling.truncation import keep_most_likely
from kernels.interface import SamplingKernels
from kernels.ops.sampling.noise import DRAFT_STREAM
from shared.messages.steps import DraftDistribution

MAX_PROPOSED = 64  # tokens of a proposal's distribution: exact for any, and the rest has little mass


class Sampler:
    """A pure function of logits, parameters, seed, position."""

    def __init__(self, kernels: SamplingKernels) -> None:
        self.kernels = kernels

    def process(
        self,
        logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
        batch: SampleBatch,
    ) -> None:
        process_logits(logits, batch, self.kernels.penalise, self.kernels.forbid_words)

    def sample(
        self,
        logits: Tensor,  # [num_sampled, vocab_size] float32, changed in place
        batch: SampleBatch,
    ) -> Tensor:  # [num_sampled] int64
        self.process(logits, batch)
        chosen = self.kernels.argmax(logits)
        places = batch.columns.drawn(batch.rows)
        if len(places) == len(chosen):
            return read_target(logits, chosen, batch, self.kernels).draw(self.kernels)
        if len(places):
            where, target = select_target(logits, chosen, batch, places, self.kernels)
            chosen[where] = target.draw(self.kernels)
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
        self.process(logits, batch)
        chosen = self.kernels.argmax(logits)
        places = batch.columns.drawn(batch.rows)
        if not len(places):
            return chosen, [certain(token) for token in chosen.tolist()]
        where, target = select_target(logits, chosen, batch, places, self.kernels)
        keep_most_likely(target.kept, target.values, MAX_PROPOSED)
        drawn = target.draw(self.kernels, DRAFT_STREAM)
        chosen[where] = drawn
        found = [certain(token) for token in chosen.tolist()]
        for place, distribution in zip(places, pack_distributions(target, drawn), strict=True):
            found[place] = distribution
        return chosen, found
