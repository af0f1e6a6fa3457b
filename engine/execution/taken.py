"""What a step's rows took: tokens that stay on the device, and the host's copy of them, which is on its way.

Where a device verifies drafts the host does not know at launch how many tokens each row has; the outcome says it, and
is there when the step is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from torch import Tensor

from engine.execution.schedule import Schedule
from engine.modeling.batch import Ints
from engine.modeling.verification import Verdict
from kernels.ops.transfer import mark, to_host


@dataclass(frozen=True, slots=True)
class Lack:
    """Samples that a step does not give."""

    samples: Ints  # [n] indices of `Schedule.samples`
    refused: dict[int, str]  # entry of the plan -> why it will have none ever


class Outcome(msgspec.Struct, frozen=True):
    """Which of the positions' tokens come out."""

    counts: Ints  # [num_entries] tokens of each
    places: Ints  # [num_yielded] their positions
    accepted: Ints | None  # [num_samples]; None where the step has no drafts


class Taken:
    """One step's.  Whoever asks for the outcome waits for it, where it is not known yet."""

    def __init__(self, schedule: Schedule, lack: Lack | None, tokens: Tensor, verdict: Verdict | None) -> None:
        """`tokens` [num_positions] int64, on the device; without a verdict the step has no drafts."""
        self.tokens = tokens
        self._schedule = schedule
        self._lack = lack
        self._host_tokens = to_host(tokens)
        self._settled = None if verdict is None else verdict.settled
        self._accepted = None if verdict is None or verdict.accepted is None else to_host(verdict.accepted)
        self._mark = mark(tokens.device)
        self.is_known = self._accepted is None
        self._outcome: Outcome | None = None
        self._is_plain = verdict is None and lack is None

    def wait(self) -> None:
        """Until the step has ended, as far as these are concerned."""
        self._mark.wait()

    @property
    def outcome(self) -> Outcome:
        if self._outcome is None:
            self._outcome = self._settle()
        return self._outcome

    def _settle(self) -> Outcome:
        accepted = self._settled
        if self._accepted is not None:
            self.wait()
            accepted = self._accepted.numpy().astype(np.int64, copy=False)
        return _read(self._schedule, self._lack, accepted)

    @property
    def token_ids(self) -> list[int]:
        """All that come out, entry by entry."""
        self.wait()
        tokens = self._host_tokens
        found: list[int] = tokens.tolist() if self._is_plain else tokens.numpy()[self.outcome.places].tolist()
        return found

    @property
    def counts(self) -> list[int]:
        """Of each entry."""
        counts = self._schedule.num_positions if self._is_plain else self.outcome.counts
        found: list[int] = counts.tolist()
        return found

    def of(self, sample: int) -> list[int]:
        """Those of one of `Schedule.samples`."""
        self.wait()
        first, last = (int(self._ends[index]) for index in (sample, sample + 1))
        found: list[int] = self._host_tokens.numpy()[self.outcome.places[first:last]].tolist()
        return found

    @cached_property
    def _ends(self) -> Ints:  # [num_samples + 1]
        return np.cumsum(np.concatenate(([0], self.outcome.counts[self._schedule.samples])))


def _read(schedule: Schedule, lack: Lack | None, accepted: Ints | None) -> Outcome:
    counts, drafts = schedule.num_positions, schedule.drafts
    if drafts is None or accepted is None:
        places = np.arange(len(schedule.positions.rows))
    else:
        counts, places = counts.copy(), drafts.yielded(accepted)
        counts[schedule.samples] = accepted + 1
    if lack is None:
        return Outcome(counts, places, accepted)
    stays = np.ones(len(schedule.samples), np.bool_)
    stays[lack.samples] = False
    kept = np.repeat(stays, counts[schedule.samples])
    counts = counts.copy()
    counts[schedule.samples[lack.samples]] = 0
    return Outcome(counts, places[kept], accepted)
