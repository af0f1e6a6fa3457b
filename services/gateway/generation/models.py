"""The models that a gateway serves, and which of them a request names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from services.gateway.generation.service import GenerationService
from shared.errors import RejectCode, RequestError

MAX_LISTED = 40  # names in a refusal


class ServedModels:
    """The first model, which is meant where a request names none, and others that come and go.

    Invariant: no two of them have a name in common.
    """

    def __init__(self, first: GenerationService) -> None:
        self.first = first
        self._others: list[GenerationService] = []

    def __iter__(self) -> Iterator[GenerationService]:
        return iter([self.first, *self._others])

    def add(self, service: GenerationService) -> None:
        self._others.append(service)

    def remove(self, service: GenerationService) -> None:
        """It gets no new requests; its open streams go on."""
        if service in self._others:
            self._others.remove(service)

    def of(self, name: str) -> GenerationService:
        """The model that has this name, or an adapter of this name.  Raises RequestError where there is none."""
        if not name:
            return self.first
        for service in self:
            if name in service.names:
                return service
        for service in self._others:
            if name in service.adapters.listed():
                return service
        for service in self:  # the one whose adapters' directory has the name
            with contextlib.suppress(RequestError):
                service.adapters.of(name)
                return service
        names = [name for service in self for name in (*service.names, *service.adapters.listed())]
        raise RequestError(
            f"model {name!r} is not served; served: {', '.join(names[:MAX_LISTED])}",
            field="model",
            code=RejectCode.NOT_FOUND,
        )
