"""The rows of a step that have grammars: which drafts stay, which tokens are allowed where, and what has to wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from engine.execution.constraints.constrained_step import ConstrainedStep, cut_drafts
from engine.execution.constraints.row_automata import Held, RowAutomata
from engine.execution.outputs.sampled_tokens import SampledTokens
from engine.execution.schedule import Schedule, read_schedule
from engine.execution.tables.rows import RowTable
from shared.messages import AdmittedSequence, DraftDistribution, StepPlan
from shared.requests.grammar import Grammar, GrammarKind
from tests.engine.execution.constraints.test_row_automata import EOS, TOKENIZER, Said, choice, load, sequence

SIZE = 8
YES, NO = TOKENIZER.encode_plain("yes"), TOKENIZER.encode_plain("no")
WRONG = TOKENIZER.encode_plain("zzz")[0]
BROKEN = Grammar(GrammarKind.COMPILED, "start: nowhere")


@pytest.fixture
def automata() -> Iterator[RowAutomata]:
    made = RowAutomata(load, patience=20.0)
    yield made
    made.reset()


class Step:
    """Rows with grammars or without, and the plan of a step in which each computes its two tokens."""

    def __init__(self, automata: RowAutomata, *grammars: Grammar | None) -> None:
        self.automata = automata
        self.table = RowTable(
            num_rows=8, max_model_len=32, block_size=SIZE, num_blocks=32, vocab_size=TOKENIZER.vocab_size,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.admitted: list[AdmittedSequence] = [sequence(row, one) for row, one in enumerate(grammars)]
        for one in self.admitted:
            automata.admit(one)
            self.table.admit(one, 0)
            self.table.append_blocks([one.row], [2], [2 * one.row, 2 * one.row + 1])

    def plan(self, drafts: Sequence[Sequence[int]] = (), *, part: int = -1, rejection: bool = False) -> StepPlan:
        """`part`: the row that computes only its first token."""
        rows = [one.row for one in self.admitted]
        counts = [len(tokens) for tokens in drafts]
        scheduled = [2 - (row == part) + count for row, count in zip(rows, counts or [0] * len(rows), strict=True)]
        flat = [token for tokens in drafts for token in tokens]
        distributions = [DraftDistribution(bytes([place]), b"") for place in range(len(flat))] if rejection else []
        return StepPlan(
            1, 0, [], rows, [0] * len(rows), scheduled, [0] * len(rows), [], [], [], counts, flat, distributions,
            rejection,
        )  # fmt: skip

    def schedule(self, drafts: Sequence[Sequence[int]] = (), *, part: int = -1) -> Schedule:
        return read_schedule(self.plan(drafts, part=part), self.table)

    def ready(self) -> None:
        for one in self.admitted:
            if held := self.automata.of(one.row):
                self.automata.wait([held], others=False)


@pytest.mark.parametrize("rejection", [False, True])
def test_drafts_are_cut_where_they_break_the_grammar(automata: RowAutomata, rejection: bool) -> None:
    step = Step(automata, choice("yes"), None, BROKEN, choice("yes"), choice("no"))
    step.ready()
    drafts = [[*YES, 0, WRONG, 9], [5, 6], [7, 8], [], [WRONG, 4]]
    plan = step.plan(drafts, rejection=rejection)
    cut = cut_drafts(plan, automata)
    more = int(rejection)  # the first that breaks it
    kept = [drafts[0][: len(YES) + 1 + more], [5, 6], [], [], [WRONG][:more]]
    assert cut.num_draft_tokens == [len(tokens) for tokens in kept]
    assert cut.draft_token_ids == [token for tokens in kept for token in tokens]
    assert cut.num_scheduled_tokens == [2 + len(tokens) for tokens in kept]
    if rejection:
        starts = [0, *np.cumsum([len(tokens) for tokens in drafts]).tolist()]
        places = [start + n for start, tokens in zip(starts, kept, strict=False) for n in range(len(tokens))]
        assert [one.token_ids for one in cut.draft_distributions] == [bytes([place]) for place in places]
    else:
        assert cut.draft_distributions == []


def test_whole_drafts_that_are_allowed_stay_whole(automata: RowAutomata) -> None:
    step = Step(automata, choice("yes"))
    step.ready()
    for rejection in (False, True):
        assert cut_drafts(step.plan([YES], rejection=rejection), automata).draft_token_ids == YES


def test_plans_without_drafts_or_grammars_stay_as_they_are(automata: RowAutomata) -> None:
    step = Step(automata, choice("yes"), None)
    for plan in (step.plan(), step.plan([[], []]), step.plan([[], [5]])):
        assert cut_drafts(plan, automata) is plan
    free = Step(RowAutomata(load), None)
    plan = free.plan([[5]])
    assert cut_drafts(plan, free.automata) is plan


def test_what_each_grammar_allows_goes_to_its_own_sample(automata: RowAutomata) -> None:
    step = Step(automata, None, choice("yes"), choice("maybe"), choice("no"))
    step.ready()
    schedule, missing = ConstrainedStep(automata, step.schedule(part=2)).hold()
    allowance = schedule.positions.allowance
    assert missing is None and allowance is not None
    assert allowance.places.tolist() == [1, 2], "of the samples: the third row computes only a part"
    first = [{TOKENIZER.decode([int(token)])[0] for token in np.flatnonzero(one)} for one in allowance.allowed]
    assert first == [{"y"}, {"n"}]


def test_rows_without_grammars_are_left_alone(automata: RowAutomata) -> None:
    schedule = Step(automata, None).schedule()
    held = ConstrainedStep(automata, schedule)
    assert held.hold() == (schedule, None) and held.helds == {}
    held.advance(cast(SampledTokens, None), None)
    other = Step(automata, choice("yes"), None)
    part = other.schedule(part=0)
    assert ConstrainedStep(automata, part).hold() == (part, None), "the one with a grammar takes no token"


def test_a_grammar_that_cannot_be_followed_is_refused_by_entry(automata: RowAutomata) -> None:
    step = Step(automata, None, None, BROKEN, choice("yes"))
    step.ready()
    held, missing = ConstrainedStep(automata, step.schedule(part=0)).hold()
    assert missing is not None and missing.samples.tolist() == [1] and list(missing.refused) == [2]
    assert held.positions.allowance is not None and held.positions.allowance.places.tolist() == [2]
    last = Step(automata, BROKEN)
    last.ready()
    alone = last.schedule()
    same, missing = ConstrainedStep(automata, alone).hold()
    assert same is alone and missing is not None and list(missing.refused) == [0]


def test_a_grammar_that_is_late_lacks_its_sample_and_is_not_refused(automata: RowAutomata) -> None:
    step = Step(automata, choice("yes"), None)
    step.ready()
    late = automata.of(0)
    assert late is not None
    said = Said(YES[:1])
    automata.patience = 0.01
    automata.advance(late, said, 0)
    held = ConstrainedStep(automata, step.schedule())
    _, missing = held.hold()
    assert missing is not None and missing.samples.tolist() == [0] and missing.refused == {}
    before = late.standing
    held.advance(cast(SampledTokens, Said([WRONG])), missing)
    assert late.standing is before, "it took no token"
    said.ended.set()


def test_drafts_are_tried_of_rows_that_have_some_and_can_be_followed(
    automata: RowAutomata, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(automata, choice("yes"), choice("no"), BROKEN, choice("maybe"))
    step.ready()
    late = automata.of(3)
    assert late is not None
    said, tried = Said(YES[:1]), []
    automata.patience = 0.01
    automata.advance(late, said, 0)
    monkeypatch.setattr(automata, "try_drafts", lambda held, tokens: tried.append((held, tokens)))
    ConstrainedStep(automata, step.schedule([YES, [], [5], [6]]))
    assert tried == [(automata.of(0), YES)]
    said.ended.set()


def test_each_draft_has_what_is_allowed_behind_those_before_it(automata: RowAutomata) -> None:
    step = Step(automata, None, choice("yes"), choice("no"))
    step.ready()
    drafts = [[5, 6], YES, NO]
    schedule, missing = ConstrainedStep(automata, step.schedule(drafts)).hold()
    allowance = schedule.positions.allowance
    assert missing is None and allowance is not None
    assert allowance.places.tolist() == list(range(3, 3 + len(YES) + 1 + len(NO) + 1))
    found = [set(np.flatnonzero(one).tolist()) for one in allowance.allowed]
    for first, text in ((0, YES), (len(YES) + 1, NO)):
        assert all(token in found[first + place] for place, token in enumerate(text))
        assert found[first + len(text)] == set(EOS)


def test_a_row_goes_on_behind_the_tokens_of_its_own_sample(automata: RowAutomata) -> None:
    step = Step(automata, None, choice("yes", "no"))
    step.ready()
    held = ConstrainedStep(automata, step.schedule())
    _, missing = held.hold()

    class Two(Said):
        def of(self, sample: int) -> list[int]:
            return YES if sample == 1 else [WRONG]

    held.advance(cast(SampledTokens, Two([])), missing)
    row = automata.of(1)
    assert row is not None
    automata.wait([row], others=False)
    allowed = row.allowed([])
    assert allowed is not None and set(np.flatnonzero(allowed[0]).tolist()) == {0, 3}, "nothing but an end"


def test_rows_with_drafts_or_grammars_may_go_back(automata: RowAutomata) -> None:
    step = Step(automata, None, choice("yes"), None, None)
    assert ConstrainedStep(automata, step.schedule()).may_go_back().tolist() == [1]
    assert ConstrainedStep(automata, step.schedule([[], [], [5], [5, 6]])).may_go_back().tolist() == [1, 2, 3]
    assert ConstrainedStep(automata, step.schedule(part=1)).may_go_back().tolist() == [], "it takes no token"


Waited = list[tuple[list[Held], bool]]  # who was waited for, and whether there were others in the step


@pytest.fixture
def waited(automata: RowAutomata, monkeypatch: pytest.MonkeyPatch) -> Waited:
    found: Waited = []
    monkeypatch.setattr(automata, "wait", lambda helds, *, others: found.append((list(helds), others)))
    return found


def test_drafts_are_cut_once_their_grammars_were_waited_for(automata: RowAutomata, waited: Waited) -> None:
    step = Step(automata, choice("yes"), choice("no"))
    held = [automata.of(row) for row in range(2)]
    for drafts, others in (([YES, NO], False), ([YES, []], True)):
        cut_drafts(step.plan(drafts), automata)
        assert waited.pop() == ([one for one, draft in zip(held, drafts, strict=True) if draft], others)


def test_a_step_waits_for_grammars_longer_where_all_its_rows_have_one(automata: RowAutomata, waited: Waited) -> None:
    for grammars, others in ([choice("yes"), choice("no")], False), ([choice("yes"), None], True):
        step = Step(automata, *grammars)
        ConstrainedStep(automata, step.schedule()).hold()
        assert waited.pop() == ([one for row in range(2) if (one := automata.of(row))], others)
