"""Which models are in memory: puts idle ones to sleep, wakes those that requests want, and makes room for them.

A model sleeps by the end of its workers, which gives their memory back; its scheduler stays and keeps the requests.
The order is always the same, so that no request is refused for want of a worker: the model is marked asleep, its
scheduler says that it knows, then the workers are asked to leave.  When they are back, the mark is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.cli.display.tables import columns
from services.cli.supervision.supervisor import COMPUTING, LOAD_SECONDS, ChildProcess, Supervisor
from shared.activity import Activity, mark_asleep, read_activity

NOTHING = Activity()
LEAST_TURN = 1.0  # seconds that a model stays in memory before it makes room, even if nothing is asked of it


class Wakefulness(StrEnum):
    AWAKE = "awake"
    LEAVING = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"


IN_MEMORY = frozenset({Wakefulness.AWAKE, Wakefulness.LEAVING, Wakefulness.WAKING})


@dataclass(slots=True)
class KeptModel:
    """One model; times are of the keeper's clock."""

    name: str  # empty: the first one, as in roles
    label: str  # what requests call it
    checkpoint: str
    directory: Path  # of shared.activity
    replicas: dict[str, int]  # of COMPUTING, when awake
    sleep_after: float = 0.0
    pinned: bool = False
    state: Wakefulness = Wakefulness.WAKING
    since: float = 0.0
    active_at: float = 0.0  # when it was last seen to have work
    leave_by: float = 0.0  # while it falls asleep: until then its requests may end
    is_dismissed: bool = False  # its workers have been asked to leave
    is_ordered: bool = False  # by an operator, ahead of what requests want
    wanted_since: float | None = None
    activity: Activity = NOTHING


