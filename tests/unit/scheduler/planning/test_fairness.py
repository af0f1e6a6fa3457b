"""Tenants share by weight what there is; priorities age; no sequence is preempted more than three times."""

from __future__ import annotations

import pytest

from services.scheduler.state.fairness import Shares, parse_weights
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import MAX_PREEMPTIONS, Status
from shared.errors import ConfigError
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.world import World


def add(
    world: World, request_id: str, tenant: str = "", *, priority: int = 0, now: float = 0.0, length: int = 8
) -> None:
    params = SamplingParams(max_tokens=10, seed=1, ignore_eos=True).resolved(GenerationDefaults(), max_tokens=10)
    header = RequestHeader(request_id, "g0", tenant=tenant, priority=priority)
    world.scheduler.add(AddRequest(header, params, pack_tokens([1 + len(request_id)] * length), [0]), now=now)


def order(world: World) -> list[str]:
    """Requests in the order in which they finish, one row and so one at a time."""
    finished: list[str] = []
    while world.step():
        finished += [request_id for request_id, _ in world.finished if request_id not in finished]
    return finished


def narrow(**policy: object) -> World:
    return World(Policy(max_num_batched_tokens=64, enable_prefix_caching=False, **policy), max_num_seqs=1)  # type: ignore[arg-type]


def test_who_sends_ten_times_as_much_gets_no_more() -> None:
    world = narrow()
    for index in range(40):
        add(world, f"hog{index}", "hog")
    for index in range(4):
        add(world, f"small{index}", "small")
    places = [place for place, request_id in enumerate(order(world)) if request_id.startswith("small")]
    assert max(places) <= 9, "two tenants take turns until one has nothing left"


def test_weights_are_shares() -> None:
    world = narrow(tenant_weights="gold=3")
    for index in range(30):
        add(world, f"a{index}", "gold")
        add(world, f"b{index}", "tin")
    first = order(world)[:20]
    assert 14 <= sum(request_id.startswith("a") for request_id in first) <= 16


def test_having_been_away_earns_nothing() -> None:
    world = narrow()
    for index in range(10):
        add(world, f"a{index}", "early")
    for _ in range(60):
        world.step()
    for index in range(10):
        add(world, f"b{index}", "late")
    done = len(world.finished)
    rest = order(world)[done:]
    assert 3 <= sum(request_id.startswith("b") for request_id in rest[:8]) <= 5


def test_within_one_tenant_the_order_is_that_of_arrival() -> None:
    world = narrow()
    for index in range(6):
        add(world, f"r{index}", "only")
    assert order(world) == [f"r{index}" for index in range(6)]


def test_priorities_age() -> None:
    world = narrow(scheduling_policy="priority", priority_ageing=10.0)
    add(world, "old", priority=2, now=0.0)
    add(world, "young", priority=1, now=5.0)
    add(world, "younger", priority=1, now=25.0)
    assert order(world) == ["young", "old", "younger"]


def test_nobody_is_preempted_more_than_three_times() -> None:
    policy = Policy(max_num_batched_tokens=32, scheduling_policy="priority", enable_prefix_caching=False)
    world = World(policy, num_blocks=16, block_size=8, max_num_seqs=6)
    world.add("low", [1] * 6, priority=9, max_tokens=110)
    (low,) = world.scheduler.requests["low"].sequences
    for wave in range(8):
        while low.status is Status.WAITING:
            world.step()
        world.add(f"urgent{wave}", [2 + wave] * 6, max_tokens=110, seed=wave)
        while low.status is Status.RUNNING and f"urgent{wave}" in world.scheduler.requests:
            world.step()
    world.run()
    world.assert_outputs()
    world.assert_idle()
    assert low.num_preemptions == MAX_PREEMPTIONS


def test_counters() -> None:
    shares = Shares({"a": 2.0})
    shares.charge_prompt("a", 10)
    shares.charge_output("b", 3)
    assert (shares.served("a"), shares.served("b"), shares.served("c")) == (5.0, 6.0, 0.0)
    shares.lift("c", ["a", "b"])
    assert shares.served("c") == 5.0
    shares.lift("b", ["a"])
    assert shares.served("b") == 6.0


@pytest.mark.parametrize("text", ["a", "a=", "a=x", "a=0", "a=-1", "a=inf", "a=nan"])
def test_bad_weights(text: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        parse_weights(text)


def test_good_weights() -> None:
    assert parse_weights(" a=2, b = 0.5 ,") == {"a": 2.0, "b": 0.5}
    assert parse_weights("") == {}


def test_a_newcomer_takes_rows_at_once_until_shares_are_near_each_other() -> None:
    world = World(Policy(max_num_batched_tokens=256, enable_prefix_caching=False), max_num_seqs=6)
    for index in range(6):
        add(world, f"hog{index}", "hog")
    for _ in range(3):
        world.step()
    for index in range(6):
        add(world, f"small{index}", "small")
    plan = world.plan("w0")
    assert plan is not None and [one.request_id for one in plan.admitted] == ["small0", "small1"]
    world.answer("w0")
    world.run()
    assert len(world.finished) == 12
