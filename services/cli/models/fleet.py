"""The models of a running `pageant serve`: their processes, their settings, the list that gateways read."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from services.cli.command_line.failures import one_line
from services.cli.models.keeper import KeptModel, ModelKeeper, Wakefulness, table
from services.cli.supervision.processes import METRICS_PORTS, PLACES
from services.cli.supervision.supervisor import LOAD_SECONDS, ChildProcess, OrderFailedError, Role, Supervisor
from shared.config import FurtherModel, Settings, check_models, settings_of_model, write_models
from shared.errors import ConfigError
from shared.processes.supervision import ModelOrder

FIRST = ""  # how roles and the keeper call the first model
SERVICES = ("scheduler", "tokenizer", "detokenizer")  # of a model, one each, whether it sleeps or not


class ModelSettings:
    """The settings of each model's processes, and the directory of the files between them and the supervisor."""

    def __init__(self, first: Settings, worker_roles: Sequence[str] = ()) -> None:
        """`worker_roles`: of the first model's workers, by index."""
        self.first = first
        self._worker_roles = worker_roles
        self.served: dict[str, FurtherModel] = {}
        self._settings: dict[str, Settings] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="pageant-models-"))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._list = self._directory / "models.json"
        self._ports: list[str | None] = []  # the model of each ten metrics ports, after the first's

    def check(self, model: FurtherModel) -> Settings:
        """A further model's settings.  Raises ConfigError where there cannot be such a model."""
        if model.name in self.served:
            raise ConfigError(f"there is a model {model.name!r} already")
        check_models(self.first.engine.model_names, [*self.served.values(), model])
        return settings_of_model(self.first, model)

    def add(self, model: FurtherModel) -> None:
        settings = self.check(model)
        if (port := self.first.observation.metrics_port) > 0:
            place = self._ports.index(None) if None in self._ports else len(self._ports)
            self._ports[place : place + 1] = [model.name]
            port += METRICS_PORTS * len(PLACES) * (1 + place)
        self._settings[model.name] = settings.replace(metrics_port=port)
        self.served[model.name] = model

    def remove(self, name: str) -> None:
        del self.served[name], self._settings[name]
        self._ports = [None if owner == name else owner for owner in self._ports]

    def publish(self, *, without: str = "") -> None:
        """Let the gateways know the models as they are now, but for one that leaves."""
        write_models(self._list, [model for model in self.served.values() if model.name != without])

    def activity_dir(self, name: str) -> Path:
        directory = self._directory / (self.served[name].place if name else "first")
        directory.mkdir(exist_ok=True)
        return directory

    def of(self, role: Role) -> Settings:
        """What a process is started with."""
        settings = self._settings[role.model] if role.model else self.first
        if role.service == "gateway":
            return settings.replace(models_file=str(self._list))
        if role.service == "worker" and not role.model and role.index < len(self._worker_roles):
            return settings.replace(worker_role=self._worker_roles[role.index])
        if role.service == "scheduler":
            return settings.replace(activity_dir=str(self.activity_dir(role.model)))
        return settings


class StartedProcesses(Protocol):
    """What is known of the processes that a supervisor starts."""

    def is_ready(self, child: ChildProcess) -> bool: ...

    def waits_for(self, child: ChildProcess) -> str: ...

    def last_words(self, role: Role) -> str: ...


