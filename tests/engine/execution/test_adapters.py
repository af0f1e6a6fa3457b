"""The places of adapters: which are taken, which are free again, and what is left out of a step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.adapters import UNKNOWN, AdapterBank
from engine.lora.adapter import LoraAdapter
from kernels.ops.linears.lora import NO_ADAPTER, LoraPart
from shared.errors import ModelError

COUNT, RANK = 3, 8


class Places:
    """What a model has in each place."""

    def __init__(self) -> None:
        self.reserved: tuple[int, int] | None = None
        self.held: dict[int, str] = {}

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        self.reserved = count, max_rank

    def hold_adapter(self, place: int, adapter: LoraAdapter) -> None:
        assert 0 <= place < COUNT and place not in self.held
        self.held[place] = adapter.digest

    def drop_adapter(self, place: int) -> None:
        del self.held[place]


def read(directory: Path, max_rank: int) -> LoraAdapter:
    """Its digest is the name; what is named head changes the head."""
    assert max_rank == RANK
    part = LoraPart(1) if directory.name.startswith("head") else None
    return LoraAdapter(directory.name, 1, torch.float32, directory, (), head=part)


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def bank(places: Places) -> AdapterBank:
    model: Any = places
    return AdapterBank(model, read, count=COUNT, max_rank=RANK)


def load(bank: AdapterBank, *names: str) -> list[str]:
    return [bank.load(Path("/loras") / name) for name in names]


def test_each_adapter_has_a_place_of_its_own_under_its_digest(bank: AdapterBank, places: Places) -> None:
    assert places.reserved == (COUNT, RANK) == (bank.count, bank.max_rank)
    assert load(bank, "a", "b", "c") == ["a", "b", "c"] == bank.held
    assert places.held == {bank.place_of(name): name for name in "abc"}
    assert load(bank, "b") == ["b"], "it is held already"
    with pytest.raises(ModelError, match="3 adapters are held already"):
        load(bank, "d")
    assert places.held == {bank.place_of(name): name for name in "abc"}


def test_rows_name_no_adapter_or_one_that_is_held(bank: AdapterBank) -> None:
    load(bank, "a")
    assert bank.place_of("") == NO_ADAPTER != UNKNOWN
    assert bank.place_of("b") == UNKNOWN and bank.place_of("a") not in (UNKNOWN, NO_ADAPTER)


def test_places_of_those_that_are_not_kept_are_free(bank: AdapterBank, places: Places) -> None:
    load(bank, "a", "b", "c")
    before = bank.place_of("b")
    bank.keep({"b", "elsewhere"})
    assert bank.held == ["b"] and places.held == {before: "b"} and bank.place_of("a") == UNKNOWN
    load(bank, "d", "e")
    assert sorted(places.held.values()) == ["b", "d", "e"]
    bank.keep(set())
    assert bank.held == [] and places.held == {}


def test_another_content_than_the_one_that_is_wanted_is_not_held(bank: AdapterBank, places: Places) -> None:
    with pytest.raises(ModelError, match="another content"):
        bank.load(Path("/loras/a"), "b")
    assert not places.held
    assert bank.load(Path("/loras/a"), "a") == "a"


def test_it_is_known_whether_an_adapter_that_is_held_changes_the_head(bank: AdapterBank) -> None:
    load(bank, "a")
    assert not bank.changes_head
    changes = []
    load(bank, "head1", "head2")
    for kept in ({"a", "head1"}, {"a"}):
        bank.keep(kept)
        changes.append(bank.changes_head)
    assert changes == [True, False]


def test_nothing_is_dropped_while_a_step_is_computed(bank: AdapterBank, places: Places) -> None:
    load(bank, "a", "b")
    with bank.lock:
        bank.keep({"a", "b"})  # does not wait, as it drops nothing
        dropping = threading.Thread(target=bank.keep, args=({"a"},))
        dropping.start()
        dropping.join(0.02)
        assert dropping.is_alive() and bank.held == ["a", "b"] and len(places.held) == 2
    dropping.join(20)
    assert bank.held == ["a"] and len(places.held) == 1
