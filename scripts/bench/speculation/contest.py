"""Arms in turn: every arm is a deployment that stays up, and rests while another plays."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import uvloop

from scripts.bench.peers.proc import machine_cpu_seconds
from scripts.bench.speculation.arms import Arm, Pair
from scripts.bench.speculation.deployment import Counts, Played, Request, RestingDeployment

NOISE = 0.15  # cores that others took: above it a run is noisy


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
    """One arm's turn."""

    seconds: float
    num_tokens: int
    counts: Counts
    other_cores: float  # that everybody else took meanwhile
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
        """(fastest - slowest) / slowest."""
        speeds = [run.speed for run in self.runs]
        return (max(speeds) - min(speeds)) / min(speeds)

    @property
    def is_noisy(self) -> bool:
        return any(run.other_cores > NOISE for run in self.runs)

    @property
    def acceptance(self) -> float | None:
        """Accepted of all draft tokens; None where there were none."""
        drafted = self._sum("num_draft_tokens")
        return self._sum("num_accepted_tokens") / drafted if drafted else None

    @property
    def tokens_per_draft(self) -> float:
        """Of a step that verified drafts, for each sequence: those accepted and one more."""
        drafts = self._sum("num_drafts")
        return 1 + self._sum("num_accepted_tokens") / drafts if drafts else 1.0

    @property
    def draft_length(self) -> float:
        """Draft tokens of a sequence in a step that verified any."""
        drafts = self._sum("num_drafts")
        return self._sum("num_draft_tokens") / drafts if drafts else 0.0

    @property
    def step_seconds(self) -> float:
        return median(run.seconds / max(1, run.counts.num_steps) for run in self.runs)

    def _sum(self, name: str) -> int:
        return sum(getattr(run.counts, name) for run in self.runs)


Records = dict[tuple[int, str], ModeRecord]  # by number of streams and arm


class ModeContest:
    """One pair's deployments, and their records."""

    def __init__(self, pair: Pair, arms: list[Arm], work: Work) -> None:
        self.pair = pair
        self.arms = arms
        self.records: Records = {}
        self._work = work
        self._stack = ExitStack()
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._deployments: dict[str, RestingDeployment] = {}

    def __enter__(self) -> ModeContest:
        try:
            self._stack.enter_context(self._loop)
            for arm in self.arms:
                deployment = RestingDeployment(arm.settings(self.pair))
                self._deployments[arm.name] = self._stack.enter_context(deployment)
                say(f"  {self.pair.name}, {arm.name}: serving")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def play(self, num_streams: int) -> None:
        """All rounds at one number of streams; each begins with another arm."""
        arms = [arm for arm in self.arms if num_streams == 1 or not arm.is_mute]
        for number in range(self._work.num_rounds):
            place = number % len(arms)
            for arm in arms[place:] + arms[:place]:
                run = self._turn(arm, num_streams, number)
                self.records.setdefault((num_streams, arm.name), ModeRecord()).runs.append(run)
                mark = "~" if run.other_cores > NOISE else ""
                say(f"  {self.pair.name}, {num_streams} streams, round {number + 1}, {arm.name:8} {run.speed:10,.1f} "
                    f"tokens/s in {run.seconds:.1f} s, others {run.other_cores:.2f} cores{mark}")  # fmt: skip

    def _turn(self, arm: Arm, num_streams: int, number: int) -> ModeRun:
        """The same requests for every arm; the warm-up has others, of the same kind."""
        work, deployment = self._work, self._deployments[arm.name]
        warm = self.pair.slots(f"warm-{num_streams}-{number}", num_streams, work.num_warm(number), work.num_tokens)
        slots = self.pair.slots(f"{num_streams}-{number}", num_streams, work.num_requests, work.num_tokens)
        with deployment.awake():
            self._play(deployment, warm)
            before, own, machine = deployment.counts(), _own_seconds(deployment), machine_cpu_seconds()
            begin = time.perf_counter()
            played = self._play(deployment, slots)
            elapsed = time.perf_counter() - begin
            others = (machine_cpu_seconds() - machine) - (_own_seconds(deployment) - own)
            counts = deployment.counts().since(before)
        fingerprints = tuple(hash(answer.token_ids) for answer in played.answers)
        return ModeRun(played.seconds, played.num_tokens, counts, max(0.0, others / elapsed), fingerprints)

    def _play(self, deployment: RestingDeployment, slots: list[list[Request]]) -> Played:
        return self._loop.run(deployment.play(slots))


def _own_seconds(deployment: RestingDeployment) -> float:
    """Processor time of a deployment and of its clients, who are in this process."""
    return deployment.cpu_seconds + time.process_time()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
