"""The rows of one step that have grammars: their drafts are cut before it, and only allowed tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import msgspec
import numpy as np

from engine.execution.constraints.row_automata import Held, RowAutomata
from engine.execution.outputs.sampled_tokens import MissingSamples, SampledTokens
from engine.execution.schedule import Schedule
from engine.modeling.batch import Ints
from engine.sampling.processing import Allowance, Flags
from shared.messages.steps import StepPlan


def cut_drafts(plan: StepPlan, automata: RowAutomata) -> StepPlan:
    """The plan without the draft tokens that break their row's grammar, and those behind them.

    Rejection sampling needs the first such token: that it is refused, and what is drawn instead, belongs together.
    """
    if not automata or not plan.draft_token_ids:
        return plan
    helds = [automata.of(row) if count else None for row, count in zip(plan.rows, plan.num_draft_tokens, strict=True)]
    if not any(helds):
        return plan
    automata.wait([held for held in helds if held is not None], others=None in helds)
    starts = np.cumsum([0, *plan.num_draft_tokens])
    parts = [plan.draft_token_ids[first:last] for first, last in pairwise(starts.tolist())]
    kept = [len(part) if held is None else _num_kept(held, part, plan) for held, part in zip(helds, parts, strict=True)]
    places = [range(first, first + count) for first, count in zip(starts[:-1].tolist(), kept, strict=True)]
    distributions = plan.draft_distributions
    return msgspec.structs.replace(
        plan,
        num_scheduled_tokens=[
            count - len(part) + left for count, part, left in zip(plan.num_scheduled_tokens, parts, kept, strict=True)
        ],
        num_draft_tokens=kept,
        draft_token_ids=list(chain.from_iterable(part[:left] for part, left in zip(parts, kept, strict=True))),
        draft_distributions=[distributions[place] for place in chain.from_iterable(places)] if distributions else [],
    )


def _num_kept(held: Held, draft_token_ids: Sequence[int], plan: StepPlan) -> int:
    if not held.is_ready or held.refusal:
        return 0
    num_valid = held.standing.result().automaton.num_valid(draft_token_ids)
    return min(len(draft_token_ids), num_valid + plan.rejection)


@dataclass(slots=True)
class ConstrainedStep:
    """Made before the forward pass, so that the masks of draft positions are computed beside it."""

    automata: RowAutomata
    schedule: Schedule
    helds: dict[int, Held] = field(default_factory=dict)  # by index of `Schedule.samples`

    def __post_init__(self) -> None:
        if not self.automata:
            return
        rows = self.schedule.batch.rows[self.schedule.samples].tolist()
        found = ((index, self.automata.of(row)) for index, row in enumerate(rows))
        self.helds = {index: held for index, held in found if held is not None}
        if self.schedule.drafts is not None:
            self._try_drafts()

    def may_go_back(self) -> Ints:
        """Entries of which some tokens may have to be computed again: with drafts, or held to a grammar."""
        drafts = self.schedule.drafts
        verifies = np.zeros(len(self.schedule.samples), np.bool_) if drafts is None else drafts.counts > 0
        verifies[list(self.helds)] = True
        return self.schedule.samples[verifies]

    def _try_drafts(self) -> None:
        for index, held in self.helds.items():
            drafts = self._drafts_of(index)
            if drafts and held.is_ready and not held.refusal:
                self.automata.try_drafts(held, drafts)

    def _drafts_of(self, index: int) -> list[int]:
        drafts = self.schedule.drafts
        if drafts is None:
            return []
        end = int(drafts.counts[: index + 1].sum())
        found: list[int] = drafts.token_ids[end - int(drafts.counts[index]) : end].tolist()
        return found

    def hold(self) -> tuple[Schedule, MissingSamples | None]:
        """The schedule with the tokens that its rows may take, and the samples that it cannot have.

        A grammar that is not ready is not waited for long.
        """
        if not self.helds:
            return self.schedule, None
        self.automata.wait(list(self.helds.values()), others=len(self.helds) < len(self.schedule.batch.rows))
        found = {index: held.allowed(self._drafts_of(index)) for index, held in self.helds.items()}
        lacking = [index for index, allowed in found.items() if allowed is None]
        missing = MissingSamples(np.array(lacking, np.int64), self._refused(lacking)) if lacking else None
        known = {index: allowed for index, allowed in found.items() if allowed is not None}
        if not known:
            return self.schedule, missing
        positions = replace(self.schedule.positions, allowance=self._allowance(known))
        return msgspec.structs.replace(self.schedule, positions=positions), missing

    def _refused(self, lacking: list[int]) -> dict[int, str]:
        refusals = ((int(self.schedule.samples[index]), self.helds[index].refusal) for index in lacking)
        return {entry: refusal for entry, refusal in refusals if refusal}

    def _allowance(self, known: dict[int, Flags]) -> Allowance:
        drafts = self.schedule.drafts
        places = []
        for index, allowed in known.items():
            start = index if drafts is None else int(drafts.starts[index])
            places.append(start + np.arange(len(allowed)))
        return Allowance(np.concatenate(places), np.concatenate(list(known.values())))

    def advance(self, sampled: SampledTokens, missing: MissingSamples | None) -> None:
        if not self.helds:
            return
        lacking = set() if missing is None else set(missing.samples.tolist())
        for index, held in self.helds.items():
            if index not in lacking:
                self.automata.advance(held, sampled, index)
