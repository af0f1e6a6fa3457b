"""Divides a plan into parts that follow each other through the stages of a pipeline, and joins their results again.

A part is a plan too: some neighbouring entries, with all that concerns their rows.  Parts of one plan have no row in
common, and a worker that runs them in their order has run the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from shared.messages import SlidingPlan, StepPlan, StepResult, TokenLogprobs

BETTER = 0.75  # of the largest part's tokens, which dividing anew must come to: rows that change parts wait


@dataclass(frozen=True, slots=True)
class PlanPart:
    plan: StepPlan
    whole: StepPlan
    rows: frozenset[int]  # that it changes
    is_last: bool  # of the whole plan


class PlanDivider:
    """A row stays in its part from plan to plan while parts are about even, so that a part of the next plan may begin
    while other parts of this one are computed."""

    def __init__(self, count: int) -> None:
        """Into so many parts at most."""
        self._count = count
        self._part_of: dict[int, int] = {}  # rows of the plan before

    def divide(self, plan: StepPlan) -> list[PlanPart]:
        if len(plan.rows) < 2 or _must_stay_whole(plan):
            return [PlanPart(plan, plan, _touched(plan), is_last=True)]
        places = self._places(plan)
        self._part_of = dict(zip(plan.rows, places, strict=True))
        begins = [entry for entry, place in enumerate(places) if entry == 0 or place != places[entry - 1]]
        plans = list(_pieces(plan, [*begins, len(places)]))
        return [PlanPart(part, plan, _touched(part), is_last=part is plans[-1]) for part in plans]

    def _places(self, plan: StepPlan) -> list[int]:
        """Of each entry the number of its part, which rises."""
        tokens, last, kept = plan.num_scheduled_tokens, 0, []
        for row in plan.rows:
            last = max(last, self._part_of.get(row, last))
            kept.append(last)
        total = sum(tokens)
        middles = (end - count / 2 for end, count in zip(accumulate(tokens), tokens, strict=True))
        even = [int(middle * self._count / total) for middle in middles]
        is_better = self._largest(even, tokens) < BETTER * self._largest(kept, tokens)
        return even if is_better or len(set(even)) > len(set(kept)) else kept

    def _largest(self, places: Sequence[int], tokens: Sequence[int]) -> int:
        sums = [0] * self._count
        for place, count in zip(places, tokens, strict=True):
            sums[place] += count
        return max(sums)


def join_results(whole: StepPlan, results: Sequence[StepResult], parts: Sequence[StepPlan]) -> StepResult:
    """The result of the whole plan, whose parts these are, in order."""
    if len(results) == 1:
        return results[0]
    firsts = [0, *accumulate(len(part.rows) for part in parts)]
    both = list(zip(results, firsts, strict=False))
    return StepResult(
        epoch=whole.epoch,
        step_id=whole.step_id,
        num_sampled=[count for one in results for count in one.num_sampled],
        sampled_token_ids=[token for one in results for token in one.sampled_token_ids],
        logprobs=_joined_logprobs(results),
        prompt_logprobs={first + entry: said for one, first in both for entry, said in one.prompt_logprobs.items()},
        device_time=sum(one.device_time for one in results),
        refused={first + entry: why for one, first in both for entry, why in one.refused.items()},
        embeddings={first + entry: vector for one, first in both for entry, vector in one.embeddings.items()},
        refused_rows=[
            msgspec.structs.replace(row, entry=first + row.entry) for one, first in both for row in one.refused_rows
        ],
    )


def _joined_logprobs(results: Sequence[StepResult]) -> list[TokenLogprobs | None]:
    if not any(one.logprobs for one in results):
        return []
    return [said for one in results for said in one.logprobs or [None] * len(one.sampled_token_ids)]


def _must_stay_whole(plan: StepPlan) -> bool:
    """Block copies come before anything else of a step: any row may have their sources, or be given these."""
    return bool(plan.block_copies or any(part.block_copies for part in plan.sliding))


def _touched(plan: StepPlan) -> frozenset[int]:
    return frozenset([*plan.rows, *plan.released_rows, *(sequence.row for sequence in plan.admitted)])


def _pieces(plan: StepPlan, bounds: Sequence[int]) -> Iterator[StepPlan]:
    """Entries from each bound to the next.  A row that is only released goes with the last piece."""
    left, admitted = set(plan.released_rows), {sequence.row: sequence for sequence in plan.admitted}
    for first, end in pairwise(bounds):
        entries, is_last = slice(first, end), end == bounds[-1]
        rows = plan.rows[entries]
        own = [sequence for row, sequence in admitted.items() if row in rows or (is_last and row not in plan.rows)]
        released = left if is_last else left.intersection([*rows, *(sequence.row for sequence in own)])
        left = left - released
        drafts = _places(plan.num_draft_tokens, entries)
        yield msgspec.structs.replace(
            plan,
            admitted=own,
            released_rows=[row for row in plan.released_rows if row in released],
            rows=rows,
            num_computed_tokens=plan.num_computed_tokens[entries],
            num_scheduled_tokens=plan.num_scheduled_tokens[entries],
            num_draft_tokens=plan.num_draft_tokens[entries],
            draft_token_ids=plan.draft_token_ids[drafts],
            draft_distributions=plan.draft_distributions[drafts],
            num_wanted_drafts=plan.num_wanted_drafts[entries],
            sliding=[_piece_of_sliding(part, entries) for part in plan.sliding],
            **_new_blocks(plan, entries),
        )


def _piece_of_sliding(part: SlidingPlan, entries: slice) -> SlidingPlan:
    left = part.num_left_blocks[entries]
    return msgspec.structs.replace(part, num_left_blocks=left, **_new_blocks(part, entries))


def _new_blocks(part: StepPlan | SlidingPlan, entries: slice) -> dict[str, Any]:
    blocks = _places(part.num_new_blocks, entries)
    return {
        "num_new_blocks": part.num_new_blocks[entries],
        "new_block_ids": part.new_block_ids[blocks],
        "new_block_generations": part.new_block_generations[blocks],
    }


def _places(counts: Sequence[int], entries: slice) -> slice:
    """Of the entries' things, where all entries' stand one behind the other."""
    return slice(sum(counts[: entries.start]), sum(counts[: entries.stop]))
