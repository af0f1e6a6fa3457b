"""A plan of which some entries are not computed, and its result, which names them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from shared.messages.steps import RefusedRow, StepPlan, StepResult

COLUMNS = (
    "rows",
    "num_computed_tokens",
    "num_scheduled_tokens",
    "num_new_blocks",
    "num_draft_tokens",
    "num_wanted_drafts",
)
BY_ENTRY = ("prompt_logprobs", "refused", "embeddings")


def without(plan: StepPlan, entries: Collection[int]) -> StepPlan:
    """The part of a plan that is computed, without its new blocks: the rows have them already."""
    kept = [entry for entry in range(len(plan.rows)) if entry not in entries]
    changes: dict[str, Any] = {name: _chosen(getattr(plan, name), kept) for name in COLUMNS}
    changes["num_new_blocks"] = [0] * len(kept)
    changes |= {"new_block_ids": [], "new_block_generations": [], "block_copies": [], "copy_generations": []}
    changes["sliding"] = []
    for name in ("draft_token_ids", "draft_distributions"):
        column = getattr(plan, name)
        changes[name] = list(_parts(column, plan.num_draft_tokens, kept)) if column else column
    return msgspec.structs.replace(plan, **changes)


def completed(result: StepResult, refused: Sequence[RefusedRow], num_entries: int) -> StepResult:
    """The result of the whole plan, in which the `refused` entries are marked."""
    entries = {one.entry for one in refused}
    kept = [entry for entry in range(num_entries) if entry not in entries]
    num_drafts = _spread(result.num_head_drafts, kept, num_entries) if result.num_head_drafts else []
    return msgspec.structs.replace(
        result,
        num_sampled=_spread(result.num_sampled, kept, num_entries),
        num_head_drafts=num_drafts,
        refused_rows=list(refused),
        **{name: {kept[entry]: value for entry, value in getattr(result, name).items()} for name in BY_ENTRY},
    )


def _spread(column: Sequence[int], kept: Sequence[int], num_entries: int) -> list[int]:
    found = [0] * num_entries
    for entry, count in zip(kept, column, strict=True):
        found[entry] = count
    return found


def _chosen(column: Sequence[int], kept: Sequence[int]) -> list[int]:
    return [column[entry] for entry in kept] if column else []


def _parts(column: Sequence[Any], counts: Sequence[int], kept: Sequence[int]) -> Iterator[Any]:
    ends = list(accumulate(counts))
    for entry in kept:
        yield from column[ends[entry] - counts[entry] : ends[entry]]
