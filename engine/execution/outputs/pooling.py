"""Embeddings: hidden states of a row's prompt, pooled chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.execution.schedule import Schedule
from kernels.ops.steps.transfer import to_host
from shared.errors import FatalError
from shared.messages.steps import AdmittedSequence
from shared.requests.pooling import Pooling, PoolingKind


@dataclass(frozen=True, slots=True)
class Classifier:
    """The head of a checkpoint that tells texts apart."""

    weight: Tensor  # [num_labels, hidden_size] float32
    activation: str  # softmax, sigmoid or none

    def score(
        self,
        state: Tensor,  # [hidden_size] float64
        *,
        activates: bool,
    ) -> Tensor:  # [num_labels] float64
        logits = self.weight.double() @ state
        if not activates or self.activation == "none":
            return logits
        return logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(0)


class RowPools:
    """The sums of hidden states so far, of the rows of requests for embeddings.

    Sums are float64, so that the vector does not depend on the number of chunks of a prompt.
    """

    def __init__(self, classifier: Classifier | None = None) -> None:
        self._classifier = classifier
        self._poolings: dict[int, Pooling] = {}
        self._sums: dict[int, Tensor] = {}  # [hidden_size] float64

    def reset(self) -> None:
        self._poolings.clear()
        self._sums.clear()

    def release(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._poolings.pop(row, None)
            self._sums.pop(row, None)

    def admit(self, sequence: AdmittedSequence) -> None:
        self.release([sequence.row])
        if sequence.params.pooling is not None:
            self._poolings[sequence.row] = sequence.params.pooling

    def take(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [sum of wanted, hidden_size]
    ) -> dict[int, Tensor]:  # of the entries whose prompt is complete: [hidden_size] float32, on its way to the host
        """Add what a step has computed."""
        batch, found = schedule.batch, {}
        ends = np.cumsum(batch.wanted)
        for entry in schedule.pooled.tolist():
            row, end = int(batch.rows[entry]), int(ends[entry])
            states = hidden[end - int(batch.wanted[entry]) : end].double()
            if self._poolings[row].kind is PoolingKind.MEAN:
                self._add(row, states.sum(0))
            if schedule.num_positions[entry]:
                found[entry] = self._finish(row, states[-1], int(batch.computed[entry] + batch.scheduled[entry]))
        return found

    def _score(
        self,
        last: Tensor,  # [hidden_size] float64
        *,
        activates: bool,
    ) -> Tensor:  # [num_labels] float64
        if self._classifier is None:
            raise FatalError("a request asks for scores of labels, and this model has none")
        return self._classifier.score(last, activates=activates)

    def _add(
        self,
        row: int,
        states: Tensor,  # [hidden_size] float64
    ) -> None:
        before = self._sums.get(row)
        self._sums[row] = states if before is None else before + states

    def _finish(
        self,
        row: int,
        last: Tensor,  # [hidden_size] float64
        num_tokens: int,
    ) -> Tensor:  # [hidden_size] float32
        pooling = self._poolings.pop(row)
        if pooling.kind is PoolingKind.CLASSIFY:
            return to_host(self._score(last, activates=pooling.normalize).float())
        vector = self._sums.pop(row) / num_tokens if pooling.kind is PoolingKind.MEAN else last
        if pooling.normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return to_host(vector.float())
