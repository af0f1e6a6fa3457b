"""The tokens that a step samples: they stay on the device, and a copy of them is on its way to the host.

Where drafts are verified, the host does not know at launch how many tokens each row yields.
`SampledTokens.yielded` holds it once the step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.execution.schedule import Schedule
from engine.modeling.batch import Ints
from engine.sampling.verification import Verdict
from kernels.ops.steps.transfer import Mark, mark, to_device, to_host


@dataclass(frozen=True, slots=True)
class MissingSamples:
    """The samples that a step does not yield, because no token is allowed or the grammar is not ready."""

    samples: Ints  # [n] indices of `Schedule.samples`
    refused: dict[int, str]  # entry of the plan -> why it will never have one


class YieldedTokens(msgspec.Struct, frozen=True):
    """Which of the positions' tokens the step yields: drafts that were refused yield none."""

    counts: Ints  # [num_entries] tokens of each
    places: Ints  # [num_yielded] their positions
    accepted: Ints | None  # [num_samples]; None where the step has no drafts


class SampledTokens:
    """The sampled tokens of one step.  To read `yielded` waits for the step's end where it is not known before."""

    def __init__(
        self,
        schedule: Schedule,
        missing: MissingSamples | None,
        tokens: Tensor,
        verdict: Verdict | None,
        end: Mark | None = None,
    ) -> None:
        """`tokens` [num_positions] int64, on the device; without a verdict the step has no drafts.  `end`: of a step
        that is queued."""
        self.tokens = tokens
        self._schedule = schedule
        self._missing = missing
        self._host_tokens = to_host(tokens)
        self._accepted = None if verdict is None else to_host(verdict.accepted)
        self._mark = mark(tokens.device) if end is None else end
        self.is_known = verdict is None or tokens.device.type == "cpu"
        self._yielded: YieldedTokens | None = None
        self._is_plain = verdict is None and missing is None

    def wait(self) -> None:
        """Wait until the step has sampled its tokens."""
        self._mark.wait()

    @property
    def yielded(self) -> YieldedTokens:
        if self._yielded is None:
            self._yielded = self._settle()
        return self._yielded

    def _settle(self) -> YieldedTokens:
        accepted = None
        if self._accepted is not None:
            self.wait()
            accepted = self._accepted.numpy().astype(np.int64, copy=False)
        return _read(self._schedule, self._missing, accepted)

    @property
    def token_ids(self) -> list[int]:
        """All yielded tokens, entry by entry."""
        self.wait()
        tokens = self._host_tokens
        found: list[int] = tokens.tolist() if self._is_plain else tokens.numpy()[self.yielded.places].tolist()
        return found

    @property
    def counts(self) -> list[int]:
        """The number of yielded tokens of each entry."""
        counts = self._schedule.num_positions if self._is_plain else self.yielded.counts
        found: list[int] = counts.tolist()
        return found

    def of(self, sample: int) -> list[int]:
        """The yielded tokens of one of `Schedule.samples`."""
        self.wait()
        first, last = (int(self._ends[index]) for index in (sample, sample + 1))
        found: list[int] = self._host_tokens.numpy()[self.yielded.places[first:last]].tolist()
        return found

    @cached_property
    def _ends(self) -> Ints:  # [num_samples + 1]
        return np.cumsum(np.concatenate(([0], self.yielded.counts[self._schedule.samples])))


def _read(schedule: Schedule, missing: MissingSamples | None, accepted: Ints | None) -> YieldedTokens:
    counts, drafts = schedule.num_positions, schedule.drafts
    if drafts is None or accepted is None:
        places = np.arange(len(schedule.positions.rows))
    else:
        counts, places = counts.copy(), drafts.yielded(accepted)
        counts[schedule.samples] = accepted + 1
    if missing is None:
        return YieldedTokens(counts, places, accepted)
    stays = np.ones(len(schedule.samples), np.bool_)
    stays[missing.samples] = False
    kept = np.repeat(stays, counts[schedule.samples])
    counts = counts.copy()
    counts[schedule.samples[missing.samples]] = 0
    return YieldedTokens(counts, places[kept], accepted)


def pick(
    tokens: Tensor,  # [num_positions] int64
    positions: Ints,  # [n]
) -> Tensor:  # [n] int64
    if tokens.device.type == "cpu":
        return torch.from_numpy(tokens.numpy()[positions])
    return tokens[to_device(positions, tokens.device)]
