"""Verification by rejection sampling: the tokens are not those without drafts, but their distribution is.

The source is in `kernels.ops.rejection`.  A sequence that takes the most likely token accepts by equality; one that
samples and has no drafts draws as ever, and so does the position behind drafts that were all accepted.
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
from engine.sampling.target import Target, select_target
from kernels.interface import SamplingKernels
from kernels.ops.noise import ACCEPT_STREAM, RECOVER_STREAM

NOTHING = float("-inf")


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
    ) -> tuple[Ints, Ints]:  # as `engine.sampling.sampler.Sampler.verify`
        drafts, agreed = self.drafts, self.drafts.equal(chosen.cpu().numpy())
        behind, tested = self._those_that_draw()
        if len(behind):
            where, target = select_target(logits, chosen, self.batch, behind, self.kernels)
            chosen[where] = target.draw(self.kernels)
        if not len(tested):
            return chosen.cpu().numpy(), drafts.num_accepted(agreed)
        where, target = select_target(logits, chosen, self.batch, drafts.places[tested], self.kernels)
        agreed[tested] = self._test(target, tested)
        accepted = drafts.num_accepted(agreed)
        chosen[where] = torch.from_numpy(drafts.token_ids[tested]).to(chosen.device)
        refused = np.flatnonzero(np.isin(drafts.places[tested], drafts.starts + accepted))
        if len(refused):
            chosen[where[torch.from_numpy(refused)]] = self._recover(target.select(refused), tested[refused])
        return chosen.cpu().numpy(), accepted

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
