"""Drafts change no token, whatever they guess, and whatever happens to them: the scheduler's core, real model
runners and real proposers in one process.  Each test also checks that drafts were verified, and what it is about."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import msgspec
import pytest

from services.draft.proposer import Guess
from services.scheduler.state.policy import Policy
from shared.messages import AdmittedSequence, DraftCapacity
from tests.integration.engine import ROOT, Ask, Engine, ask, token_ids
from tests.integration.test_equivalences import asks, solo

DRAFT = str(ROOT / "models" / "pageant-stories-draft")
FIXED: dict[str, Any] = {"num_draft_tokens": 4}
VOCAB = 4096

Make = partial[Engine]
make: Make = partial(Engine, kernels="native")


class Guesser:
    """A `services.draft.proposer.Proposer` that guesses at random."""

    def __init__(self) -> None:
        self.capacity = DraftCapacity(64, 1024, VOCAB, "guesser")
        self._rng = random.Random(7)

    def reset(self) -> None: ...

    def open(self, sequence: AdmittedSequence) -> None: ...

    def close(self, row: int) -> None: ...

    def commit(self, row: int, token_ids: list[int]) -> None: ...

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        return 1

    def finished(self, row: int, goal: int) -> bool:
        return True

    def is_behind(self, row: int) -> bool:
        return False

    def guess(self, row: int, count: int) -> Guess:
        return Guess([self._rng.randrange(VOCAB) for _ in range(count)])


def drafting(policy: Policy | None = None, *, draft: str = DRAFT, drafts: int = 1, **settings: Any) -> Engine:
    """An engine with so many drafts, and four draft tokens at a time unless the policy says otherwise."""
    engine = make(policy or Policy(**FIXED), draft=draft, **settings)
    for index in range(drafts):
        engine.join_draft(f"draft{index}")
    return engine


def check_same(engine: Engine, *, least: int = 50) -> None:
    """All requests of every kind give the tokens of their solo runs, and so many draft tokens were accepted."""
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.counters.num_accepted_tokens >= least
    assert engine.counters.num_draft_tokens > engine.counters.num_accepted_tokens, "and some were not"


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 8])
def test_a_draft_model_changes_no_token(num_draft_tokens: int) -> None:
    engine = drafting(Policy(num_draft_tokens=num_draft_tokens, max_num_batched_tokens=4096))
    check_same(engine)
    lengths = {count for _, plan in engine.plans for count in plan.num_draft_tokens}
    assert max(lengths) == num_draft_tokens


def test_nor_on_torch_s_kernels() -> None:
    engine = Engine(Policy(**FIXED), kernels="torch", draft=DRAFT)
    engine.join_draft("draft0")
    few = list(asks())[:6]
    plain = Engine(Policy(), kernels="torch").generate(few)
    assert token_ids(engine.generate(few)) == token_ids(plain)
    assert engine.counters.num_accepted_tokens > 0


def test_prompt_lookup_changes_no_token() -> None:
    repeating = [ask([5 + n, 90, 7, 300 + n] * 6, seed=n, max_tokens=60, temperature=0.3 * n) for n in range(5)]
    engine = drafting(draft="ngram")
    assert token_ids(engine.generate(repeating)) == token_ids(make().generate(repeating))
    assert engine.counters.num_accepted_tokens > 10
    assert token_ids(engine.generate(list(asks()))) == solo(make), "and where nothing is found"


def test_wrong_guesses_change_no_token() -> None:
    engine = make(Policy(**FIXED))
    engine.join_draft("guesser", Guesser())
    assert token_ids(engine.generate(list(asks()))) == solo(make)
    assert engine.counters.num_draft_tokens > 1000
    assert engine.counters.num_accepted_tokens < 0.02 * engine.counters.num_draft_tokens


def test_a_number_that_is_measured_changes_no_token() -> None:
    long = [ask([5 + n] * 10, seed=n, max_tokens=250, temperature=0.5) for n in range(4)]
    engine = drafting(Policy())
    assert token_ids(engine.generate(long)) == token_ids(make().generate(long))
    assert engine.counters.num_accepted_tokens > 50
    lengths = {max(plan.num_draft_tokens, default=0) for _, plan in engine.plans}
    assert len(lengths) > 1, "more than one number was tried"


def test_chunked_prompts_and_cached_prefixes() -> None:
    engine = drafting(Policy(max_num_batched_tokens=64, long_prefill_token_threshold=24, **FIXED))
    check_same(engine)
    check_same(engine)
    assert engine.counters.num_chunked_prefills > 10 and engine.counters.num_prefix_cache_hits > 500
    together = [plan for _, plan in engine.plans if plan.draft_token_ids and max(plan.num_scheduled_tokens) > 16]
    assert together, "drafts were verified beside prompts"


def test_preempted_and_evicted() -> None:
    growing = [ask([5 + index] * 10, seed=index, max_tokens=80, temperature=1.0) for index in range(8)]
    wanted = token_ids(make(Policy(enable_prefix_caching=False)).generate(growing))
    engine = drafting(num_blocks=16)
    assert token_ids(engine.generate(growing)) == wanted
    assert engine.counters.num_preemptions > 0
    check_same(engine)
    assert engine.core.replicas["w0"].pool.num_evictions > 20


def test_two_workers_and_two_drafts() -> None:
    engine = drafting(drafts=2, workers=2)
    check_same(engine)
    by_worker = {name for name, plan in engine.plans if plan.draft_token_ids}
    assert by_worker == {"w0", "w1"}


def test_a_lost_worker_s_sequences_are_drafted_for_elsewhere() -> None:
    engine = drafting(workers=2)
    ids = [engine.add(one) for one in asks()]
    for _ in range(6):
        engine.step()
    moved = list(engine.core.replicas["w0"].running)
    assert any(engine.core.records.of(sequence).num_draft_tokens for sequence in moved)
    before = {sequence: engine.core.records.of(sequence).num_draft_tokens for sequence in moved}
    engine.lose("w0")
    engine.run()
    assert token_ids(engine.outputs_of(ids, asks())) == solo(make)
    assert any(engine.core.records.of(sequence).num_draft_tokens > before[sequence] for sequence in moved)


def test_a_draft_that_dies_and_comes_back() -> None:
    engine = drafting()
    ids = [engine.add(one) for one in asks()]
    for _ in range(6):
        engine.step()
    before = engine.counters.num_drafts
    engine.lose_draft("draft0")
    for _ in range(4):
        engine.step()
    assert 0 < before == engine.counters.num_drafts
    engine.join_draft("draft0")
    engine.run()
    assert engine.counters.num_drafts > before
    assert token_ids(engine.outputs_of(ids, asks())) == solo(make)


def test_a_draft_that_falls_silent_and_speaks_again() -> None:
    engine = drafting()
    ids = [engine.add(one) for one in asks()]
    for _ in range(6):
        engine.step()
    engine.drafts["draft0"].silent = True
    for _ in range(5):
        engine.step()
    before = engine.counters.num_drafts
    assert engine.counters.num_late_drafts > 0
    engine.drafts["draft0"].silent = False
    engine.run()
    assert engine.counters.num_drafts > before, "it was told again what it had missed"
    assert token_ids(engine.outputs_of(ids, asks())) == solo(make)


def test_log_probabilities_are_those_without_drafts() -> None:
    wanting = [
        Ask(one.prompt, msgspec.structs.replace(one.params, logprobs=2, prompt_logprobs=1)) for one in few_asks()
    ]
    plain, drafted = make().generate(wanting), drafting().generate(wanting)
    assert drafted == plain, "tokens, log-probabilities, of the prompt too, and reasons"


def test_rejection_is_the_same_where_nothing_is_drawn() -> None:
    greedy = [Ask(one.prompt, msgspec.structs.replace(one.params, temperature=0.0, n=1)) for one in few_asks()]
    engine = drafting(Policy(acceptance="rejection", **FIXED))
    assert token_ids(engine.generate(greedy)) == token_ids(make().generate(greedy))
    assert engine.counters.num_accepted_tokens > 0
    drawn = engine.generate(list(few_asks()))
    assert all(len(output.token_ids) > 0 and output.finish_reason for request in drawn for output in request)


def test_a_request_that_declines_gets_no_drafts() -> None:
    one = few_asks()[0]
    engine = drafting()
    declined = Ask(one.prompt, msgspec.structs.replace(one.params, speculate=False))
    assert token_ids(engine.generate([declined])) == token_ids(make().generate([one]))
    assert engine.counters.num_draft_tokens == 0


@cache
def few_asks() -> tuple[Ask, ...]:
    return asks()[:8]
