"""Plain rows of objects and back: what is shared stays shared, whatever holds it."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import pytest

from services.scheduler.recording.snapshot import freeze, thaw
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Status
from services.scheduler.telemetry.prefix_misses import fingerprints
from shared.errors import ProtocolError
from shared.messages import LatencyBreakdown, Member, ServiceName
from shared.phases import Phase


def again(**state: Any) -> dict[str, Any]:
    """Frozen, written, read and thawed."""
    rows = msgspec.msgpack.decode(msgspec.msgpack.encode(freeze(state)))
    return thaw(rows)


PLAIN: dict[str, Any] = {
    "scalars": [None, True, False, 0, -1, 1.5, "text", b"bytes"],
    "containers": [[], [1, [2]], {1, 2}, frozenset({3}), (4, (5, "x")), deque([6, 7]), {"a": {"b": [8]}}],
    "counters": [Counter({"a": 2}), OrderedDict([("z", 1), ("a", 2)])],
    "array": array("i", [1, 2, 3]),
    "ours": [Status.RUNNING, Phase.DECODE, Policy(max_n=3), LatencyBreakdown([1, 2], 3.0)],
    "message": Member(ServiceName.WORKER, "w", "at-w", 1),
    "function": fingerprints,
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_thawed_is_what_was_frozen(name: str) -> None:
    found = again(value=PLAIN[name])["value"]
    assert found == PLAIN[name] and type(found) is type(PLAIN[name])
    if isinstance(found, list):
        assert [type(one) for one in found] == [type(one) for one in PLAIN[name]]


def test_orders_stay_as_they_are() -> None:
    found = again(value=OrderedDict([("z", 1), ("a", 2), ("m", 3)]))["value"]
    assert list(found) == ["z", "a", "m"]


def test_what_is_shared_is_shared_and_cycles_are_closed() -> None:
    shared, policy = [1], Policy()
    loop: list[Any] = [shared]
    loop.append(loop)
    found = again(a=shared, b=[shared, policy], c={"x": policy}, d=loop, e=(shared,))
    assert found["a"] is found["b"][0] is found["d"][0] is found["e"][0]
    assert found["b"][1] is found["c"]["x"] and found["d"][1] is found["d"]


def test_keys_that_are_made_of_others_are_hashed_when_they_are_whole() -> None:
    found = again(value={("a", (1, 2)): {frozenset({("b", 3)})}})["value"]
    assert found == {("a", (1, 2)): {frozenset({("b", 3)})}}


class Stranger:
    pass


@pytest.mark.parametrize("item", [Stranger(), Stranger, object(), print])
def test_what_is_not_the_scheduler_s_is_not_written(item: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        freeze({"value": item})


@pytest.mark.parametrize(
    "rows",
    [
        [], [["list", []]], [["dict", ["x"], [[5]]]], [["dict", ["x"], [[1]]], ["nothing", 1]],
        [["dict", ["x"], [[1]]], ["enum", "services.scheduler.state.sequence", "Status", "no such"]],
        [["dict", ["x"], [[1]]], ["object", "services.scheduler.state.sequence", "MAX_PREEMPTIONS", [], []]],
        [["dict", ["x"], [[1]]], ["function", "os", "system"]],
        [["dict", ["x"], [[1]]], ["function", "services.scheduler.state.sequence", "msgspec"]],
        [["dict", ["x", "y"], [1]]],
    ],
)  # fmt: skip
def test_rows_that_are_none_of_its_are_refused(rows: Any) -> None:
    with pytest.raises(ProtocolError):
        thaw(rows)
