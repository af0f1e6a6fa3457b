"""Requests at the door: let in, journaled and sent on, or refused; and let go of when their clients have everything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.gateway.account import StreamAccount
from services.gateway.streams import Position, Stream
from shared.actor import Phase
from shared.clock import steady_time
from shared.errors import RejectCode, RequestError
from shared.messages import HAS_EVERYTHING, AbortRequest, TokenizeRequest

if TYPE_CHECKING:
    from services.gateway.actor import GatewayActor

# A request that ended thus was ended by the troupe itself, which needs no word of it.
DONE = frozenset({RejectCode.INVALID_ARGUMENT, RejectCode.NOT_FOUND, RejectCode.RESOURCE_EXHAUSTED})


class Reception:
    """Every stream that is in the journal is also let in by the admission, in a forecast, and in somebody's custody."""

    def __init__(self, actor: GatewayActor) -> None:
        self._actor = actor

    def open(self, request: TokenizeRequest, has: Sequence[Position] | None = None) -> Stream:
        """Journal a request and send it on; raises RequestError where there is no room, or not enough time.

        `has` says what of it a client has that comes back for the rest.
        """
        actor, header = self._actor, request.header
        self._check_time(request)
        if earlier := actor.journal.get(header.request_id):
            self._supersede(earlier)
        actor.admission.admit(request, actor.roster.max_model_len)
        stream = Stream(request, "", has)
        if actor.settings.tracing:
            stream.account = StreamAccount(header.arrival_time, sent=header.sent_time)
        try:
            actor.journal.add(stream)
        except RequestError:
            actor.admission.release(request)
            raise
        actor.forecasts.of(header.tenant).opened(header.request_id, time.monotonic())
        actor.custody.entrust(stream)
        actor.outbox.flush()  # at once: its first token waits for nothing else
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream, and let the troupe forget it: aborted, or acknowledged where it had come to its end."""
        actor = self._actor
        if actor.journal.get(stream.header.request_id) is stream:
            self._forget(stream)
            if not (stream.error and stream.error.code in DONE):
                reason = HAS_EVERYTHING if stream.finished else "cancelled"
                abort = AbortRequest(stream.header.request_id, reason, actor.inbox.address)
                actor.send_soon(stream.tokenizer or actor.scheduler, abort)
        if actor.phase is Phase.DRAINING:
            actor.readiness.notice()

    def abort(self, *, request_id: str = "", label: str = "", tenant: str = "") -> int:
        """End the streams so named; returns how many there were.  With keys, a tenant reaches its own only."""
        streams = self._actor.journal.find(request_id=request_id, label=label, tenant=tenant)
        if not self._actor.access.is_open:
            streams = [stream for stream in streams if stream.header.tenant == tenant]
        for stream in streams:
            stream.fail(RequestError("aborted by a client's Abort", code=RejectCode.CANCELLED))
        return len(streams)

    def _forget(self, stream: Stream) -> None:
        actor, header = self._actor, stream.header
        actor.journal.remove(stream)
        actor.admission.release(stream.request)
        num_tokens = max((len(sequence.token_ids) for sequence in stream.sequences), default=0)
        forecast = actor.forecasts.of(header.tenant)
        forecast.closed(header.request_id, time.monotonic(), num_tokens if stream.finished else 0)
        actor.custody.forget(stream)

    def _supersede(self, stream: Stream) -> None:
        """Its client is back over another connection: the old one gets nothing any more."""
        self._forget(stream)
        stream.fail(RequestError("the same idempotency key came in another call", code=RejectCode.CANCELLED))

    def _check_time(self, request: TokenizeRequest) -> None:
        """Raise RequestError where a request's deadline has passed, or would before it is served, as things go."""
        deadline = request.header.deadline
        if deadline is None:
            return
        left = deadline - steady_time()
        if left <= 0:
            raise RequestError("the call's deadline has passed", code=RejectCode.DEADLINE_EXCEEDED)
        needed = self._actor.forecasts.of(request.header.tenant).needed(request.params.max_tokens)
        if needed > left:
            raise RequestError(
                f"it would take about {needed:.1f} s, and the deadline is in {left:.1f} s",
                code=RejectCode.RESOURCE_EXHAUSTED,
                retry_after_ms=max(1, int(1000 * (needed - left))),
            )
