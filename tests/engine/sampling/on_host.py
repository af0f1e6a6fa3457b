"""Verification as a host does it that looks at each result before it goes on: what `engine.sampling` is held against.

A sequence that takes the most likely token accepts by equality; one that samples and has no drafts draws as ever, and
so does the position behind drafts that were all accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Ints
from engine.sampling.drafts import Drafts, Flags
from engine.sampling.processing import SampleBatch
from engine.sampling.proposals import Proposals
from engine.sampling.sampler import Sampler
from engine.sampling.target import Target, select_target
from kernels.interface import SamplingKernels
from kernels.ops.sampling.noise import ACCEPT_STREAM, RECOVER_STREAM

NOTHING = float("-inf")


def verify_on_host(
    sampler: Sampler,
    logits: Tensor,  # [num_positions, vocab_size] float32, changed in place
    batch: SampleBatch,
    drafts: Drafts,
) -> tuple[Ints, Ints]:  # token ids [num_positions], and how many drafts of each sequence are accepted [num_seqs]
    """A sequence takes the tokens of its positions up to the one behind its accepted drafts; the rest is void."""
    if drafts.proposals is None:
        tokens = sampler.sample(logits, batch).numpy()
        return tokens, num_accepted(drafts, equal(drafts, tokens))
    sampler.process(logits, batch)
    return Rejection(sampler.kernels, batch, drafts, drafts.proposals).verify(logits, sampler.kernels.argmax(logits))


def equal(
    drafts: Drafts,
    chosen: Ints,  # [num_positions]
) -> Flags:  # [num_drafts]
    agreed: Flags = chosen[drafts.places] == drafts.token_ids
    return agreed


def num_accepted(
    drafts: Drafts,
    agreed: Flags,  # [num_drafts]
) -> Ints:  # [num_seqs] agreed tokens before the first that is not
    refused = np.ones(drafts.num_positions, np.bool_)  # the position behind all drafts ends every run
    refused[drafts.places] = ~agreed
    ends = refused.nonzero()[0]
    return ends[ends.searchsorted(drafts.starts)] - drafts.starts


@dataclass(frozen=True, slots=True)
class Rejection:
    """One step's.  "Tested" are the drafts, by index, of sequences that sample; only they have anything random."""

    kernels: SamplingKernels
    batch: SampleBatch
    drafts: Drafts
    proposals: Proposals

    def verify(
        self,
        logits: Tensor,  # [num_positions, vocab_size] float32, processed
        chosen: Tensor,  # [num_positions] int64: the most likely tokens, overwritten
    ) -> tuple[Ints, Ints]:  # as `verify_on_host`
        drafts, agreed = self.drafts, equal(self.drafts, chosen.numpy())
        behind, tested = self._those_that_draw()
        if len(behind):
            where, target = select_target(logits, chosen, self.batch, behind, self.kernels)
            chosen[where] = target.draw(self.kernels)
        if not len(tested):
            return chosen.numpy(), num_accepted(drafts, agreed)
        where, target = select_target(logits, chosen, self.batch, drafts.places[tested], self.kernels)
        agreed[tested] = self._test(target, tested)
        accepted = num_accepted(drafts, agreed)
        chosen[where] = torch.from_numpy(drafts.token_ids[tested]).to(chosen.device)
        refused = np.flatnonzero(np.isin(drafts.places[tested], drafts.starts + accepted))
        if len(refused):
            chosen[where[torch.from_numpy(refused)]] = self._recover(target.select(refused), tested[refused])
        return chosen.numpy(), accepted

    def _those_that_draw(self) -> tuple[Ints, Ints]:
        """Positions behind all drafts of their sequence [n], and tested drafts [m]."""
        draws = np.zeros(self.drafts.num_positions, np.bool_)
        draws[self.batch.columns.drawn(self.batch.rows)] = True
        tested = np.flatnonzero(draws[self.drafts.places])
        draws[self.drafts.places] = False
        return np.flatnonzero(draws), tested

    def _test(
        self,
        target: Target,  # of the tested drafts' positions
        tested: Ints,  # [n] drafts
    ) -> Flags:  # [n] accepted, if those before are
        device, kept = target.values.device, target.kept
        draft_ids, proposed = (
            torch.from_numpy(column[tested]).to(device) for column in (self.drafts.token_ids, self.proposals.own)
        )
        keys = target.keys(ACCEPT_STREAM)
        return self.kernels.accepts(target.values, kept.cut, kept.last_tied, draft_ids, proposed, keys).cpu().numpy()

    def _recover(
        self,
        target: Target,  # of the refused drafts' positions
        refused: Ints,  # [n] drafts
    ) -> Tensor:  # [n] int64
        device, kept, proposals = target.values.device, target.kept, self.proposals
        place = np.full(len(self.drafts.token_ids), -1)
        place[refused] = np.arange(len(refused))
        owners = place[proposals.owners]
        inside = owners >= 0
        columns = (owners[inside], proposals.token_ids[inside], proposals.probs[inside])
        entries = [torch.from_numpy(column).to(device) for column in columns]
        excess = self.kernels.log_residual(target.values, kept.cut, kept.last_tied, *entries)
        cut, last = torch.full_like(target.peak, NOTHING), torch.full_like(kept.last_tied, excess.shape[1])
        recovered = self.kernels.gumbel_argmax(excess, cut, last, target.keys(RECOVER_STREAM))
        left = (excess > NOTHING).any(1)
        # Rounding may leave nothing where p and q are the same: then p is as good as what is left of it.
        return recovered if bool(left.all()) else torch.where(left, recovered, target.draw(self.kernels))
