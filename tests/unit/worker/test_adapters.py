"""Loads of adapters: whatever a directory does, its load alone fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.adapters import AdapterLoading
from shared.errors import FatalError, ModelError
from shared.messages import Adapter, HoldAdapters


class Bank:
    """Holds what it was told to, but raises where a directory is named after an error."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def load(self, directory: Path, digest: str = "") -> str:
        errors: dict[str, Exception] = {
            "model": ModelError("r: no rank"),
            "group": FatalError("the group of ranks has ended"),
            "value": ValueError("embedded null byte"),
            "memory": MemoryError(),
            "runtime": RuntimeError("not enough memory"),
        }
        if directory.name in errors:
            raise errors[directory.name]
        self.held.append(directory.name)
        return directory.name

    def keep(self, digests: set[str]) -> None:
        self.held = [digest for digest in self.held if digest in digests]


@pytest.mark.parametrize("kind", ["model", "value", "memory", "runtime"])
def test_a_load_fails_alone(kind: str) -> None:
    loading = AdapterLoading(Bank())
    loading.apply(HoldAdapters(1, 1, [Adapter("bad", path=f"/loras/{kind}"), Adapter("good", path="/loras/good")]))
    (answer,) = loading.turn()
    assert [adapter.digest for adapter in answer.adapters] == ["good"]
    (failure,) = answer.failures
    assert failure.adapter.name == "bad"
    assert failure.reason
    assert loading.is_idle


def test_the_end_of_a_group_is_no_adapters_fault() -> None:
    """Its streams go on with the next group, which loads it again."""
    loading = AdapterLoading(Bank())
    loading.apply(HoldAdapters(1, 1, [Adapter("a", path="/loras/group")]))
    with pytest.raises(FatalError):
        loading.turn()
