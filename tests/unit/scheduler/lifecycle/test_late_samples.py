"""Sequences with a grammar may lack a sample; what that does to the books, and to no other sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.state.policy import Policy
from shared.errors import ProtocolError, RejectCode
from shared.messages import AdmittedSequence, StepPlan, StepResult
from shared.requests.grammar import Grammar, GrammarKind
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, Row, capacity
from tests.unit.scheduler.worlds.world import World

GRAMMAR = Grammar(GrammarKind.COMPILED, "start: /.*/", "guided_regex")


class LateWorker(FakeWorker):
    """Does not give a sequence with a grammar its sample, now and then; a plan that was made before that became known
    is then one token ahead."""

    def __init__(self, seed: int, chance: float, **limits: Any) -> None:
        super().__init__(capacity(**limits))
        self.rng = random.Random(seed)
        self.chance = chance
        self.held: set[int] = set()
        self.lacking: set[int] = set()
        self.num_ahead = 0

    def run(self, plan: StepPlan) -> StepResult:
        for admitted in plan.admitted:
            self._admit(admitted)
        return super().run(plan)

    def _admit(self, admitted: AdmittedSequence) -> None:
        self.lacking.discard(admitted.row)
        self.held.discard(admitted.row)
        if admitted.params.grammar is not None:
            self.held.add(admitted.row)

    def _write(self, row: Row, computed: int, scheduled: int, drafts: list[int]) -> None:
        super()._write(row, computed - self._excess(row, computed), scheduled, drafts)

    def _excess(self, row: Row, computed: int) -> int:
        place = self._place(row)
        if place not in self.lacking or computed == row.num_computed:
            self.lacking.discard(place)
            return 0
        assert computed == row.num_computed + 1
        self.num_ahead += 1
        return 1

    def _attend(self, row: Row, computed: int, scheduled: int, drafts: list[int]) -> list[int]:
        """Behind `_write`, which has moved `num_computed` to where this step ends."""
        begin = row.num_computed - scheduled
        is_due = row.num_computed == len(row.tokens) + len(drafts)
        if is_due and self._place(row) in self.held and self.rng.random() < self.chance:
            row.num_computed = len(row.tokens) - 1
            self.lacking.add(self._place(row))
            return []
        return super()._attend(row, begin, scheduled, drafts)

    def _place(self, row: Row) -> int:
        return next(place for place, other in self.rows.items() if other is row)


def world_of(seed: int, *, chance: float = 0.4, policy: Policy | None = None, **limits: Any) -> World:
    world = World(policy or Policy(max_num_batched_tokens=24), **limits)
    for name in world.workers:
        world.workers[name] = LateWorker(seed, chance, **limits)
    return world


@pytest.mark.parametrize("sliding", [(), ((1, 14),), ((9, 20),)], ids=["", "one", "nine"])
@pytest.mark.parametrize("seed", range(12))
def test_every_output_is_what_it_is_in_time(seed: int, sliding: tuple[tuple[int, int], ...]) -> None:
    """Also where layers see a window, behind which a token is computed again."""
    rng = random.Random(seed)
    limits: dict[str, Any] = {"block_size": 8, "max_num_seqs": 6, "max_model_len": 112, "sliding": sliding}
    world = world_of(seed, num_blocks=rng.choice([16, 40]), **limits)
    for index in range(14):
        more: dict[str, Any] = {"grammar": GRAMMAR, "ignore_eos": False} if rng.random() < 0.6 else {}
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 40))]
        world.add(f"r{index}", prompt, max_tokens=rng.randrange(1, 40), seed=index, n=rng.choice([1, 1, 2]), **more)
        for _ in range(rng.randrange(4)):
            world.step()
    world.run()
    world.assert_outputs()
    world.assert_idle()
    worker = world.workers["w0"]
    assert isinstance(worker, LateWorker) and worker.num_ahead > 5
    assert world.scheduler.counters.num_late_masks > 20


def test_without_a_grammar_a_sample_may_not_be_missing() -> None:
    world = World()
    world.add("r", [1, 2, 3])
    plan = world.plan("w0")
    assert plan is not None
    with pytest.raises(ProtocolError):
        world.scheduler.apply("w0", StepResult(plan.epoch, plan.step_id, [0], []))


def test_who_cannot_be_followed_ends_alone() -> None:
    world = World()
    world.add("good", [1, 2, 3])
    world.add("bad", [4, 5], grammar=GRAMMAR, n=2)
    plan = world.plan("w0")
    assert plan is not None and len(plan.rows) >= 2
    result = world.workers["w0"].run(world.plans["w0"].popleft())
    bad = next(i for i, a in enumerate(plan.admitted) if a.params.grammar is not None)
    counts = [0 if entry == bad else count for entry, count in enumerate(result.num_sampled)]
    tokens = [token for entry, token in enumerate(result.sampled_token_ids) if entry != bad]
    world.scheduler.apply("w0", StepResult(plan.epoch, plan.step_id, counts, tokens, refused={bad: "too complex"}))
    world.after()
    assert world.rejected == {"bad": RejectCode.INVALID_ARGUMENT}
    world.run()
    world.assert_outputs("good")
    world.assert_idle()


def test_a_refusal_of_what_was_sampled_makes_no_sense() -> None:
    world = World()
    world.add("r", [4, 5], grammar=GRAMMAR)
    plan = world.plan("w0")
    assert plan is not None
    for result in (
        StepResult(plan.epoch, plan.step_id, [1], [3], refused={0: "x"}),
        StepResult(plan.epoch, plan.step_id, [0], [], refused={1: "x"}),
    ):
        with pytest.raises(ProtocolError):
            world.scheduler.apply("w0", result)


def test_an_end_of_sequence_counts_whatever_else_is_asked() -> None:
    """The worker allows it only where the grammar is complete."""
    world = World()
    world.add("r", [4, 5], grammar=GRAMMAR, ignore_eos=True, min_tokens=5)
    plan = world.plan("w0")
    assert plan is not None
    world.scheduler.apply("w0", StepResult(plan.epoch, plan.step_id, [1], [0]))
    world.after()
    assert world.outputs["r", 0] == [0] and ("r", 0) in world.finished


def test_a_request_that_has_ended_is_not_ended_again_by_a_grammar_that_cannot_be_followed() -> None:
    world = World()
    world.add("r", [1, 2, 3], grammar=GRAMMAR)
    plan = world.plan("w0")
    assert plan is not None
    world.abort("r")
    assert world.scheduler.apply("w0", StepResult(plan.epoch, plan.step_id, [0], [], refused={0: "too large"}), 1.0)
    world.gather()
    assert not world.rejected
