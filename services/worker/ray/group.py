"""The ranks of one group at their places: starts them, looks after them, ends them together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from services.worker.ray.needs import rank_threads
from services.worker.ray.placed import RankReport
from shared.config import GatewaySettings, Settings, settings_environment
from shared.errors import FatalError
from shared.processes.exit_status import EXIT_CONFIG, EXIT_FATAL
from shared.text.model_source import find_model_dir

TURN = 0.25  # seconds between looks
SILENCE = 10.0  # without an answer, after which a place is given up: its node may be gone without a word
START_SECONDS = 60.0  # that an actor has for its first answer
ENDING = 3.0  # seconds that the others have once one rank has ended: the leader says more about it than Ray
END_SECONDS = 1.0  # in which processes are ended one by one, before their actors are
MOST = 300  # characters of a reason
NEVER_PASSED = ("access", "gateway", "admission", "models", "events")  # sections that no worker reads; keys are there

log = structlog.get_logger()


class Ray(Protocol):
    """What is used of the module, so that tests need no cluster."""

    def get(self, ref: Any, *, timeout: float | None = None) -> Any: ...

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]: ...

    def kill(self, actor: Any) -> None: ...


def rank_settings(settings: Settings) -> Settings:
    """Under which a rank runs on another node: nothing there depends on where `pageant serve` was started."""
    own = {name: find_model_dir(value) for name, value in (("model", settings.engine.model),)}
    if settings.speculation.has_head:
        own["draft"] = find_model_dir(settings.speculation.draft)
    paths = {name: str(path.resolve()) for name, path in own.items() if path is not None}
    return settings.replace(
        **paths,
        runtime_dir=str(settings.deployment.runtime_path.absolute()),
        num_threads=rank_threads(settings.engine),
        advertise_host="",  # that of `pageant serve`
        status_file="",
    )


def rank_environment(settings: Settings) -> dict[str, str]:
    """The PAGEANT_* variables of a rank.  API keys and what else only gateways read do not leave this host."""
    passed = {name: getattr(settings, name) for name in Settings.__struct_fields__ if name not in NEVER_PASSED}
    host = GatewaySettings(host=settings.gateway.host)  # metrics are there, too
    return settings_environment(Settings(**passed, gateway=host))


class RankMember:
    """One rank: its actor, and the question to it that is open."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank = rank
        self.actor = actor
        self.host = ""
        self.report = RankReport(None, "", "")
        self.lost = ""  # why Ray's actor does not answer any more
        self.question: Any = None
        self.asked = 0.0

    @property
    def name(self) -> str:
        return f"rank {self.rank} at {self.host}" if self.host else f"rank {self.rank}"

    @property
    def has_ended(self) -> bool:
        return bool(self.lost) or self.report.status is not None

    @property
    def why(self) -> str:
        """Why it has ended."""
        if self.lost:
            return f"{self.name}: {self.lost}"
        ended = f"{self.name} has ended with status {self.report.status}"
        return f"{ended}: {self.report.words}" if self.report.words else ended


class PlacedGroup:
    """Invariant: where one rank has ended, all have, at the latest `ENDING` seconds later."""

    def __init__(self, ray: Ray, actors: Sequence[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._ray = ray
        self._clock = clock
        self.members = [RankMember(rank, actor) for rank, actor in enumerate(actors)]
        self._end_by: float | None = None
        self._asked: set[int] = set()  # the signals that the leader was sent

    @property
    def leader(self) -> RankMember:
        return self.members[0]

    def start(self, settings: Settings, keys: str) -> None:
        """Start the processes; `keys`: the digest of the deployment's.  Raises FatalError where one cannot start."""
        own = rank_settings(settings)
        environment = msgspec.json.encode(rank_environment(own)).decode()
        for member, host in zip(self.members, self._ask("host"), strict=True):
            member.host = str(host)
        join = f"services.worker.hosts tcp://{self.leader.host}:{own.deployment.rank_port}"
        commands = ["services.worker", *(f"{join} {member.rank}" for member in self.members[1:])]
        answers = self._ask("start", *([command, environment, keys] for command in commands))
        for member, wrong in zip(self.members, answers, strict=True):
            if wrong:
                raise FatalError(f"{member.name}: {wrong}")
        log.info("ranks_placed", hosts=[member.host for member in self.members])

    def look(self) -> bool:
        """Hear how all do; takes `TURN` seconds.  False once all have ended, or must."""
        begun = self._clock()
        for member in self.members:
            if not member.has_ended and member.question is None:
                member.question, member.asked = member.actor.look.remote(), begun
        if questions := [member.question for member in self.members if member.question is not None]:
            done, _ = self._ray.wait(questions, num_returns=len(questions), timeout=TURN)
            for member in self.members:
                if member.question is not None:
                    self._hear(member, member.question in done)
        if self._end_by is None and any(member.has_ended for member in self.members):
            self._end_by = self._clock() + ENDING
        if all(member.has_ended for member in self.members):
            return False
        if self._end_by is not None and self._clock() >= self._end_by:
            return False
        time.sleep(max(0.0, TURN - (self._clock() - begun)))
        return True

    def signal(self, number: int) -> None:
        """To the leader, which the others follow."""
        self._asked.add(number)
        self.leader.actor.signal.remote(number)

    def verdict(self) -> tuple[int, str]:
        """The exit status of the whole, and why it has ended; empty where it was asked to."""
        status = self.leader.report.status
        if status == 0 or (status is not None and -status in self._asked):  # a process that only begins dies of it
            return 0, ""
        ended = [member for member in self.members if member.has_ended]
        refused = [member for member in ended if member.report.status == EXIT_CONFIG]
        if refused:
            return EXIT_CONFIG, refused[0].report.words or refused[0].why
        lost = [member for member in ended if member.lost]
        first = (lost or ended or self.members)[0]
        return EXIT_FATAL, first.why

    def end(self) -> None:
        """Whatever still runs is killed."""
        with contextlib.suppress(Exception):  # Ray may be gone
            ends = [member.actor.end.remote() for member in self.members if not member.lost]
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        for member in self.members:
            with contextlib.suppress(Exception):  # Ray may be gone
                self._ray.kill(member.actor)

    def _hear(self, member: RankMember, is_answered: bool) -> None:
        if is_answered:
            try:
                member.report = msgspec.json.decode(self._ray.get(member.question), type=RankReport)
            except Exception as error:  # what Ray has for an actor or a node that is gone
                member.lost = f"{reason_of(error)}"
            member.question = None
        elif self._clock() - member.asked > SILENCE:
            member.lost, member.question = f"its actor has been silent for {SILENCE:g} s", None

    def _ask(self, method: str, *arguments: Sequence[str]) -> list[Any]:
        """Call all actors.  Raises FatalError where one does not answer."""
        given: Sequence[Sequence[str]] = arguments or [()] * len(self.members)
        calls = [getattr(member.actor, method).remote(*one) for member, one in zip(self.members, given, strict=True)]
        answers = []
        for member, call in zip(self.members, calls, strict=True):
            try:
                answers.append(self._ray.get(call, timeout=START_SECONDS))
            except Exception as error:
                raise FatalError(f"{member.name}: Ray has not started its actor: {reason_of(error)}") from error
        return answers


def reason_of(error: BaseException) -> str:
    """The sentence that says why, of the page that is Ray's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = [line for line in lines if line.startswith("The actor ")] or lines
    return said[-1].partition(". ")[0][:MOST]
