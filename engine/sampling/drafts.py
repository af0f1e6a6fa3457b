"""The draft tokens of one step, and how many of them each sequence keeps."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.sampling.columns import Ints
from engine.sampling.proposals import Proposals

Flags = NDArray[np.bool_]


class Drafts(msgspec.Struct, frozen=True):
    """A sequence with k draft tokens has k + 1 sampled positions: one for each of them, and one for what follows all.

    Position i means something only where the drafts before it were accepted: it was computed behind them.
    """

    counts: Ints  # [num_seqs] draft tokens of each sequence that samples
    token_ids: Ints  # [num_drafts] concatenated
    starts: Ints  # [num_seqs] the first position of each
    places: Ints  # [num_drafts] the position that verifies each
    proposals: Proposals | None  # what the tokens were drawn from: accept by rejection sampling; None: by equality

    @property
    def num_positions(self) -> int:
        return len(self.counts) + len(self.token_ids)

    def yielded(
        self,
        accepted: Ints,  # [num_seqs]
    ) -> Ints:  # places of the positions whose tokens come out: of the accepted drafts, and one more each
        lengths = accepted + 1
        firsts = np.repeat(self.starts - (np.cumsum(lengths) - lengths), lengths)
        return firsts + np.arange(len(firsts))


def lay_out(counts: Ints, token_ids: Ints, proposals: Proposals | None) -> Drafts:
    lengths = counts + 1
    starts = lengths.cumsum() - lengths
    places = np.arange(len(token_ids)) + np.arange(len(counts)).repeat(counts)
    return Drafts(counts, token_ids, starts, places, proposals)
