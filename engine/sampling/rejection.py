"""Verification by rejection sampling: the tokens are not those without drafts, but their distribution is.

The source is in `kernels.ops.sampling.rejection`.  A sequence that takes the most likely token accepts by equality.
Nothing is read from the device, which may run behind the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Ints
from engine.sampling.drafts import Drafts, Flags
from engine.sampling.proposals import Proposals
from engine.sampling.target import Target
from kernels.interface import SamplingKernels
from kernels.ops.sampling.noise import ACCEPT_STREAM, RECOVER_STREAM
from kernels.ops.steps.transfer import to_device

NOTHING = float("-inf")


class Rejection:
    """One step's.  Each sequence that samples draws once, behind its accepted drafts.

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
    ) -> tuple[Tensor, Tensor, Tensor]:  # as `kernels.ops.sampling.rejection.log_residual` takes them
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