class ModelKeeper:
    """Invariant: a model's workers are dismissed only after its scheduler has said that it knows of the sleep."""

    def __init__(
        self,
        supervisor: Supervisor,
        is_ready: Callable[[ChildProcess], bool],
        waits_for: Callable[[ChildProcess], str],
        *,
        max_awake: int = 0,
        turn: float = 30.0,
        report: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`waits_for`: a place that is not there yet, in words.  `max_awake` 0: all.  `turn`: seconds that a model with
        requests stays where others wait for its place."""
        self.models: dict[str, KeptModel] = {}
        self._supervisor = supervisor
        self._is_ready = is_ready
        self._waits_for = waits_for
        self._max_awake = max_awake
        self._turn = turn
        self._report = report
        self._clock = clock

    def add(self, model: KeptModel, *, asleep: bool = False) -> None:
        """Keep a model whose processes are about to be started; without its workers where it begins asleep."""
        asleep = asleep or not self._has_room
        mark_asleep(model.directory, asleep=asleep)
        model.active_at = self._clock()
        self._enter(model, Wakefulness.ASLEEP if asleep else Wakefulness.WAKING)
        self.models[model.name] = model

    # -- orders

    def wake(self, name: str) -> None:
        """Have a model in memory as soon as there is room."""
        model = self.models[name]
        model.is_ordered = model.state not in (Wakefulness.AWAKE, Wakefulness.WAKING)
        if model.state is Wakefulness.FAILED:
            mark_asleep(model.directory, asleep=True)
            self._enter(model, Wakefulness.ASLEEP)
        elif model.state is Wakefulness.LEAVING and not model.is_dismissed:
            self._stay(model)

    def sleep(self, name: str, seconds: float) -> None:
        """Put a model to sleep once its requests have ended, or after so many seconds: they go on when it wakes."""
        model = self.models[name]
        if model.state is Wakefulness.AWAKE:
            self._leave(model, self._clock() + seconds)

    # -- the course of things

    def poll(self) -> None:
        now = self._clock()
        for model in self.models.values():
            self._look(model, now)
            match model.state:
                case Wakefulness.AWAKE:
                    is_idle = not model.activity.num_requests and now - model.active_at >= model.sleep_after
                    if model.sleep_after and is_idle and not model.pinned:
                        self._leave(model, float("inf"))
                case Wakefulness.LEAVING:
                    self._go_on_leaving(model, now)
                case Wakefulness.WAKING:
                    self._go_on_waking(model)
                case Wakefulness.ASLEEP:
                    if self._computing(model):  # started by `pageant scale`
                        self._enter(model, Wakefulness.WAKING)
                    elif model.is_ordered or model.activity.wants_workers:
                        model.wanted_since = now if model.wanted_since is None else model.wanted_since
        for model in self._wanted():
            if not self._has_room:
                self._make_room(now)
                return
            self._enter(model, Wakefulness.WAKING)
            for service, count in model.replicas.items():
                self._supervisor.scale(service, count, model.name)

    def _look(self, model: KeptModel, now: float) -> None:
        said = read_activity(model.directory)
        if said is None:
            return
        if said.num_requests or said.num_taken != model.activity.num_taken:
            model.active_at = now
        model.activity = said

    def _wanted(self) -> list[KeptModel]:
        """The sleeping models that are wanted, in the order of their turns."""
        waiting = [m for m in self.models.values() if m.state is Wakefulness.ASLEEP and m.wanted_since is not None]
        return sorted(waiting, key=lambda model: (not model.is_ordered, model.wanted_since))

    @property
    def _has_room(self) -> bool:
        present = sum(model.state in IN_MEMORY for model in self.models.values())
        return not self._max_awake or present < self._max_awake

    def _make_room(self, now: float) -> None:
        """Put to sleep the model that was idle for longest, or the one whose turn is over for longest."""
        if any(model.state is Wakefulness.LEAVING for model in self.models.values()):
            return
        free = [m for m in self.models.values() if m.state is Wakefulness.AWAKE and not m.pinned and not m.is_ordered]
        idle = [m for m in free if not m.activity.num_requests and now - max(m.since, m.active_at) >= LEAST_TURN]
        busy = [m for m in free if now - m.since >= max(self._turn, LEAST_TURN)]
        if idle:
            self._leave(min(idle, key=lambda model: model.active_at), now)
        elif busy:
            self._leave(min(busy, key=lambda model: model.since), now)

    def _leave(self, model: KeptModel, by: float) -> None:
        mark_asleep(model.directory, asleep=True)
        model.leave_by, model.is_dismissed, model.is_ordered = by, False, False
        self._enter(model, Wakefulness.LEAVING)

    def _stay(self, model: KeptModel) -> None:
        mark_asleep(model.directory, asleep=False)
        self._enter(model, Wakefulness.AWAKE)

    def _go_on_leaving(self, model: KeptModel, now: float) -> None:
        said = model.activity
        if model.is_dismissed:
            if not self._computing(model, with_leaving=True):
                self._enter(model, Wakefulness.ASLEEP)
                self._report(f"model {model.label} sleeps; {said.num_requests} requests of it wait")
        elif said.num_requests and model.leave_by == float("inf"):  # it was idle, and is no more
            self._stay(model)
        elif said.is_asleep and (not said.num_requests or now >= model.leave_by):
            present = self._computing(model)
            model.replicas = {name: sum(c.role.service == name for c in present) for name in COMPUTING}
            model.is_dismissed = True
            for child in present:
                self._supervisor.dismiss(child)

    def _go_on_waking(self, model: KeptModel) -> None:
        """What is ready is never taken for late, however long it took: it serves."""
        present = self._computing(model)
        workers = [child for child in present if child.role.service == "worker"]
        is_late = self._clock() - model.since > LOAD_SECONDS
        if any(map(self._is_ready, workers)) and (is_late or all(map(self._has_begun_or_waits, present))):
            seconds = self._clock() - model.since
            self._stay(model)
            model.active_at = self._clock()
            self._report(f"model {model.label} is awake after {seconds:.1f} s")
        elif not workers or (is_late and self._may_give_up(model, workers)):
            mark_asleep(model.directory, asleep=False)  # so that its requests are refused
            self._enter(model, Wakefulness.FAILED)
            self._report(f"model {model.label} cannot be loaded" + f" within {LOAD_SECONDS:g} s" * bool(workers))
            for child in present:
                self._supervisor.dismiss(child)

    def _has_begun_or_waits(self, child: ChildProcess) -> bool:
        return self._is_ready(child) or bool(self._waits_for(child))

    def _may_give_up(self, model: KeptModel, workers: list[ChildProcess]) -> bool:
        """Whether a model that is late may lose its workers.  One of them that waits for a place is not late; and the
        first model, which `pageant serve` is there for, has its time as long as no other one wants its place."""
        is_needed = bool(model.name or self._wanted())
        return is_needed and not any(map(self._waits_for, workers))

    def _computing(self, model: KeptModel, *, with_leaving: bool = False) -> list[ChildProcess]:
        """The processes that hold a model in memory."""
        return [
            child
            for child in self._supervisor.children
            if child.role.model == model.name
            and child.role.service in COMPUTING
            and (with_leaving or not child.is_leaving)
        ]

    def _enter(self, model: KeptModel, state: Wakefulness) -> None:
        model.state, model.since = state, self._clock()
        model.wanted_since = None
        if state is not Wakefulness.ASLEEP:
            model.is_ordered = False


def table(models: Iterable[KeptModel]) -> list[str]:
    """What `pageant model list` prints of models."""
    rows = [("MODEL", "STATE", "WORKERS", "REQUESTS", "CHECKPOINT")]
    for model in models:
        said = model.activity
        state = f"{model.state}, pinned" if model.pinned else str(model.state)
        rows.append((model.label, state, str(said.num_workers), str(said.num_requests), model.checkpoint))
    return columns(rows, left=range(len(rows[0])))
