"""Keeps the ranks of a group that have whole experts equally busy: counts the rows that go to each, and moves experts.

The leader's.  Ranks count the same rows, since each routes all tokens, so only the leader looks at its counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.modeling.ranks.expert_placement import Held, balance, moves_between, place
from kernels.cpu.binding.ranks import ExpertMove

KEPT = 0.5  # of what was counted before the last look: experts move by what is usual, not by one hour's first prompt
WORTH = 0.05  # by which a layer's balance must rise for experts to be moved


class Mixture(Protocol):
    """A layer's experts, as the native library has them; it writes both."""

    @property
    def holders(self) -> NDArray[np.uint64] | None: ...  # [count] a bit for each rank that has the expert

    @property
    def loads(self) -> NDArray[np.int64]: ...  # [count] rows so far


def held_by(mixture: Mixture, ranks: int) -> Held:
    bits = mixture.holders
    assert bits is not None
    return [set(np.flatnonzero(bits >> np.uint64(rank) & np.uint64(1)).tolist()) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class PlannedMoves:
    """What was found at a look, where experts are to be moved."""

    layers: int
    moves: int
    balance: float  # the mean of all layers, as experts are now
    balance_then: float


@dataclass(slots=True)
class _Layer:
    number: int
    mixture: Mixture
    seen: NDArray[np.int64]  # [count] rows at the last look
    loads: NDArray[np.float64]  # [count] lately

    def look(self) -> None:
        now = self.mixture.loads.copy()
        self.loads = KEPT * self.loads + (now - self.seen)
        self.seen = now


class ExpertBalancer:
    def __init__(
        self,
        layers: Sequence[tuple[int, Mixture]],  # numbers, among all layers of the group's model
        ranks: int,
        interval: int,  # steps between two looks
        move: Callable[[int, Sequence[ExpertMove]], None],  # in all ranks, of the layer of that number
        report: Callable[[PlannedMoves], None] = lambda _: None,
    ) -> None:
        self._layers = [
            _Layer(number, one, one.loads.copy(), np.zeros(len(one.loads), np.float64)) for number, one in layers
        ]
        self._ranks = ranks
        self._interval = interval
        self._move = move
        self._report = report
        self._steps = 0
        self._orders: deque[tuple[int, list[ExpertMove]]] = deque()

    def step(self) -> None:
        """Before each step.  Between two steps one or two experts are moved at most, so that none waits for long."""
        if self._orders:
            self._move(*self._orders.popleft())
            return
        self._steps += 1
        if self._steps % self._interval == 0:
            self._plan()

    def _plan(self) -> None:
        before: list[float] = []
        after: list[float] = []
        for layer in self._layers:
            layer.look()
            loads, held = layer.loads.tolist(), held_by(layer.mixture, self._ranks)
            target = place(loads, held)
            now, then = balance(loads, held), balance(loads, target)
            before.append(now)
            after.append(then if then > now + WORTH else now)
            if then > now + WORTH:
                self._orders += [(layer.number, order) for order in moves_between(held, target)]
        if self._orders:
            layers, moves = len({number for number, _ in self._orders}), sum(len(order) for _, order in self._orders)
            self._report(PlannedMoves(layers, moves, float(np.mean(before)), float(np.mean(after))))
