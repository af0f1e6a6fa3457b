"""Arms in turn: every arm is a deployment that stays up, and rests while another plays."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median

import uvloop

from scripts.bench.common.deployment import RestingDeployment
from scripts.bench.common.turns import NOISE, others, rotated, say, spread
from scripts.bench.speculation.arms import Arm, Pair


@dataclass(frozen=True)
class Work:
    """What each stream slot is asked in one run."""

    num_requests: int
    num_tokens: int  # of each request
    num_rounds: int
    num_learning: int  # requests before the first round, in which an arm that adapts meets this number of streams

    def num_warm(self, number: int) -> int:
        """Requests of each slot before a run of round `number`, which do not count."""
        return self.num_learning if number == 0 else 1


@dataclass(frozen=True)
class ModeRun:
    """One arm's turn; `counts` are the scheduler's, by the names of its load."""

    seconds: float
    num_tokens: int
    counts: Counter[str]
    other_cores: float  # that other processes took meanwhile
    fingerprints: tuple[int, ...]  # of each request's tokens

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass
class ModeRecord:
    """An arm's runs at one number of streams."""

    runs: list[ModeRun] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return median(run.speed for run in self.runs)

    @property
    def spread(self) -> float:
        return spread([run.speed for run in self.runs])

    @property
    def is_noisy(self) -> bool:
        return any(run.other_cores > NOISE for run in self.runs)

    @property
    def acceptance(self) -> float | None:
        """Accepted of all draft tokens; None where there were none."""
        return self._ratio("num_accepted_tokens", "num_draft_tokens")

    @property
    def draft_length(self) -> float:
        """Draft tokens of a sequence in a step that verified any."""
        return self._ratio("num_draft_tokens", "num_drafts") or 0.0

    @property
    def step_tokens(self) -> float | None:
        """Tokens of a sequence in a step that verified drafts."""
        accepted = self._ratio("num_accepted_tokens", "num_drafts")
        return None if accepted is None else 1 + accepted

    def _ratio(self, name: str, of: str) -> float | None:
        counted = sum((run.counts for run in self.runs), Counter[str]())
        return counted[name] / counted[of] if counted[of] else None


Records = dict[tuple[int, str], ModeRecord]  # by number of streams and the arm's title, or its name among its kind


class ModeContest:
    """One pair's deployments, and their records."""

    def __init__(
        self, pair: Pair, work: Work, loop: asyncio.Runner, deployments: Mapping[Arm, RestingDeployment]
    ) -> None:
        self.pair = pair
        self.records: Records = {}
        self._work, self._loop, self._deployments = work, loop, deployments

    def play(self, num_streams: int) -> None:
        """All rounds at one number of streams."""
        for number in range(self._work.num_rounds):
            for arm in rotated(list(self._deployments), number):
                run = self._turn(arm, num_streams, number)
                self.records.setdefault((num_streams, arm.title), ModeRecord()).runs.append(run)
                mark = "~" if run.other_cores > NOISE else ""
                say(f"  {self.pair.name}, {num_streams} streams, round {number + 1}, {arm.title:14} {run.speed:10,.1f} "
                    f"tokens/s in {run.seconds:.1f} s, others {run.other_cores:.2f} cores{mark}")  # fmt: skip

    def _turn(self, arm: Arm, num_streams: int, number: int) -> ModeRun:
        """The same requests for every arm; the warm-up has others, of the same kind."""
        work, deployment = self._work, self._deployments[arm]
        warm = self.pair.slots(f"warm-{num_streams}-{number}", num_streams, work.num_warm(number), work.num_tokens)
        slots = self.pair.slots(f"{num_streams}-{number}", num_streams, work.num_requests, work.num_tokens)
        with deployment.awake():
            self._loop.run(deployment.play(warm))
            before = deployment.counts()
            with others(lambda: deployment.cpu_seconds + time.process_time()) as cores:  # clients are in this process
                played = self._loop.run(deployment.play(slots))
            counts = deployment.counts() - before
        fingerprints = tuple(hash(answer.token_ids) for answer in played.answers)
        return ModeRun(played.seconds, played.num_tokens, counts, cores[0], fingerprints)


@contextmanager
def contest(pair: Pair, arms: Sequence[Arm], work: Work) -> Iterator[ModeContest]:
    """All arms serve until the block ends."""
    deployments = {}
    with ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        for arm in arms:
            deployments[arm] = stack.enter_context(RestingDeployment(arm.settings(pair)))
            say(f"  {pair.name}, {arm.title}: serving")
        yield ModeContest(pair, work, loop, deployments)
