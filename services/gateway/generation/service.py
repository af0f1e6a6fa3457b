"""Every generation of a gateway, from its admission to its last output, by gRPC or HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.gateway.access.forecast import Forecasts
from services.gateway.access.limits import make_admission
from services.gateway.bus.bus import Bus
from services.gateway.bus.calls import Calls
from services.gateway.bus.deployment import RosterView
from services.gateway.bus.refusals import rejected
from services.gateway.generation.adapters import AdapterNames
from services.gateway.generation.checks import check_n
from services.gateway.generation.questions import Questions
from services.gateway.generation.tasks import within
from services.gateway.health.load_report import LoadReports
from services.gateway.health.readiness import Readiness
from services.gateway.streams.flush_throttle import FlushThrottle, stretch
from services.gateway.streams.journal import StreamJournal
from services.gateway.streams.latency import StreamLatency
from services.gateway.streams.recovery import StreamRecovery
from services.gateway.streams.report import StreamReport
from services.gateway.streams.stream import OutputLostError, Position, Stream
from shared.actor import LifePhase
from shared.clocks.clock import steady_time
from shared.config import Settings
from shared.errors import ProtocolError, RejectCode, RequestError
from shared.exposition import RequestMeter
from shared.messages import (
    HAS_EVERYTHING,
    AbortRequest,
    AdapterLoaded,
    DecodeResult,
    DescribeResult,
    EncodeResult,
    Load,
    PiecesResult,
    RequestRejected,
    StreamLost,
    TextBatch,
    TokenizeRequest,
)
from shared.processes.logging import request_logger
from shared.requests.grammar import check_grammar

log = structlog.get_logger()

BYTES_PER_TOKEN = 8  # of a prompt, generously

# The deployment itself ended a request with one of these, and needs no message about it.
DONE = frozenset({RejectCode.INVALID_ARGUMENT, RejectCode.NOT_FOUND, RejectCode.RESOURCE_EXHAUSTED})


class GenerationService:
    """What both fronts use: admission, the journal of open streams, their recovery, questions, and accounting.

    Invariant: every stream that is in the journal is also let in by the admission, in a forecast unless it is in the
    background, and in the recovery.
    """

    def __init__(self, bus: Bus, deployment: RosterView, readiness: Readiness, settings: Settings) -> None:
        scheduling = settings.scheduling
        self.settings = settings
        self.names = settings.engine.model_names  # what requests may call the model
        self._bus = bus
        self._max_n = settings.scheduling.max_n
        self._is_traced = settings.observation.tracing
        self._max_unread_bytes = settings.admission.max_unread_bytes
        self.deployment = deployment
        self.readiness = readiness
        self.journal = StreamJournal(
            max_streams=2 * (scheduling.max_num_queued_reqs + scheduling.max_num_seqs)
            + scheduling.max_num_queued_background_reqs,
            max_bytes=2 * BYTES_PER_TOKEN * scheduling.max_num_queued_tokens,  # of the background as of the others
        )
        self.admission = make_admission(settings.admission, settings.scheduling)
        self.forecasts = Forecasts()
        self.calls = Calls()
        self.questions = Questions(bus, deployment, readiness, self.calls, self.admission)
        self.load_reports = LoadReports(self.questions.load)
        self.adapters = AdapterNames(bus, self.questions, settings.adapters, settings.engine.model_names)
        self.recovery = StreamRecovery(bus, deployment, self.journal, self.calls, settings.deployment.resume_timeout)
        self.throttle = FlushThrottle(stretch=stretch())
        self.meter = RequestMeter(settings.engine.model_name)

    @property
    def address(self) -> str:
        """Where the other services send a request's output."""
        return self._bus.address

    # -- for the fronts

    async def generate(
        self,
        request: TokenizeRequest,
        deliver: Callable[[Stream], Awaitable[None]],
        *,
        has: Sequence[Position] | None = None,
    ) -> None:
        """Open a stream and let `deliver` take its output to the end, within the request's deadline; report the result.

        `has`: what a client that comes back has of it.  Raises RequestError where it is refused, fails or expires.
        Being cancelled aborts it.
        """
        report, deadline = StreamReport(self.meter), request.header.deadline
        work = self._generate(request, report, deliver, has)
        try:
            await (work if deadline is None else within(deadline, work))
        except RequestError as error:
            report.failed(error)
            raise
        except asyncio.CancelledError:
            report.cancelled(expired=deadline is not None and steady_time() >= deadline)
            raise

    async def _generate(
        self,
        request: TokenizeRequest,
        report: StreamReport,
        deliver: Callable[[Stream], Awaitable[None]],
        has: Sequence[Position] | None,
    ) -> None:
        try:
            check_n(request.params.n, self._max_n)
            if request.params.grammar is not None:
                check_grammar(request.params.grammar)  # before a megabyte of it is sent on
            await self.readiness.until_available()
            request = await self.adapters.settle(request)
            stream = self.open(request, has)
        finally:
            report.received(request)
        report.opened(stream)
        stream.on_output = report.progressed
        try:
            await stream.deliver(deliver(stream))
        finally:
            self.close(stream)
        if stream.error is not None:
            raise stream.error
        report.finished(stream)

    def open(self, request: TokenizeRequest, has: Sequence[Position] | None = None) -> Stream:
        """Journal a request and send it on; raises RequestError where there is no room, or not enough time.

        `has` says what of it a client has that comes back for the rest.
        """
        header = request.header
        self._check_time(request)
        if earlier := self.journal.get(header.request_id):
            self._supersede(earlier)
        self.admission.admit(request, self.deployment.roster.max_model_len)
        stream = Stream(request, "", has)
        if self._is_traced:
            stream.latency = StreamLatency(header.arrival_time, sent=header.sent_time)
        try:
            self.journal.add(stream)
        except RequestError:
            self.admission.release(request)
            raise
        if not header.is_background:  # its times say nothing of those of others
            self.forecasts.of(header.tenant).opened(header.request_id, time.monotonic())
        self.recovery.dispatch(stream)
        if stream.error is not None:
            self._forget(stream)
            raise stream.error
        self._bus.flush()  # at once: its first token waits for nothing else
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream, and let the other services forget it: aborted, or acknowledged where it had ended."""
        if self.journal.get(stream.header.request_id) is stream:
            self._forget(stream)
            if not (stream.error and stream.error.code in DONE):
                reason = HAS_EVERYTHING if stream.finished else "cancelled"
                abort = AbortRequest(stream.header.request_id, reason, self._bus.address)
                self._bus.send_soon(stream.tokenizer or self._bus.scheduler, abort)
        if self._bus.phase is LifePhase.DRAINING:
            self.readiness.notice()

    def abort(self, *, request_id: str = "", label: str = "", tenant: str = "", own_only: bool = False) -> int:
        """End the streams so named; returns how many there were.  `own_only`: none but the tenant's."""
        streams = self.journal.find(request_id=request_id, label=label, tenant=tenant)
        if own_only:
            streams = [stream for stream in streams if stream.header.tenant == tenant]
        for stream in streams:
            stream.fail(RequestError("aborted by a client's Abort", code=RejectCode.CANCELLED))
        return len(streams)

    def _forget(self, stream: Stream) -> None:
        header = stream.header
        self.journal.remove(stream)
        self.admission.release(stream.request)
        num_tokens = max((len(sequence.token_ids) for sequence in stream.sequences), default=0)
        forecast = self.forecasts.of(header.tenant)
        forecast.closed(header.request_id, time.monotonic(), num_tokens if stream.finished else 0)
        self.recovery.forget(stream)

    def _supersede(self, stream: Stream) -> None:
        """Its client is back over another connection: the old one gets nothing any more."""
        self._forget(stream)
        stream.fail(RequestError("another call with the same idempotency key took over", code=RejectCode.CANCELLED))

    def _check_time(self, request: TokenizeRequest) -> None:
        """Raise RequestError where a request's deadline has passed, or would before it is served, as things go."""
        deadline = request.header.deadline
        if deadline is None:
            return
        left = deadline - steady_time()
        if left <= 0:
            raise RequestError("the call's deadline has passed", code=RejectCode.DEADLINE_EXCEEDED)
        forecast = self.forecasts.of(request.header.tenant)
        needed = 0.0 if request.header.is_background else forecast.needed(request.params.max_tokens)
        if needed > left:
            raise RequestError(
                f"the request would take about {needed:.1f} s, and its deadline is in {left:.1f} s",
                code=RejectCode.RESOURCE_EXHAUSTED,
                retry_after_ms=max(1, int(1000 * (needed - left))),
            )

    # -- for the mailbox

    def handle_text(self, batch: TextBatch) -> None:
        now, unix_now = time.monotonic(), time.time()
        find, later = self.journal.get, self.throttle.add
        for news in batch.sequences:
            stream = find(news.request_id)
            if stream is None:  # closed; a replica that came back may have sent its request on since
                self._bus.send(self._bus.scheduler, AbortRequest(news.request_id, gateway=self._bus.address))
                continue
            try:
                stream.accept(news)
                self.recovery.heard(news.request_id)
                if (latency := stream.latency) is not None:
                    latency.heard_at = unix_now
                    if news.latency is not None or news.finish_reason is not None:  # most output has no times
                        latency.heard(news, unix_now, self._bus.busy_since)
                if not stream.is_heard:
                    stream.is_heard = True
                    self.forecasts.of(stream.header.tenant).heard(news.request_id, now)
                if stream.num_unread > self._max_unread_bytes:
                    stream.overrun(unread(stream.num_unread, self._max_unread_bytes))
                    self._bus.send(self._bus.scheduler, AbortRequest(news.request_id, "not read"))
                later(stream)
            except OutputLostError as error:
                request_logger(log, stream.header).warning("output_lost", index=news.index, reason=str(error))
                self._bus.send(self._bus.scheduler, StreamLost(news.request_id, news.index))
            except ProtocolError as error:
                request_logger(log, stream.header).warning("output_dropped", reason=str(error))

    def handle_rejected(self, message: RequestRejected) -> None:
        error = rejected(message)
        self.calls.fail(message.request_id, error)
        if (stream := self.journal.get(message.request_id)) is None:
            return
        if error.code is RejectCode.UNAVAILABLE:  # the next roster may have the missing service again
            self.recovery.refused(stream, error)
        else:
            stream.fail(error)

    def handle_answer(
        self, message: EncodeResult | DecodeResult | PiecesResult | DescribeResult | Load | AdapterLoaded
    ) -> None:
        self.calls.resolve(message.request_id, message)


def unread(num_bytes: int, limit: int) -> RequestError:
    return RequestError(
        f"{num_bytes} bytes of output wait for a client that does not read them, more than max_unread_bytes={limit}",
        code=RejectCode.RESOURCE_EXHAUSTED,
    )