class Fleet:
    """Starts and stops the models' processes.  Invariant: the list that gateways read names models that are kept."""

    def __init__(
        self,
        settings: ModelSettings,
        supervisor: Supervisor,
        processes: StartedProcesses,
        *,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._processes = processes
        self._report = report
        self._clock = clock
        self._trouble = ""  # that was reported
        self._told: dict[str, Role] = {}  # of models that cannot be loaded, by which process of theirs
        models = settings.first.models
        self.keeper = ModelKeeper(
            supervisor,
            processes.is_ready,
            processes.waits_for,
            max_awake=models.max_awake_models,
            turn=models.model_turn,
            report=report,
            clock=clock,
        )

    def begin(self, replicas: Mapping[str, int], models: list[FurtherModel]) -> None:
        """Add the roles of all models, before the supervisor starts any.  `replicas`: of the first model's workers and
        drafts, which have their roles already."""
        self.keeper.add(self._kept(FIRST, self._settings.first, replicas))
        for model in models:
            self._settings.add(model)
            self._supervisor.children += [ChildProcess(role) for role in self._keep(model)]
        self._settings.publish()

    def poll(self) -> None:
        try:
            self.keeper.poll()
            self._trouble = ""
        except OSError as error:  # a full disk: tried again at the next poll
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._report(f"models cannot be put to sleep or woken: {error}")
        for name, role in self._supervisor.given_up.items():
            if self._told.get(name) is not role:
                self._told[name] = role
                self._report(f"model {name}: {role.service}: {one_line(self._processes.last_words(role))}")

    # -- orders; each is an iterator to be advanced between polls

    def carry_out(self, order: ModelOrder, say: Callable[[str], None]) -> Iterator[None]:
        """Raises OrderFailedError where it cannot be done."""
        try:
            if order.action == "add" and order.model is not None:
                yield from self._add(order.model, say)
            elif order.action == "remove":
                yield from self._remove(self._named(order.name), order.seconds, say)
            elif order.action == "swap":
                yield from self._swap(order, say)
            else:
                for line in table(self.keeper.models.values()):
                    say(line)
        except (ConfigError, OSError) as error:
            raise OrderFailedError(str(error)) from error

    def _named(self, name: str) -> KeptModel:
        """The model that has this name or alias."""
        for model in self.keeper.models.values():
            names = self._settings.served[model.name].names if model.name else self._settings.first.engine.model_names
            if name in names:
                return model
        served = ", ".join(model.label for model in self.keeper.models.values())
        raise OrderFailedError(f"there is no model {name!r}; there are: {served}")

    def _add(self, model: FurtherModel, say: Callable[[str], None]) -> Iterator[None]:
        if self._settings.first.deployment.transport != "ipc":
            raise ConfigError("several models need transport=ipc, one host")
        self._settings.add(model)
        begun = self._clock()
        for role in self._keep(model):
            self._supervisor.engage(role)
        try:
            self._settings.publish()
            self._check_progress(model.name, begun)
            while not self._is_served(model.name):
                yield
                self._check_progress(model.name, begun)
        except (OrderFailedError, OSError):
            yield from self._dismiss(model.name)
            raise
        say(f"model {model.name} was added in {self._clock() - begun:.1f} s")

    def _is_served(self, name: str) -> bool:
        """Whether its processes are ready, and every gateway knows it."""
        model, gateways = self.keeper.models[name], len(self._supervisor.cast("gateway"))
        children = [child for child in self._supervisor.children if child.role.model == name]
        is_known = model.activity.num_gateways >= gateways
        return (
            is_known
            and model.state in (Wakefulness.AWAKE, Wakefulness.ASLEEP)
            and all(map(self._processes.is_ready, children))
        )

    def _check_progress(self, name: str, begun: float) -> None:
        model = self.keeper.models[name]
        if (role := self._supervisor.given_up.pop(name, None)) is not None:
            raise OrderFailedError(f"model {model.label}: {role.service}: {one_line(self._processes.last_words(role))}")
        if model.state is Wakefulness.FAILED:
            raise OrderFailedError(f"model {model.label} cannot be loaded")
        if self._clock() - begun > LOAD_SECONDS:
            raise OrderFailedError(f"model {model.label} was not there within {LOAD_SECONDS:g} s")

    def _remove(self, model: KeptModel, seconds: float | None, say: Callable[[str], None]) -> Iterator[None]:
        if model.name == FIRST:
            raise OrderFailedError(f"{model.label} is the first model, which cannot be removed")
        begun = self._clock()
        self._settings.publish(without=model.name)
        while self._clock() - begun < self._patience(seconds):
            if not (model.activity.num_gateways or model.activity.num_requests):
                break
            yield
        yield from self._dismiss(model.name)
        say(f"model {model.label} was removed in {self._clock() - begun:.1f} s")

    def _dismiss(self, name: str) -> Iterator[None]:
        """End a model's processes and forget it."""
        with contextlib.suppress(OSError):  # a full disk: gateways find that its processes are gone
            self._settings.publish(without=name)
        self.keeper.models.pop(name, None)
        while children := [child for child in self._supervisor.children if child.role.model == name]:
            for child in children:
                if not child.is_leaving:
                    self._supervisor.dismiss(child)
            yield
        self._settings.remove(name)
        self._supervisor.given_up.pop(name, None)

    def _swap(self, order: ModelOrder, say: Callable[[str], None]) -> Iterator[None]:
        wanted, keeper, begun = self._named(order.name), self.keeper, self._clock()
        if order.out is None:
            leaving = [model for model in keeper.models.values() if model is not wanted and not model.pinned]
        else:
            leaving = [self._named(name) for name in order.out]
        if wanted in leaving:
            raise OrderFailedError(f"model {wanted.label} cannot both stay and leave")
        if pinned := [model.label for model in leaving if model.pinned]:
            raise OrderFailedError(f"model {', '.join(pinned)} is pinned")
        seconds = self._patience(order.seconds)
        self._supervisor.given_up.pop(wanted.name, None)  # it is tried again
        keeper.wake(wanted.name)
        while leaving:
            for model in leaving:
                keeper.sleep(model.name, max(0.0, begun + seconds - self._clock()))
            yield
            leaving = [model for model in leaving if model.state not in (Wakefulness.ASLEEP, Wakefulness.FAILED)]
        while wanted.state is not Wakefulness.AWAKE:
            self._check_progress(wanted.name, begun)
            yield
        say(f"model {wanted.label} is in memory after {self._clock() - begun:.1f} s")

    def _patience(self, seconds: float | None) -> float:
        return self._settings.first.deployment.handover_timeout if seconds is None else seconds

    # -- processes

    def _keep(self, model: FurtherModel) -> list[Role]:
        """Keep a model; the roles with which it begins."""
        settings = settings_of_model(self._settings.first, model)
        drafts = int(settings.speculation.has_service)
        kept = self._kept(model.name, settings, {"worker": model.workers, "draft": drafts})
        self.keeper.add(kept, asleep=model.asleep)
        roles = [Role(service, 0, model.name) for service in SERVICES]
        if kept.state is not Wakefulness.ASLEEP:
            counts = kept.replicas.items()
            roles += [Role(service, index, model.name) for service, count in counts for index in range(count)]
        return roles

    def _kept(self, name: str, settings: Settings, replicas: Mapping[str, int]) -> KeptModel:
        engine, own, directory = settings.engine, settings.models, self._settings.activity_dir(name)
        return KeptModel(name, engine.model_name, engine.model, directory, dict(replicas), own.sleep_after, own.pinned)
