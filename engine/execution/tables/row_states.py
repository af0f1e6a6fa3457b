"""The states that layers of linear attention keep: of each row, of each row before its last step, and snapshots.

A state cannot be cut back as a KV cache can.  So before a step after which some of a row's tokens may have to be
computed again (drafts are verified, or what its grammar allows may come too late), its state is kept, and put back
where that happens.  Tokens that are the row's already, but that the state which was put back has not seen, are computed
once more at the beginning of the row's next step: their keys and values come out as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.messages.steps import StepPlan

NONE = -1
Ints = NDArray[np.int64]


class CopiesStates(Protocol):
    """What is asked of a model here."""

    def copy_states(self, sources: Ints, destinations: Ints) -> None:
        """All are distinct places of states."""
        ...


class RowStates:
    """Of a row's state, how many tokens it has seen; of a snapshot, in which of its lives it is.

    The model's states are those of the rows, then what is kept of each row, then the snapshots.
    Invariant: a row's state has seen its first `_seen` tokens, once the steps already launched have run; a plan goes on
    with the row behind `_due` tokens, which are more where the state was put back.
    """

    def __init__(self, model: CopiesStates, num_rows: int, num_snapshots: int) -> None:
        self._model = model
        self._num_rows = num_rows
        self._seen: Ints = np.full(num_rows, NONE)
        self._due: Ints = np.full(num_rows, NONE)  # NONE: the state is of no sequence
        self._kept: Ints = np.full(num_rows, NONE)  # tokens that what is kept has seen
        self._lives: Ints = np.zeros(num_snapshots, np.int64)  # generations; 0: nothing was saved

    def reset(self) -> None:
        """Forget everything: another epoch begins."""
        self._due[:] = NONE
        self._lives[:] = 0

    # -- before a step

    def begin(self, plan: StepPlan) -> None:
        """Take releases, forks and loads over; a fork's source may be among what is released.  A row whose snapshot is
        another by now has no state then."""
        seen, due = self._seen.copy(), self._due.copy()
        self._due[plan.released_rows] = NONE
        if plan.state_forks:
            rows, sources = np.array(plan.state_forks, np.int64).T
            self._model.copy_states(sources, rows)
            self._seen[rows], self._due[rows] = seen[sources], due[sources]
        if plan.state_loads:
            rows, snapshots, generations = np.array(plan.state_loads, np.int64).T
            self._model.copy_states(2 * self._num_rows + snapshots, rows)
            ends = dict(zip(plan.rows, plan.num_computed_tokens, strict=True))
            at = np.array([ends.get(row, NONE) for row in rows.tolist()], np.int64)
            self._seen[rows] = self._due[rows] = np.where(self._lives[snapshots] == generations, at, NONE)

    def contradicts(self, rows: Ints, computed: Ints) -> NDArray[np.bool_]:
        """Where a plan goes on at another token than the state; one that computes the first token needs none."""
        wrong: NDArray[np.bool_] = (computed != 0) & (computed != self._due[rows])
        return wrong

    def due(self, rows: Ints) -> Ints:
        """Tokens behind which plans go on with these rows; -1: their states are of no sequence."""
        return self._due[rows]

    def behind(self, rows: Ints, computed: Ints) -> Ints:
        """How many of the tokens before a step the rows' states have not seen."""
        return np.where(computed == 0, 0, self._due[rows] - self._seen[rows])

    def keep(self, rows: Ints, computed: Ints) -> None:
        """These rows may have to go back behind the step that begins now; `computed`: of the plan."""
        self._kept[rows] = np.where(computed == 0, 0, self._seen[rows])
        held = rows[self._kept[rows] > 0]  # without a token a state is zeros, and needs no memory
        if len(held):
            self._model.copy_states(held, self._num_rows + held)

    # -- after it

    def advance(self, rows: Ints, ends: Ints) -> None:
        """The step has taken the states of these rows behind so many tokens."""
        self._seen[rows] = self._due[rows] = ends

    def put_back(self, rows: Ints, due: Ints) -> None:
        """Of the last step of these rows only so many tokens are theirs; their states were kept."""
        if not len(rows):
            return
        held = rows[self._kept[rows] > 0]
        if len(held):
            self._model.copy_states(self._num_rows + held, held)
        self._seen[rows], self._due[rows] = self._kept[rows], due

    def save(self, plan: StepPlan, computed: Sequence[int]) -> None:
        """Take the plan's snapshots of the rows that were `computed`; of one that is not where the plan has it there is
        none to take."""
        columns = zip(plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        ends = {row: before + count for row, before, count in columns}
        saves = [
            (row, snapshot, generation)
            for row, snapshot, generation in plan.state_saves
            if row in computed and self._seen[row] == self._due[row] == ends.get(row)
        ]
        if saves:
            rows, snapshots, generations = np.array(saves, np.int64).T
            self._model.copy_states(rows, 2 * self._num_rows + snapshots)
            self._lives[snapshots] = generations
