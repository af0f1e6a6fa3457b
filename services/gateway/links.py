"""The models beside the first: the list that `pageant serve` keeps in a file, and a member for each that is on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from services.gateway.generation.models import ServedModels
from services.gateway.member import ModelMember
from shared.clocks.clock import steady_time
from shared.config import FurtherModel, Settings, read_models, settings_of_model
from shared.errors import ConfigError
from shared.transport import Transport, make_transport
from shared.transport.directory import identity

log = structlog.get_logger()

GOODBYE_SECONDS = 1.0  # that members have to say goodbye
MakeTransport = Callable[[Settings], Transport]


class ModelLinks:
    """Follows the list.  A member that fails loses its own streams, and another takes its place at the next look."""

    def __init__(
        self,
        settings: Settings,
        instance: str,
        models: ServedModels,
        make: MakeTransport = lambda settings: make_transport(settings.deployment),
    ) -> None:
        self._settings = settings
        self._instance = instance
        self._models = models
        self._make = make
        self._file = Path(settings.models.models_file) if settings.models.models_file else None
        self._seen: tuple[int, int] | None = None  # the list that is followed, by its inode: each is a file of its own
        self._wanted: dict[str, FurtherModel] = {}
        self._said = ""
        self._lives = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.members: dict[str, ModelMember] = {}  # by the model's name, those that take requests
        self.leaving: list[ModelMember] = []

    def look(self, start: Callable[[ModelMember], asyncio.Task[None]]) -> None:
        """Follow the list as it is now; new members are started by `start`."""
        if self._file is None:
            return
        seen = identity(self._file)
        if seen == self._seen and self.members.keys() == self._wanted.keys():
            return
        try:
            wanted = {model.name: model for model in read_models(self._file)}
        except ConfigError as error:
            self._complain(str(error))
            return
        for name in [name for name in self.members if wanted.get(name) != self._wanted.get(name)]:
            self._dismiss(name)
        self._seen, self._wanted = seen, wanted
        for name, model in wanted.items():
            if name not in self.members:
                self._engage(model, start)

    def _complain(self, reason: str) -> None:
        if reason != self._said:
            log.warning("models_not_followed", reason=reason)
        self._said = reason

    def _engage(self, model: FurtherModel, start: Callable[[ModelMember], asyncio.Task[None]]) -> None:
        try:
            settings = settings_of_model(self._settings, model)
            member = ModelMember(self._make(settings), settings, f"{self._instance}-{self._lives}")
        except (ConfigError, OSError) as error:
            self._complain(str(error))
            return
        self._lives += 1
        self.members[model.name] = member
        self._models.add(member.generation)
        log.info("model_added", model=model.name)
        task = start(member)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _dismiss(self, name: str) -> None:
        member = self.members.pop(name)
        self._models.remove(member.generation)
        self.leaving.append(member)
        log.info("model_removed", model=name, num_streams=len(member.generation.journal))
        member.request_handover()

    async def run(self, member: ModelMember) -> None:
        """A member's life; its failure ends its streams and no other."""
        try:
            await member.run()
        except* Exception as group:
            log.error("model_lost", model=member.settings.engine.model_name, reason=str(group.exceptions[0]))
            member.generation.recovery.fail_all("the gateway lost its way to the model")
        finally:
            member.transport.close()
            self._models.remove(member.generation)
            self.members = {name: one for name, one in self.members.items() if one is not member}
            self.leaving = [one for one in self.leaving if one is not member]

    def drain(self, deadline: float) -> None:
        """Ask all members to leave by then."""
        for member in (*self.members.values(), *self.leaving):
            member.request_drain(deadline)

    async def close(self) -> None:
        """Let all members leave now, in order."""
        self.drain(steady_time())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE_SECONDS)

    async def until_idle(self) -> None:
        for member in [*self.members.values(), *self.leaving]:
            await member.until_idle()
