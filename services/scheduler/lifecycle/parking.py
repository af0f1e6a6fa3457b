"""Requests whose clients may come back: kept without row or block, and continued when they are asked for again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.lifecycle.beams import rest
from services.scheduler.lifecycle.side_tables import SideTables
from services.scheduler.state.sequence import Request, Sequence, Status
from shared.messages import RequestHeader

MAX_PARKED = 1024
PARKED_SECONDS = 60.0


class Parking:
    """The latest requests that lost their client before their end, by id, with the time since when."""

    def __init__(self, tables: SideTables) -> None:
        self._tables = tables
        self._parked: OrderedDict[str, tuple[Request, float | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._parked.values())

    def get(self, request_id: str) -> Request | None:
        parked = self._parked.get(request_id)
        return parked[0] if parked else None

    def put(self, request: Request) -> None:
        """Keep a request's tokens as they are now; the oldest goes where there are too many."""
        copy = copy_of(request)
        self._parked[request.request_id] = (copy, None)
        if copy.search is None or request.is_finished:
            for sequence, to in zip(request.sequences, copy.sequences, strict=True):
                self._tables.copy(sequence, to)
        if len(self._parked) > MAX_PARKED:
            _, (oldest, _) = self._parked.popitem(last=False)
            self._tables.let_go(oldest)

    def take(self, request_id: str) -> Request | None:
        parked = self._parked.pop(request_id, None)
        return parked[0] if parked else None

    def expire(self, now: float) -> None:
        """Forget those that have been here for long."""
        for request_id, (request, since) in list(self._parked.items()):
            if since is None:
                self._parked[request_id] = (request, now)
            elif now - since > PARKED_SECONDS:
                del self._parked[request_id]
                self._tables.let_go(request)


def copy_of(request: Request) -> Request:
    """A request at the same point that has never run.  Steps in flight know its old sequences, not these."""
    copy = Request(
        request.header, request.params, request.prompt_token_ids, request.eos_token_ids, request.arrival,
        request.detokenizer, packed_prompt=request.packed_prompt, max_model_len=request.max_model_len,
        fingerprint=request.bound_to,
    )  # fmt: skip
    if copy.search is not None and not request.is_finished:  # a search begins again
        copy.sequences = [Sequence(copy, one.index, one.rank, list(copy.prompt_token_ids)) for one in request.sequences]
        rest(copy.sequences[1:])
        return copy
    copy.sequences = [_copy_of(sequence, copy) for sequence in request.sequences]
    return copy


def _copy_of(sequence: Sequence, request: Request) -> Sequence:
    return Sequence(
        request,
        sequence.index,
        sequence.rank,
        list(sequence.token_ids),
        status=Status.FINISHED if sequence.status is Status.FINISHED else Status.WAITING,
        num_cached_tokens=sequence.num_cached_tokens,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_token_id,
        logprobs=list(sequence.logprobs),
        num_emitted=sequence.num_emitted,
    )


def is_later_call(header: RequestHeader, known: RequestHeader) -> bool:
    """Whether a client asks again for what it asked for before.  At one gateway the arrival time names a
    call, even where its clock was set meanwhile; of calls at two gateways the later one counts."""
    if header.gateway == known.gateway:
        return header.arrival_time != known.arrival_time
    return header.arrival_time > known.arrival_time
