"""Stands where detokenizers and gateways would be, and notes when each token leaves the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec

from services.scheduler.lifecycle.outputs import Outbound
from services.scheduler.state.sequence import Request, Sequence
from services.scheduler.telemetry.journal import EventJournal
from shared.errors import RequestError
from shared.metrics import Tally
from shared.metrics.latency import tpot


class RequestRecord(msgspec.Struct, gc=False):
    """One request, seconds of virtual time; `first` is negative while nothing came."""

    start: float  # as the client meant to send it
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_tokens: int = 0
    first: float = -1.0
    last: float = -1.0
    worker: str = ""
    tenant: str = ""
    is_finished: bool = False

    @property
    def ttft(self) -> float | None:
        return self.first - self.start if self.num_tokens else None

    @property
    def e2el(self) -> float | None:
        return self.last - self.start if self.num_tokens else None

    @property
    def tpot(self) -> float | None:
        return tpot(self.ttft, self.e2el, self.num_tokens)


class Observer(Outbound):
    """The core's messages to other services, as figures; gaps, as many as tokens, are pooled in a tally."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # when what is said now reaches its client
        self.records: dict[str, RequestRecord] = {}
        self.gaps = Tally()
        self.num_rejected = 0
        self._lasts: dict[float, int] = {}  # when outputs came before those of now: mostly with the same step
        self._finished: list[str] = []

    def emit(self, sequence: Sequence) -> None:
        """Note the tokens that were not noted yet."""
        request, now = sequence.request, self.now
        request_id = request.header.request_id
        num_output = len(sequence.token_ids) - request.num_prompt_tokens
        count, sequence.num_emitted = num_output - sequence.num_emitted, num_output
        record = self.records[request_id]
        if record.num_tokens:
            self._lasts[record.last] = self._lasts.get(record.last, 0) + 1
        else:
            record.first = now
            record.worker = sequence.worker
            record.num_cached_tokens = max(0, sequence.num_cached_tokens)
        record.num_tokens += count
        record.last = now
        if sequence.finish_reason is not None:
            record.is_finished = True
            self._finished.append(request_id)

    def emit_again(self, request: Request) -> None:
        """Nothing to do: no detokenizer is lost here."""

    def close(self, sequence: Sequence) -> None:
        """Nothing to do: there are no streams here."""

    def reject(self, gateway: str, request_id: str, error: RequestError) -> None:
        self.num_rejected += 1

    def take_finished(self) -> list[str]:
        """Ids of the requests that have ended since the last call; to be called before `now` changes."""
        for last, count in self._lasts.items():
            self.gaps.add(self.now - last, count)
        self._lasts.clear()
        taken, self._finished = self._finished, []
        return taken


class SilentJournal(EventJournal):
    """Keeps no notes: a million requests would make ten million."""

    def request(self, event: str, request: Request, **fields: Any) -> None:
        pass

    def sequence(self, event: str, sequence: Sequence, **fields: Any) -> None:
        pass
