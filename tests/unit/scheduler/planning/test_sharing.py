"""Which request goes first at a worker that several tenants want, and that no request's tokens change for it."""

from __future__ import annotations

import random

import pytest

from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import MAX_PREEMPTIONS, Sequence, Status
from shared.messages import StepPlan
from tests.unit.scheduler.worlds.world import World


def world(**policy: object) -> World:
    return World(Policy(max_num_batched_tokens=64, **policy), num_blocks=64, block_size=8, max_num_seqs=4)  # type: ignore[arg-type]


def sequence(w: World, request_id: str) -> Sequence:
    return w.scheduler.requests[request_id].sequences[0]


def fill(w: World, num_requests: int, max_tokens: int = 60) -> None:
    """Let one tenant take every row, and some of its requests wait."""
    for index in range(num_requests):
        w.add(f"hog{index}", [1 + index] * 8, tenant="hog", max_tokens=max_tokens)
    for _ in range(3):
        w.step()
    assert w.scheduler.replicas["w0"].num_free_rows == 0


def admitted(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [sequence.request_id for sequence in plan.admitted]


def test_who_has_none_gets_a_row_in_the_next_plan() -> None:
    w = world()
    fill(w, 6)
    running = [f"hog{index}" for index in range(4)]
    w.add("small", [9] * 8, tenant="small")
    assert admitted(w.plan("w0")) == ["small"]
    gave = [name for name in running if sequence(w, name).status is Status.WAITING]
    assert gave == ["hog3"], "all cost the same to recompute: the least urgent gives way"
    w.run()
    w.assert_outputs()
    w.assert_idle()


@pytest.mark.parametrize(("budget", "num_ahead"), [(12, 1), (13, 2)])
def test_no_more_go_ahead_than_have_tokens_of_the_step(budget: int, num_ahead: int) -> None:
    """Four sequences run, each ahead brings eight tokens, and the planner gives no row to one without tokens."""
    w = World(Policy(max_num_batched_tokens=budget), num_blocks=64, block_size=8, max_num_seqs=4)
    fill(w, 6)
    for name in ("one", "two"):
        w.add(name, [9] * 8, tenant=name)
    w.plan("w0")
    assert w.scheduler.replicas["w0"].num_rows["hog"] == 4 - num_ahead
    w.run()
    w.assert_outputs()


def test_rows_go_to_and_fro_no_further_than_to_an_even_share() -> None:
    w = world()
    fill(w, 6)
    for index in range(6):
        w.add(f"b{index}", [9] * 8, tenant="other", max_tokens=60)
    for _ in range(12):
        w.step()
    assert w.scheduler.replicas["w0"].num_rows["other"] in (1, 2)
    assert w.scheduler.counters.num_preemptions <= 2
    w.run()
    w.assert_outputs()


def test_one_tenant_alone_takes_nothing_from_itself() -> None:
    w = world()
    fill(w, 12)
    w.run()
    assert w.scheduler.counters.num_preemptions == 0


def test_weights_say_how_many_rows_are_ones_own() -> None:
    w = world(tenant_weights="hog=8")
    fill(w, 6)
    w.add("small", [9] * 8, tenant="small")
    w.step()
    assert sequence(w, "small").status is Status.WAITING, "four rows of weight eight are less than one of weight one"


def test_blocks_are_taken_like_rows() -> None:
    w = World(Policy(max_num_batched_tokens=64), num_blocks=20, block_size=8, max_num_seqs=8)
    for index in range(4):
        w.add(f"hog{index}", [1 + index] * 40, tenant="hog", max_tokens=20)
    for _ in range(4):
        w.step()
    assert w.scheduler.replicas["w0"].num_free_rows > 0 and sequence(w, "hog3").status is Status.WAITING
    w.add("small", [9] * 40, tenant="small")
    assert admitted(w.plan("w0")) == ["small"]
    w.run()
    w.assert_outputs()
    w.assert_idle()


def test_nothing_is_taken_where_it_would_not_be_enough() -> None:
    w = World(Policy(max_num_batched_tokens=64), num_blocks=16, block_size=8, max_num_seqs=2)
    w.add("own", [3] * 56, tenant="small", max_tokens=60)
    w.step()
    w.add("hog", [1] * 8, tenant="hog", max_tokens=20)
    w.step()
    w.add("more", [9] * 100, tenant="small")
    w.step()
    assert w.scheduler.counters.num_preemptions == 0


def test_who_was_preempted_three_times_keeps_its_row() -> None:
    w = world()
    fill(w, 4)
    for name in ("hog0", "hog1", "hog2", "hog3"):
        sequence(w, name).num_preemptions = MAX_PREEMPTIONS
    w.add("small", [9] * 8, tenant="small")
    w.step()
    assert sequence(w, "small").status is Status.WAITING
    w.run()
    w.assert_outputs()


def test_a_long_prompt_of_one_does_not_stand_before_a_short_one_of_another() -> None:
    w = World(
        Policy(max_num_batched_tokens=16, fair_prefill_tokens=0), num_blocks=64, block_size=8, max_num_seqs=8,
        max_model_len=256,
    )  # fmt: skip
    w.add("long", [1] * 200, tenant="hog")
    w.add("longer", [2] * 200, tenant="hog")
    w.step()
    w.add("short", [9] * 8, tenant="small", max_tokens=4)
    plan = w.plan("w0")
    assert admitted(plan) == ["short"] and plan is not None and sum(plan.num_scheduled_tokens) == 16
    w.run()
    w.assert_outputs()


def test_prompts_of_who_asks_for_much_come_in_small_pieces_while_another_is_about() -> None:
    w = World(
        Policy(max_num_batched_tokens=64, fair_prefill_tokens=16), num_blocks=128, block_size=8, max_num_seqs=4,
        max_model_len=128,
    )  # fmt: skip
    w.add("first", [7] * 8, tenant="small", max_tokens=2)
    w.run()
    for index in range(6):
        w.add(f"hog{index}", [1 + index] * 60, tenant="hog", max_tokens=3)
    w.run()
    prompts = [sum(n for n in plan.num_scheduled_tokens if n > 1) for plan in w.trace[2:]]
    assert max(prompts) == 64, "its last requests are within its share"
    w.assert_outputs()
    assert any(0 < total <= 16 for total in prompts), "but not the first"


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_the_same_whoever_gives_way(seed: int) -> None:
    """Tenants of several weights in small pools; invariants after every event, every token as it would be alone."""
    r = random.Random(seed)
    policy = Policy(
        max_num_batched_tokens=r.choice([16, 48]), fair_prefill_tokens=r.choice([0, 8]), tenant_weights="b=2,c=0.5",
        enable_prefix_caching=r.random() < 0.5,
    )  # fmt: skip
    w = World(policy, workers=r.choice([1, 2]), num_blocks=r.choice([14, 30]), block_size=8, max_num_seqs=6)
    for number in range(60):
        tenant = r.choice("aaaaaabc")
        prompt = [1 + r.randrange(50)] * r.randint(1, 40)
        w.add(f"{tenant}{number}", prompt, tenant=tenant, max_tokens=r.randint(1, 24), n=r.choice([1, 1, 1, 2]))
        for _ in range(r.randrange(4)):
            w.step()
    w.run()
    w.assert_outputs()
    w.assert_idle()
    assert w.scheduler.counters.num_preemptions > 0
