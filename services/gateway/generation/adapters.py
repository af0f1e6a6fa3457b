"""Which models requests may name beside the base model, and what each name stands for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.gateway.bus.bus import Bus
from services.gateway.generation.questions import QUESTION_TIMEOUT, Questions
from shared.config import AdapterSettings
from shared.errors import RejectCode, RequestError
from shared.messages import Adapter, AdapterLoaded, LoadAdapter, Roster, TokenizeRequest, UnloadAdapter

MAX_NAME_CHARS = 256
CONFIG_NAME = "adapter_config.json"  # what makes a directory an adapter


class AdapterNames:
    """The roster says what is loaded; settings say what else may be.  What is named is loaded with the first request.

    A scheduler that begins anew learns the names from the gateways: until its roster has this gateway, what was known
    before stays.
    """

    def __init__(self, bus: Bus, questions: Questions, settings: AdapterSettings, bases: Sequence[str]) -> None:
        self.known: dict[str, Adapter] = {}
        self._bus = bus
        self._questions = questions
        self._modules = settings.modules()
        self._directory = Path(settings.lora_dir).resolve() if settings.lora_dir else None
        self._bases = tuple(bases)  # the names of the base model
        self._epoch = 0
        self._loading: dict[str, asyncio.Task[Adapter]] = {}

    def heard(self, roster: Roster, *, is_known: bool) -> None:
        """A roster that this gateway follows; `is_known`: it has this gateway on it."""
        told = {adapter.name: adapter for adapter in roster.adapters}
        is_same_life = roster.scheduler_epoch == self._epoch or self._epoch in roster.former_epochs
        self.known = told if is_same_life and is_known else self.known | told
        self._epoch = roster.scheduler_epoch

    def listed(self) -> dict[str, str]:
        """What requests may name, as /v1/models has it: the directory of each."""
        return dict(sorted({**self._modules, **{name: one.path for name, one in self.known.items()}}.items()))

    def of(self, name: str) -> Adapter | None:
        """The adapter that a request names, None for the base model.  Raises RequestError where there is none."""
        if not name or name in self._bases:
            return None
        if name in self.known:
            return self.known[name]
        if path := self._path_of(name):
            return Adapter(name, path=path)
        served = ", ".join((*self._bases, *list(self.listed())[:20]))
        raise RequestError(f"model {name!r} is not served; served: {served}", field="model", code=RejectCode.NOT_FOUND)

    def _path_of(self, name: str) -> str:
        """The directory of an adapter that is not loaded; empty where there is none."""
        if name in self._modules:
            return self._modules[name]
        if self._directory is None or len(name) > MAX_NAME_CHARS or "\0" in name:
            return ""
        found = self._directory / name
        try:
            found = found.resolve()
            is_there = found.parent == self._directory and found.name == name and (found / CONFIG_NAME).is_file()
        except OSError:  # longer than a file's name may be
            return ""
        return str(found) if is_there else ""

    async def settle(self, request: TokenizeRequest) -> TokenizeRequest:
        """The request with the digest of its adapter, which is loaded where it is not yet."""
        adapter = request.header.adapter
        if adapter is None or adapter.digest:
            return request
        adapter = self.known.get(adapter.name) or await self._loaded(adapter)
        return msgspec.structs.replace(request, header=msgspec.structs.replace(request.header, adapter=adapter))

    async def _loaded(self, adapter: Adapter) -> Adapter:
        """Requests that come meanwhile wait for the same load; one that is given up does not end it."""
        task = self._loading.get(adapter.name)
        if task is None:
            task = self._loading[adapter.name] = asyncio.create_task(self._ask_to_load(adapter.name, adapter.path))
            task.add_done_callback(lambda _: self._loading.pop(adapter.name, None))
        return await asyncio.shield(task)

    # -- operators

    async def load(self, name: str, path: str) -> Adapter:
        """What has the name already is replaced for the requests that come later."""
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise RequestError(f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters", field="lora_name")
        if name in self._bases:
            raise RequestError(f"lora_name {name!r} is the base model's", field="lora_name")
        if not path:
            raise RequestError("lora_path must be given", field="lora_path")
        return await self._ask_to_load(name, self._allowed(path), field="lora_path")

    def _allowed(self, path: str) -> str:
        """A directory that an operator names, without links."""
        found = Path(path).resolve()
        if self._directory is not None and not found.is_relative_to(self._directory):
            raise RequestError(f"lora_path {path!r} is outside lora_dir", field="lora_path")
        return str(found)

    async def _ask_to_load(self, name: str, path: str, field: str = "") -> Adapter:
        question = LoadAdapter(uuid.uuid4().hex, self._bus.address, name, path)
        try:
            answer: AdapterLoaded = await self._questions.ask_scheduler(question, QUESTION_TIMEOUT)
        except RequestError as error:
            if field and error.field == "model":
                raise RequestError(str(error), field=field, code=error.code) from error
            raise
        self.known[name] = answer.adapter
        return answer.adapter

    async def unload(self, name: str) -> None:
        """Returns when no request uses it any more; requests that come meanwhile do not find it."""
        question = UnloadAdapter(uuid.uuid4().hex, self._bus.address, name)
        self.known.pop(name, None)
        await self._questions.ask_scheduler(question, QUESTION_TIMEOUT)
