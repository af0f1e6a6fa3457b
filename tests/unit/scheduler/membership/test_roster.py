"""The live instances: how the version of the roster grows, which instances are silent, which capacities are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.scheduler.membership.roster import (
    CAN_BE_NONE,
    MAX_ADDRESS,
    MAX_REASON,
    MAX_SECRET,
    PLAUSIBLE,
    SPACE_BYTES,
    Membership,
    implausible,
)
from shared.messages import (
    DraftCapacity,
    DropBlocks,
    FetchBlocks,
    Heartbeat,
    Hello,
    LookUpBlocks,
    Member,
    OfferBlocks,
    ServiceName,
    StoreCapacity,
)
from tests.unit.scheduler.membership.test_deployment import CAPACITY, MINE, gateway, refusal, troupe_of, worker


def draft(vocab_size: int) -> Hello:
    return Hello(ServiceName.DRAFT, "d", "memory://d", 1, "s", None, DraftCapacity(8, 128, vocab_size, "m"))


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_a_capacity_has_bounds(name: str) -> None:
    offer: Any = DraftCapacity(8, 128, 1000, "m") if name == "num_rows" else CAPACITY
    most, least = PLAUSIBLE[name], 0 if name in CAN_BE_NONE else 1
    for value in (least, most):
        assert implausible(msgspec.structs.replace(offer, **{name: value})) is None
    for value in (least - 1, most + 1):
        assert f"its {name} is {value}" in (implausible(msgspec.structs.replace(offer, **{name: value})) or "")
    assert implausible(None) is None


def test_a_draft_has_the_workers_vocabulary_or_none() -> None:
    troupe = troupe_of(gateway("g"), worker("w"))
    assert not refusal(troupe, draft(0)) and not refusal(troupe, draft(CAPACITY.vocab_size))
    assert refusal(troupe, draft(7)) == f"its vocab_size is 7, that of w is {CAPACITY.vocab_size}"
    assert not refusal(troupe_of(gateway("g")), draft(7)), "there is no worker to differ from"


def test_the_version_grows_when_an_instance_comes_or_begins_anew_or_goes() -> None:
    troupe = Membership()
    first = troupe.version
    assert first == 1 and troupe.join(gateway("g"), 0.0) and troupe.version == 2
    assert not troupe.join(gateway("g"), 1.0) and troupe.version == 2
    assert troupe.join(msgspec.structs.replace(gateway("g"), epoch=5), 1.0) and troupe.version == 3
    assert troupe.leave("g", 1) is None and troupe.leave("x", 1) is None and troupe.version == 3
    assert troupe.leave("g", 5) == Member(ServiceName.GATEWAY, "g", "memory://g", 5)
    assert troupe.version == 4 and troupe.members == []


def test_silence_counts_from_the_last_word_of_the_same_life() -> None:
    troupe = troupe_of(gateway("g"), gateway("h"))
    beats = [Heartbeat(ServiceName.GATEWAY, name, epoch) for name, epoch in (("g", 1), ("g", 2), ("x", 1))]
    assert [troupe.heard(beat, 5.0 + 4.0 * (beat != beats[0])) for beat in beats] == [True, False, False]
    assert troupe.take_silent(10.0, 10.0) == []
    assert [member.instance for member in troupe.take_silent(10.5, 10.0)] == ["h"]
    assert [member.instance for member in troupe.take_silent(15.5, 10.0)] == ["g", "h"]
    troupe.excuse(15.5)
    assert troupe.take_silent(25.5, 10.0) == [] and len(troupe.take_silent(25.6, 10.0)) == 2


def test_what_members_say_of_themselves() -> None:
    troupe, found = troupe_of(gateway("g"), worker("w")), []

    def state() -> tuple[bool, list[str], set[str]]:
        return troupe.has_streams, troupe.stalled, set(troupe.computing)

    found.append(state())
    troupe.heard(Heartbeat(ServiceName.GATEWAY, "g", 1, stalled="x" * (MAX_REASON + 9), alive=["fp"]), 0.0)
    troupe.heard(Heartbeat(ServiceName.WORKER, "w", 1, is_computing=True), 0.0)
    found.append(state())
    troupe.heard(Heartbeat(ServiceName.GATEWAY, "g", 1), 0.0)
    found.append(state())
    troupe.join(gateway("g", MINE), 1.0)
    found.append(state())
    assert found == [
        (False, [], set()), (True, [f"g: {'x' * MAX_REASON}"], {"w"}), (False, [], {"w"}), (True, [], {"w"})
    ]  # fmt: skip


def test_where_members_are() -> None:
    troupe = troupe_of(gateway("g"), worker("w"), worker("v"))
    assert troupe.address_of("w") == "memory://w"
    assert troupe.addresses(ServiceName.WORKER) == ["memory://w", "memory://v"]
    assert troupe.addresses(ServiceName.DRAFT) == []
    assert troupe.fingerprints(is_alive=False) == [MINE], "each once"


def test_an_order_is_told_where_its_store_is_and_is_not_sent_once_that_has_left() -> None:
    store = Hello(ServiceName.STORE, "s", "at-s", 1, "s", store=StoreCapacity("unix:/run/s.blocks", b"secret", 9))
    troupe = troupe_of(gateway("g"), worker("w"), store)
    offer, fetch = OfferBlocks(1, 1, 0, "s", [], [], []), FetchBlocks(1, 2, 0, "s", [], [], [])
    for order in (offer, fetch):
        told = msgspec.structs.replace(order, address="unix:/run/s.blocks", secret=b"secret")
        assert troupe.with_store(order) == told
        assert troupe.with_store(msgspec.structs.replace(order, store="w")) is None, "it has no data link"
    for to_store in (DropBlocks("s"), LookUpBlocks("s", [])):
        assert troupe.with_store(to_store) is to_store, "it goes to the store, which knows where it is"
    troupe.leave("s", 1)
    assert [troupe.with_store(order) for order in (offer, fetch, DropBlocks("s"))] == [None] * 3


def test_a_data_link_has_an_address_and_a_secret_and_blocks_that_move_have_a_size() -> None:
    def reason(address: str = "unix:/run/s", secret: bytes = b"s", space: bytes = b"", size: int = 0) -> str:
        offer = msgspec.structs.replace(CAPACITY, block_space=space, block_bytes=size)
        hello = msgspec.structs.replace(worker("w"), worker=offer, store=StoreCapacity(address, secret, 0))
        return refusal(troupe_of(), hello)

    assert not reason("a" * MAX_ADDRESS, b"s" * MAX_SECRET) and not reason(space=b"s" * SPACE_BYTES, size=1)
    for address, secret in (("a" * (MAX_ADDRESS + 1), b"s"), ("a", b"s" * (MAX_SECRET + 1)), ("a", b"")):
        assert reason(address, secret) == (
            f"its data link needs an address of at most {MAX_ADDRESS} bytes and a secret of 1 to {MAX_SECRET} bytes"
        )
    for space, size in ((b"s" * (SPACE_BYTES + 1), 1), (b"s", 1), (b"s" * SPACE_BYTES, 0)):
        assert reason(space=space, size=size) == f"its blocks have a space of {len(space)} bytes, or no size"
    store = Hello(ServiceName.STORE, "s", "at-s", 1, "s", store=StoreCapacity("a" * 600, b"s", 0))
    assert "data link" in refusal(troupe_of(), store) and not refusal(troupe_of(), worker("w"))


def test_of_silent_lives_without_end_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.membership.roster.MAX_SILENCED", 2)
    troupe = Membership()

    def is_silent(name: str) -> None:
        troupe.join(gateway(name), 0.0)
        assert [member.instance for member in troupe.take_silent(20.0, 10.0)] == [name]
        troupe.leave(name, 1)

    for name in ("a", "b", "a", "c"):
        is_silent(name)
    assert [troupe.is_back(gateway(name)) for name in ("a", "b", "c", "c")] == [True, False, True, False]
