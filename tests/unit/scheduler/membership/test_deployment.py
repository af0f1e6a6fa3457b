"""Who may join a deployment: a worker that computes other bits is refused by the name of what differs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.scheduler.membership.roster import Membership
from shared.messages import Fingerprint, Heartbeat, Hello, ServiceName, SlidingPool, WorkerCapacity
from shared.messages.fingerprint import PARTS, TEXT_PARTS

CAPACITY = WorkerCapacity(64, 16, 8, 512, 1000, "m", "float32", "cpu")
MINE = Fingerprint(**{part: f"{part} of all" for part in PARTS})
WORKER_PARTS = [part for part in PARTS if part not in TEXT_PARTS]


def other(*parts: str) -> Fingerprint:
    return msgspec.structs.replace(MINE, **dict.fromkeys(parts, "another"))


def worker(name: str, fingerprint: Fingerprint | None = MINE, **capacity: Any) -> Hello:
    offer = msgspec.structs.replace(CAPACITY, **capacity)
    return Hello(ServiceName.WORKER, name, f"memory://{name}", 1, "s", offer, None, fingerprint)


def tokenizer(name: str, fingerprint: Fingerprint) -> Hello:
    text = Fingerprint(**{part: getattr(fingerprint, part) for part in TEXT_PARTS})
    return Hello(ServiceName.TOKENIZER, name, f"memory://{name}", 1, "s", fingerprint=text)


def gateway(name: str, *alive: Fingerprint) -> Hello:
    return Hello(ServiceName.GATEWAY, name, f"memory://{name}", 1, "s", alive=list(alive))


def refusal(troupe: Membership, hello: Hello, *, is_alive: bool = False) -> str:
    return troupe.refusal(hello, "s", is_alive=is_alive) or ""


def troupe_of(*hellos: Hello, mixed_workers: bool = False) -> Membership:
    troupe = Membership(mixed_workers=mixed_workers)
    for hello in hellos:
        assert not refusal(troupe, hello)
        troupe.join(hello, 0.0)
    return troupe


@pytest.mark.parametrize("part", PARTS)
def test_a_worker_beside_one_that_computes_otherwise(part: str) -> None:
    troupe = troupe_of(worker("a"))
    assert refusal(troupe, worker("b")) == ""
    words = refusal(troupe, worker("b", other(part)))
    assert words == f"its {part} is 'another', that of a is '{part} of all'"


def test_everything_that_differs_is_named() -> None:
    words = refusal(troupe_of(worker("a")), worker("b", other("dtype", "weights"), block_size=32))
    assert all(f"its {part} is" in words for part in ("dtype", "weights", "block_size"))


def test_one_without_a_fingerprint_does_not_pass() -> None:
    assert "no fingerprint" in refusal(troupe_of(worker("a")), worker("b", None))


@pytest.mark.parametrize("part", PARTS)
def test_the_successor_of_the_only_worker(part: str) -> None:
    """While requests are alive it must compute the same; when none is, a deployment may become another."""
    troupe = troupe_of(worker("a"))
    troupe.leave("a", 1)
    assert f"its {part} is" in refusal(troupe, worker("b", other(part)), is_alive=True)
    assert refusal(troupe, worker("b"), is_alive=True) == ""
    assert refusal(troupe, worker("b", other(part))) == ""
    assert [one.name for one in troupe.fingerprints(is_alive=True)] == [MINE.name]
    assert troupe.fingerprints(is_alive=False) == []


@pytest.mark.parametrize("limit", ["block_size", "max_model_len", "vocab_size", "model", "dtype"])
def test_the_successor_serves_what_the_first_served(limit: str) -> None:
    troupe = troupe_of(worker("a"))
    troupe.leave("a", 1)
    offer: dict[str, Any] = {limit: "another" if isinstance(getattr(CAPACITY, limit), str) else 32}
    assert f"its {limit} is" in refusal(troupe, worker("b", **offer), is_alive=True)
    assert refusal(troupe, worker("b", **offer)) == ""


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_a_tokenizer_of_another_model(part: str) -> None:
    for mixed in (False, True):
        troupe = troupe_of(worker("a"), mixed_workers=mixed)
        assert f"its {part} is" in refusal(troupe, tokenizer("t", other(part)))
        troupe.join(tokenizer("t", MINE), 0.0)
        assert f"its {part} is" in refusal(troupe, tokenizer("u", other(part)))
        troupe.leave("a", 1)
        assert f"its {part} is" in refusal(troupe, worker("b", other(part))), "the tokenizers are still there"
    assert refusal(troupe_of(worker("a", other("weights"))), tokenizer("t", MINE)) == "", (
        "weights are none of its affair"
    )


def test_mixed_workers_agree_on_what_clients_may_ask() -> None:
    troupe = troupe_of(worker("a"), worker("b", other(*WORKER_PARTS), block_size=32, dtype="bf"), mixed_workers=True)
    assert {one.name for one in troupe.fingerprints(is_alive=False)} == {MINE.name, other(*WORKER_PARTS).name}
    limits: dict[str, Any] = {"max_model_len": 32, "vocab_size": 32, "model": "another"}
    for limit, value in limits.items():
        offer: dict[str, Any] = {limit: value}
        assert f"its {limit} is" in refusal(troupe, worker("c", **offer))


def test_a_gateway_tells_the_next_scheduler_what_is_alive() -> None:
    troupe = troupe_of()
    assert troupe.recall(gateway("g", MINE)) == {}
    troupe.join(gateway("g", MINE), 0.0)
    had_streams = troupe.has_streams
    assert had_streams
    assert "its dtype is 'another', that of the worker that began the open requests" in refusal(
        troupe, worker("b", other("dtype")), is_alive=had_streams
    )
    assert refusal(troupe, worker("a"), is_alive=had_streams) == ""
    troupe.heard(Heartbeat(ServiceName.GATEWAY, "g", 1), 0.0)
    assert not troupe.has_streams and refusal(troupe, worker("b", other("dtype")), is_alive=troupe.has_streams) == ""


def test_a_worker_that_was_quicker_than_the_gateway_has_to_go() -> None:
    troupe = troupe_of(worker("b", other("dtype")), tokenizer("t", MINE))
    ((name, words),) = troupe.recall(gateway("g", MINE)).items()
    assert name == "b", "a tokenizer computes nothing"
    assert "its dtype is 'another'" in words
    troupe.leave("b", 1)
    assert "dtype" in refusal(troupe, worker("b", other("dtype")), is_alive=True)
    assert refusal(troupe, worker("a"), is_alive=True) == ""
    assert troupe_of(worker("a")).recall(gateway("g", MINE)) == {}
    assert troupe_of(worker("b", other("dtype")), mixed_workers=True).recall(gateway("g", MINE)) == {}


def test_a_name_for_clients() -> None:
    assert MINE.name.startswith("fp_") and len(MINE.name) == 15
    assert len({MINE.name, *(other(part).name for part in PARTS)}) == len(PARTS) + 1


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ([(64, 6)], ""),
        ([(64, 6), (100, 32)], ""),
        ([(400, 32)], ""),
        ([(64, 5)], "its pool for a window of 64 tokens has 5 blocks, which must be in 6..4194304"),
        ([(400, 26)], "its pool for a window of 400 tokens has 26 blocks, which must be in 27..4194304"),
        ([(64, 1 << 23)], "its pool for a window of 64 tokens has 8388608 blocks, which must be in 6..4194304"),
        ([(100, 32), (64, 32)], "the windows of its sliding pools are [100, 64], which must be positive and grow"),
        ([(64, 32), (64, 32)], "the windows of its sliding pools are [64, 64], which must be positive and grow"),
        ([(0, 32)], "the windows of its sliding pools are [0], which must be positive and grow"),
        ([(1 << 30, 32)], f"the windows of its sliding pools are [{1 << 30}], which must be positive and grow"),
        ([(window, 32) for window in range(1, 18)], "it has 17 sliding pools, more than 16"),
    ],
)
def test_sliding_pools_without_room_for_a_sequence(pools: list[tuple[int, int]], reason: str) -> None:
    sliding = [SlidingPool(*one) for one in pools]
    assert refusal(troupe_of(), worker("a", sliding=sliding)) == reason
