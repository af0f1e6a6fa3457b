"""Runs engines in turn, round by round, and keeps what each run took."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from scripts.bench.common.turns import NOISE, others, rotated, say, spread
from scripts.bench.peers.catalog import OTHERS
from scripts.bench.peers.child import EngineFailed, EngineProcess
from scripts.bench.peers.slices import run_in_slices
from scripts.bench.peers.workloads import Workload

HOPELESS = 4.0  # an engine this many times slower than the best is not run again


@dataclass(frozen=True)
class EngineRun:
    """One engine's turn."""

    seconds: float
    first: float  # seconds to the first token; 0: not known
    other_cores: float  # cores that other processes took meanwhile

    @property
    def is_noisy(self) -> bool:
        return self.other_cores > NOISE


@dataclass
class EngineRecord:
    """An engine's runs of one workload."""

    workload: Workload
    runs: list[EngineRun] = field(default_factory=list)

    @property
    def counted(self) -> list[EngineRun]:
        """The runs that count: the quiet ones; all where none was quiet."""
        return [run for run in self.runs if not run.is_noisy] or self.runs

    @property
    def seconds(self) -> float:
        return median(run.seconds for run in self.counted)

    @property
    def speed(self) -> float:
        """The median; more is better."""
        return self.workload.speed(self.seconds)

    @property
    def spread(self) -> float:
        return spread([run.seconds for run in self.counted])

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last, median; 0 where the engine does not tell."""
        return median(run.seconds - run.first if run.first else 0.0 for run in self.counted)

    @property
    def is_noisy(self) -> bool:
        """Whether no run was quiet."""
        return all(run.is_noisy for run in self.runs)

    @property
    def num_quiet(self) -> int:
        return sum(not run.is_noisy for run in self.runs)


def paired_ratio(own: EngineRecord, other: EngineRecord) -> float:
    """How many times as fast `own` is: the median over rounds.  Those in which both were quiet count, all where there
    is none."""
    rounds = list(zip(own.runs, other.runs, strict=False))
    quiet = [pair for pair in rounds if not (pair[0].is_noisy or pair[1].is_noisy)]
    return median(theirs.seconds / ours.seconds for ours, theirs in quiet or rounds)


@dataclass
class PeerContest:
    """Engines that are up, and their records by workload and engine.  An engine that fails is out.

    `remarks` says which failed, and which sat a workload out and why.  `in_slices`: they run at once, see slices.py.
    """

    children: list[EngineProcess]
    vocab_size: int
    timeout: float  # of one run, seconds
    in_slices: bool = False
    records: dict[tuple[str, str], EngineRecord] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    warm_ups: dict[tuple[str, str], float] = field(default_factory=dict)  # seconds

    def play(self, workload: Workload, num_rounds: int, before: Callable[[], None] = lambda: None) -> None:
        """All rounds of one workload; each round begins with another engine.  `before` is called in every round.

        While an engine lacks quiet runs, further rounds are played, at most as many again.  In slices noise is shared.
        """
        warm: dict[str, float] = {}
        for child in list(self.children):
            if workload.name in child.engine.avoids:
                self.remark(f"{child.engine.name} sits {workload.name} out: it takes minutes and is far behind")
            else:
                self._turn(
                    child,
                    lambda c: warm.update({c.engine.name: c.prepare(workload, self.vocab_size, self.timeout)}),
                )
        self.warm_ups.update({(workload.name, name): seconds for name, seconds in warm.items()})
        playing = [child for child in self.children if self._may_play(child, workload, warm)]
        for number in range(num_rounds if self.in_slices else 2 * num_rounds):
            if number >= num_rounds and not self._lack_quiet_runs(playing, workload, num_rounds):
                break
            before()
            here = [c for c in rotated(playing, number) if c in self.children and not self._is_hopeless(c, workload)]
            if self.in_slices and here:
                self._run_at_once(here, workload, number)
                continue
            for child in here:
                self._turn(child, lambda c: self._run(c, workload, number))  # noqa: B023

    def play_pairs(self, workload: Workload, num_rounds: int) -> None:
        """Ours beside another checkout's, in slices of time; each round begins with the other one."""
        for names in OTHERS.items():
            pair = [child for name in names for child in self.children if child.engine.name == name]
            for child in pair:
                self._turn(child, lambda c: self._prepare(c, workload))
            for number in range(num_rounds):
                if len(names) == sum(child in self.children for child in pair):
                    self._run_at_once(rotated(pair, number), workload, number)

    def _prepare(self, child: EngineProcess, workload: Workload) -> None:
        child.prepare(workload, self.vocab_size, self.timeout)

    def _run_at_once(self, children: list[EngineProcess], workload: Workload, number: int) -> None:
        with ExitStack() as stack:
            for child in children:
                stack.enter_context(child.awake())
            with others(lambda: sum(child.cpu_seconds for child in children)) as cores:
                outcomes = run_in_slices(children, workload.requests(number, self.vocab_size), self.timeout)
        for child, outcome in zip(children, outcomes, strict=True):
            if isinstance(outcome, EngineFailed):
                self._leave_out(child, outcome)
            else:
                self._keep(child, workload, number, EngineRun(outcome, 0.0, cores[0]))

    def _leave_out(self, child: EngineProcess, why: EngineFailed) -> None:
        self.remark(str(why))
        self.children.remove(child)
        child.close()

    def _may_play(self, child: EngineProcess, workload: Workload, warm: dict[str, float]) -> bool:
        """Ours always, if only once; a peer unless its warm-up says how it would end."""
        name = child.engine.name
        if name not in warm or child.engine.is_ours:
            return name in warm
        behind = warm[name] / min(warm.values())
        if behind > HOPELESS:
            self.remark(f"{name} sits {workload.name} out: its warm-up took {behind:.1f} times as long as the best's")
        return behind <= HOPELESS

    def _lack_quiet_runs(self, playing: list[EngineProcess], workload: Workload, num_rounds: int) -> bool:
        """Whether an engine that would play on has fewer quiet runs than asked for."""
        names = [c.engine.name for c in playing if c in self.children and not self._is_hopeless(c, workload)]
        return any(self.records[workload.name, name].num_quiet < num_rounds for name in names)

    def _run(self, child: EngineProcess, workload: Workload, number: int) -> None:
        requests = workload.requests(number, self.vocab_size)
        with others(lambda: child.cpu_seconds) as cores:
            answer = child.run(requests, self.timeout)
        self._keep(child, workload, number, EngineRun(answer["seconds"], answer.get("first") or 0.0, cores[0]))

    def _keep(self, child: EngineProcess, workload: Workload, number: int, run: EngineRun) -> None:
        record = self.records.setdefault((workload.name, child.engine.name), EngineRecord(workload))
        record.runs.append(run)
        told, mark = workload.told(workload.speed(run.seconds)), "~" if run.is_noisy else ""
        say(f"  {workload.name} round {number + 1} {child.engine.name:16} {told:10,.2f} {workload.unit}"
            f"  others {run.other_cores:.2f} cores{mark}")  # fmt: skip

    def _turn(self, child: EngineProcess, act: Callable[[EngineProcess], None]) -> None:
        """Wake an engine for one act; a failure ends its part."""
        try:
            with child.awake():
                act(child)
        except EngineFailed as error:
            self._leave_out(child, error)

    def remark(self, text: str) -> None:
        say(f"  {text}")
        self.remarks.append(text)

    def _is_hopeless(self, child: EngineProcess, workload: Workload) -> bool:
        """One run is enough to know that an engine is not the best, nor near it."""
        record = self.records.get((workload.name, child.engine.name))
        best = max((r.speed for (name, _), r in self.records.items() if name == workload.name), default=0.0)
        return record is not None and record.speed * HOPELESS < best
