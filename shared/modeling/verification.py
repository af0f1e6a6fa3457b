"""Where draft tokens are verified: on the host, which then knows at once, or on the device, which nobody waits for.

On a device a sequence's accepted drafts are counted where its tokens are, and its history there gets them and the token
behind them, so that the next step can read them before the host has heard of any.  The tokens are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.ops.noise import ACCEPT_STREAM, RECOVER_STREAM
from kernels.ops.transfer import to_device
from kernels.provider import SamplingKernels
from shared.modeling.drafts import Drafts, Flags
from shared.modeling.processing import SampleBatch
from shared.modeling.proposals import Proposals
from shared.modeling.sampler import Sampler
from shared.modeling.sampling_columns import Ints
from shared.modeling.target import Target, select_target

NOTHING = float("-inf")


class Verdict(msgspec.Struct, frozen=True):
    """What a step's positions took.  Behind the token that follows a sequence's accepted drafts all are void."""

    tokens: Tensor  # [num_positions] int64
    accepted: Tensor | None  # [num_seqs] drafts of each, on a device that has written the histories
    settled: Ints | None = None  # [num_seqs] of each where the host knows it, and the histories are still to be written


class Verification(Protocol):
    """`batch` is of the positions, each with the drafts before it in its history."""

    def settle(
        self,
        chosen: Tensor,  # [num_positions] int64: what each position takes
        batch: SampleBatch,
        drafts: Drafts,
    ) -> Verdict:
        """By equality."""
        ...

    def verify(
        self,
        logits: Tensor,  # [num_positions, vocab_size] float32, changed in place
        batch: SampleBatch,
        drafts: Drafts,
    ) -> Verdict:
        """As the drafts are to be accepted."""
        ...


class HostVerification:
    """Where the host has the tokens anyway."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def settle(self, chosen: Tensor, batch: SampleBatch, drafts: Drafts) -> Verdict:
        return _known(chosen, drafts.num_accepted(drafts.equal(chosen.cpu().numpy())))

    def verify(self, logits: Tensor, batch: SampleBatch, drafts: Drafts) -> Verdict:
        tokens, accepted = self._sampler.verify(logits, batch, drafts)
        return _known(torch.from_numpy(tokens), accepted)


def _known(tokens: Tensor, accepted: Ints) -> Verdict:
    return Verdict(tokens, None, accepted)


class DeviceVerification:
    """Where the device runs behind the host."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def settle(self, chosen: Tensor, batch: SampleBatch, drafts: Drafts) -> Verdict:
        histories = Histories.of(batch, drafts, chosen.device)
        return Verdict(chosen, self._count(chosen, histories.draft_ids, histories))

    def verify(self, logits: Tensor, batch: SampleBatch, drafts: Drafts) -> Verdict:
        sampler = self._sampler
        if drafts.proposals is None:
            return self.settle(sampler.sample(logits, batch), batch, drafts)
        sampler.process(logits, batch)
        chosen = sampler.kernels.argmax(logits)
        drawn = batch.columns.drawn(batch.rows)
        if not len(drawn):
            return self.settle(chosen, batch, drafts)
        test = DeviceRejection(sampler.kernels, drafts, drafts.proposals, drawn)
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


class DeviceRejection:
    """`shared.modeling.rejection` without looking: each sequence that samples draws once, behind its accepted drafts.

    The host knows which positions sample and what was proposed at each; only what is accepted it does not.
    """

    def __init__(self, kernels: SamplingKernels, drafts: Drafts, proposals: Proposals, drawn: Ints) -> None:
        """`drawn` [n] are the positions of sequences that sample, all of each."""
        self.sequences = np.flatnonzero(np.isin(drafts.starts, drawn))  # [m]
        self._kernels = kernels
        self._drafts = drafts
        self._proposals = proposals
        self._drawn = drawn

    def accept(
        self,
        target: Target,  # of the drawn positions
    ) -> tuple[Tensor, Tensor]:  # [n] their drafts, int64, and int32: the same or -1 where one is refused, or none
        device, kept = target.values.device, target.kept
        place = np.full(self._drafts.num_positions, -1)
        place[self._drafts.places] = np.arange(len(self._drafts.token_ids))
        draft = place[self._drawn]
        is_draft: Flags = draft >= 0
        draft_ids = to_device(np.where(is_draft, self._drafts.token_ids[draft], 0), device)
        proposed = to_device(np.where(is_draft, self._proposals.own[draft], 1.0), device)
        keys = target.keys(ACCEPT_STREAM)
        accepted = self._kernels.accepts(target.values, kept.cut, kept.last_tied, draft_ids, proposed, keys)
        agreed = torch.where(accepted & to_device(is_draft, device), draft_ids, -1)
        return draft_ids, agreed.int()

    def draw(
        self,
        target: Target,  # of the drawn positions
        accepted: Tensor,  # [num_seqs] int32
    ) -> Tensor:  # [m] int64
        device, kernels = target.values.device, self._kernels
        columns = (self.sequences, self._drawn.searchsorted(self._drafts.starts[self.sequences]), self._counts)
        which, firsts, counts = to_device(np.stack(columns), device)
        accepted = accepted[which].long()
        places = firsts + accepted
        values, cut, last_tied = target.values[places], target.kept.cut[places], target.kept.last_tied[places]
        plain, recovering = (_select(target.keys(stream), places) for stream in (0, RECOVER_STREAM))
        drawn = kernels.gumbel_argmax(values, cut, last_tied, plain)
        excess = kernels.log_residual(values, cut, last_tied, *self._entries(accepted))
        everything = torch.full_like(cut, NOTHING), torch.full_like(last_tied, excess.shape[1])
        recovered = kernels.gumbel_argmax(excess, *everything, recovering)
        # Rounding may leave nothing where p and q are the same: then p is as good as what is left of it.
        refused = (accepted < counts) & (excess > NOTHING).any(1)
        return torch.where(refused, recovered, drawn)

    @property
    def _counts(self) -> Ints:
        return self._drafts.counts[self.sequences]

    def _entries(
        self,
        accepted: Tensor,  # [m] int64
    ) -> tuple[Tensor, Tensor, Tensor]:  # as `kernels.ops.rejection.log_residual` takes them
        """Of the draft behind the accepted ones; those of all others belong to none."""
        drafts, proposals = self._drafts, self._proposals
        owner = np.full(len(drafts.counts), -1)
        owner[self.sequences] = np.arange(len(self.sequences))
        sequence = np.repeat(np.arange(len(drafts.counts)), drafts.counts)  # [num_drafts]
        within = drafts.places - drafts.starts[sequence]
        chosen = owner[sequence[proposals.owners]] >= 0
        entries = proposals.owners[chosen]
        columns = np.stack((owner[sequence[entries]], within[entries], proposals.token_ids[chosen]))
        owners, places, token_ids = to_device(columns, accepted.device)
        probs = to_device(proposals.probs[chosen], accepted.device)
        return torch.where(accepted[owners] == places, owners, -1), token_ids, probs


def _select(
    keys: tuple[Tensor, Tensor],  # each [n] int64
    places: Tensor,  # [m] int64
) -> tuple[Tensor, Tensor]:  # each [m] int64
    return keys[0][places], keys[1][places]
