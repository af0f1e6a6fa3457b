"""Draft tokens are verified where the tokens are: on the device, without a wait of the host.

A sequence's accepted drafts are counted where its tokens are, and its history there gets them and the token
behind them, so that the next step can read them before the host has heard of any.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Ints
from engine.sampling.drafts import Drafts
from engine.sampling.processing import SampleBatch
from engine.sampling.rejection import Rejection
from engine.sampling.sampler import Sampler
from engine.sampling.target import select_target
from kernels.ops.steps.transfer import to_device


class Verdict(msgspec.Struct, frozen=True):
    """What a step's positions took.  Behind the token that follows a sequence's accepted drafts all are void."""

    tokens: Tensor  # [num_positions] int64
    accepted: Tensor  # [num_seqs] int32 drafts of each


class Verification:
    """Accepts or refuses the draft tokens of a step.

    A batch has one entry for each sampled position.  The token history of a position holds the drafts before it; the
    tokens that are taken are written to that history.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def settle(
        self,
        chosen: Tensor,  # [num_positions] int64: what each position takes
        batch: SampleBatch,
        drafts: Drafts,
    ) -> Verdict:
        """By equality."""
        histories = Histories.of(batch, drafts, chosen.device)
        return Verdict(chosen, self._count(chosen, histories.draft_ids, histories))

    def verify(
        self,
        logits: Tensor,  # [num_positions, vocab_size] float32, changed in place
        batch: SampleBatch,
        drafts: Drafts,
    ) -> Verdict:
        """As the drafts are to be accepted."""
        sampler = self._sampler
        if drafts.proposals is None:
            return self.settle(sampler.sample(logits, batch), batch, drafts)
        sampler.process(logits, batch)
        chosen = sampler.kernels.argmax(logits)
        drawn = batch.columns.drawn(batch.rows)
        if not len(drawn):
            return self.settle(chosen, batch, drafts)
        test = Rejection(sampler.kernels, drafts, drafts.proposals, drawn)
        where, target = select_target(logits, chosen, batch, drawn, sampler.kernels)
        histories = Histories.of(batch, drafts, logits.device)
        wanted = histories.draft_ids.clone()
        chosen[where], wanted[where] = test.accept(target)
        accepted = self._count(chosen, wanted, histories)
        self._finish(chosen, histories, accepted, test.draw(target, accepted), test.sequences)
        return Verdict(chosen, accepted)

    def _count(
        self,
        chosen: Tensor,  # [num_positions] int64
        draft_ids: Tensor,  # [num_positions] int32
        histories: Histories,
    ) -> Tensor:  # [num_seqs] int32; their histories have the drafts that were accepted, and what was taken next
        verify = self._sampler.kernels.verify_drafts
        return verify(chosen, draft_ids, histories.starts, histories.tokens, histories.rows, histories.lengths)

    @staticmethod
    def _finish(
        chosen: Tensor,  # [num_positions] int64, changed in place
        histories: Histories,
        accepted: Tensor,  # [num_seqs] int32
        drawn: Tensor,  # [n] int64: the tokens behind the accepted drafts
        sequences: Ints,  # [n] that they belong to
    ) -> None:
        which = to_device(sequences, chosen.device)
        ends = accepted[which]
        chosen[(histories.starts[which] + ends).long()] = drawn
        histories.tokens[histories.rows[which].long(), (histories.lengths[which] + ends).long()] = drawn


@dataclass(frozen=True, slots=True)
class Histories:
    """A step's drafts and the histories that they continue, on the device: one copy brings all columns."""

    tokens: Tensor  # [num_rows, longest] int64
    draft_ids: Tensor  # [num_positions] int32; -1 behind all of a sequence's
    starts: Tensor  # [num_seqs] int32: the first position of each
    rows: Tensor  # [num_seqs] int32
    lengths: Tensor  # [num_seqs] int32, without drafts

    @staticmethod
    def of(batch: SampleBatch, drafts: Drafts, device: torch.device) -> Histories:
        draft_ids = np.full(drafts.num_positions, -1)
        draft_ids[drafts.places] = drafts.token_ids
        columns = (draft_ids, drafts.starts, batch.rows[drafts.starts], batch.lengths[drafts.starts])
        packed = to_device(np.concatenate(columns).astype(np.int32), device)
        return Histories(batch.tokens, *torch.split(packed, [len(column) for column in columns]))
