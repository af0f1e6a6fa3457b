"""The gateway's shell: its mailbox, the roster's consequences for open streams, and the gRPC server's life."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from services.gateway.auth import make_access
from services.gateway.calls import Calls, Question
from services.gateway.custody import Custody
from services.gateway.forecast import Forecasts
from services.gateway.http.server import HttpServer
from services.gateway.intake import make_intake
from services.gateway.limits import make_admission, question_tokens
from services.gateway.load_report import LoadReports
from services.gateway.pace import Pace, stretch
from services.gateway.readiness import Readiness
from services.gateway.reception import Reception
from services.gateway.server import GRACE, FrontServer
from services.gateway.status import rejected, unavailable
from services.gateway.streams import Journal, OutputLostError
from shared.actor import MemberActor, Phase
from shared.actor.actor import Handlers
from shared.clock import steady_time
from shared.config import Settings
from shared.errors import FatalError, ProtocolError, RejectCode, RequestError
from shared.exposition import RequestMeter
from shared.logging import request_logger
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    Fingerprint,
    GatewayInbox,
    GetLoad,
    Load,
    Member,
    Message,
    PiecesRequest,
    PiecesResult,
    Refused,
    RequestRejected,
    Roster,
    ServiceName,
    StreamLost,
    TextBatch,
    Tick,
)
from shared.transport import Transport, pick

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = structlog.get_logger()

BYTES_PER_TOKEN = 8  # of a prompt, generously
MAX_CALLS = 1024  # questions without an answer, each of which may hold a prompt


class GatewayActor(MemberActor):
    """Owns the journal of open streams.  Every request it sent is answered, aborted, or ended with a status."""

    service = ServiceName.GATEWAY
    inbox_union = GatewayInbox

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        super().__init__(transport, settings, instance)
        self.journal = Journal(
            max_streams=2 * (settings.max_num_queued_reqs + settings.max_num_seqs),
            max_bytes=BYTES_PER_TOKEN * settings.max_num_queued_tokens,
        )
        self.admission = make_admission(settings)
        self.forecasts = Forecasts()
        self.access = make_access(settings)
        self.intake = make_intake(settings)
        self.calls = Calls()
        self.meter = RequestMeter(settings.model_name)
        self.readiness = Readiness(self, settings.resume_timeout, shares_ports=settings.share_port)
        self.load_reports = LoadReports(self)
        self.pace = Pace(stretch=stretch())
        self.server = FrontServer(self, settings)
        self.http = HttpServer(self, settings) if settings.http_port >= 0 else None
        self.custody = Custody(self, self.journal, self.calls, settings.resume_timeout)
        self.reception = Reception(self)
        self._kinds: dict[str, Fingerprint] = {}  # by name: of the workers, and of those that began open streams
        self._flush_due = False
        self._departure: asyncio.Timeout | None = None  # while it leaves

    def handlers(self) -> Handlers:
        return {
            TextBatch: self.handle_text,
            RequestRejected: self.handle_rejected,
            EncodeResult: self.handle_answer,
            DecodeResult: self.handle_answer,
            PiecesResult: self.handle_answer,
            Load: self.handle_answer,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    # -- life

    async def on_start(self) -> None:
        await self.server.start()
        if self.http is not None:
            await self.http.start()
        await super().on_start()
        self.spawn(self.server.follow_health())
        self.spawn(self.server.watch_peers())

    def on_drain(self, deadline: float) -> None:
        self.readiness.notice()
        self.spawn(self._leave())

    def on_hurry(self) -> None:
        if self._departure is not None and not self._departure.expired():
            self._departure.reschedule(asyncio.get_running_loop().time() + self.leaves_by - steady_time())

    async def _leave(self) -> None:
        """Let the open streams go on for as long as there is, then end them and stop."""
        seconds = self.leaves_by - steady_time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as self._departure:
                await (self._hand_over(seconds) if self.settings.share_port else self._until_idle())
        self._departure = None
        self.custody.fail_all("the server is shutting down")
        self.stop()
        self.post(Tick())  # wakes the run loop, which sees that it is over

    async def _until_idle(self) -> None:
        while len(self.journal):
            await self.readiness.changed()

    async def _hand_over(self, seconds: float) -> None:
        """Leave the ports to others at once; return when every call that had come has ended."""
        if self.http is not None:
            self.http.hand_over(seconds)
        await self.server.hand_over(seconds + GRACE)
        await self._until_idle()

    async def on_stop(self) -> None:
        if self.http is not None:
            await self.http.stop()
        await self.server.stop()
        await super().on_stop()

    # -- what the servicers ask for

    @property
    def status(self) -> str:
        return "NOT_SERVING" if self.phase is Phase.READY and self.readiness.unwell else self.phase.name

    def ledgers(self) -> Mapping[str, Any]:
        return {
            **super().ledgers(),
            "unwell": self.readiness.unwell,
            "num_streams": len(self.journal),
            "num_paused": len(self.custody.paused.all()),
            "num_calls": len(self.calls),
            "num_open_tokens": self.admission.num_tokens,
            "num_waiting": len(self.forecasts),
            "members": self.roster.members,
        }

    def collectors(self) -> list[Collector]:
        self.meter.num_open = len(self.journal)
        return [*super().collectors(), self.meter]

    @property
    def absent(self) -> str:
        """Which other services are not there, or an empty string."""
        return self.readiness.absent

    def absent_for(self, fingerprint: str) -> str:
        """As `absent`, for a stream that was begun with this fingerprint: others would change its text."""
        kinds = [one.name for one in self.roster.fingerprints]
        if self.absent or not fingerprint or not kinds or fingerprint in kinds:
            return self.absent
        return f"no worker computes as the one that began this ({fingerprint}; there is {', '.join(kinds)})"

    @property
    def system_fingerprint(self) -> str:
        """The name of what is computed with, in a row where workers are mixed; empty where no worker has come yet."""
        return ",".join(sorted(one.name for one in self.roster.fingerprints))

    def alive(self) -> list[Fingerprint]:
        begun = sorted({stream.fingerprint for stream in self.journal if not stream.ended})
        return [self._kinds[name] for name in begun if name in self._kinds]

    async def ask_tokenizer(self, question: EncodeRequest | DecodeRequest, seconds: float) -> Message:
        """Ask on a client's behalf: it counts as a request of its tenant while there is no answer."""
        name = question.request_id
        self.admission.enter(name, question.tenant, question_tokens(question))
        try:
            return await self._ask(question, self.tokenizer(name), seconds)
        except (RequestError, asyncio.CancelledError):  # what is in a queue there need not be begun with
            if address := self.tokenizer(name):
                self.send_soon(address, AbortRequest(name, gateway=self.inbox.address))
            raise
        finally:
            self.admission.leave(name, question.tenant)

    async def ask_pieces(self, question: PiecesRequest, seconds: float) -> Message:
        """Ask for ourselves, on behalf of requests that are let in."""
        return await self._ask(question, self.tokenizer(question.request_id), seconds)

    async def ask_load(self, seconds: float) -> Message:
        if not self.scheduler_is_live:
            raise unavailable("no scheduler is live")
        return await self._ask(GetLoad(uuid.uuid4().hex, self.inbox.address), self.scheduler, seconds)

    async def _ask(self, question: Question, address: str, seconds: float) -> Message:
        if len(self.calls) >= MAX_CALLS:
            raise RequestError(
                f"{len(self.calls)} questions are open at this gateway, the most that it takes",
                code=RejectCode.RESOURCE_EXHAUSTED,
                retry_after_ms=100,
            )
        call = self.calls.add(question, address)
        if address:
            self.send_soon(address, question)
        return await self.calls.wait(call, seconds)

    def send_soon(self, address: str, message: Message) -> None:
        """Send from outside a handler: one flush for all that this turn of the event loop queues."""
        self.send(address, message)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        if self.phase is not Phase.STOPPED:
            self.outbox.flush()

    def tokenizer(self, key: str) -> str:
        """The live replica that serves `key`, or an empty string."""
        return pick(key, [member.address for member in self.members(ServiceName.TOKENIZER)]) or ""

    # -- the mailbox

    def handle_text(self, batch: TextBatch) -> None:
        now, unix_now = time.monotonic(), time.time()
        for news in batch.sequences:
            stream = self.journal.get(news.request_id)
            if stream is None:  # closed; a replica that came back may have sent its request on since
                self.send(self.scheduler, AbortRequest(news.request_id, gateway=self.inbox.address))
                continue
            try:
                stream.accept(news)
                if (account := stream.account) is not None:
                    account.heard_at = unix_now
                    if news.ledger is not None or news.finish_reason is not None:  # most output tells nothing of time
                        account.heard(news, unix_now, self.busy_since)
                self.forecasts.of(stream.header.tenant).heard(news.request_id, now)
                if stream.num_unread > self.settings.max_unread_bytes:
                    stream.overrun(unread(stream.num_unread))
                    self.send(self.scheduler, AbortRequest(news.request_id, "not read"))
                self.pace.add(stream)
            except OutputLostError as error:
                request_logger(log, stream.header).warning("output_lost", index=news.index, reason=str(error))
                self.send(self.scheduler, StreamLost(news.request_id, news.index))
            except ProtocolError as error:
                request_logger(log, stream.header).warning("output_dropped", reason=str(error))

    def before_flush(self) -> None:
        self.pace.release()

    def handle_rejected(self, message: RequestRejected) -> None:
        error = rejected(message)
        self.calls.fail(message.request_id, error)
        if (stream := self.journal.get(message.request_id)) is None:
            return
        if error.code is RejectCode.UNAVAILABLE:  # the next roster may say that who was missing is back
            self.custody.pause(stream)
        else:
            stream.fail(error)

    def handle_answer(self, message: EncodeResult | DecodeResult | PiecesResult | Load) -> None:
        self.calls.resolve(message.request_id, message)

    # -- the roster's consequences

    def handle_roster(self, roster: Roster) -> None:
        begun = {one.name: one for one in self.alive()}
        super().handle_roster(roster)
        self._kinds = {one.name: one for one in self.roster.fingerprints} | begun
        self.readiness.heard(roster, is_current=roster.scheduler_epoch == self.roster.scheduler_epoch)
        self.custody.resume()
        self.readiness.notice()

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        gone = {member.address for member in left if member.service is ServiceName.TOKENIZER}
        if gone:
            self.custody.replace_tokenizers(gone)

    def on_new_scheduler(self) -> None:
        self.custody.pause_all()

    def on_forgotten(self) -> None:
        self.custody.pause_all()  # the scheduler has ended what it had from us

    def on_moved(self) -> None:
        for stream in self.journal:
            stream.readdress(self.inbox.address)

    def on_tick(self) -> None:
        if self.phase is Phase.DRAINING:  # still alive: its streams go on
            self.send(self.scheduler, self.heartbeat())
        now = time.monotonic()
        self.custody.look_after(now)
        if self.readiness.has_lost_scheduler(now):
            self.custody.fail_all("the scheduler was lost")
            if self.inbox.is_cut_off:  # nothing is left to lose here, and another life may find a network
                raise FatalError("no network leads to the scheduler")
        self.readiness.notice()


def unread(num_bytes: int) -> RequestError:
    return RequestError(
        f"{num_bytes} bytes of output wait for a client that does not read them, more than max_unread_bytes",
        code=RejectCode.RESOURCE_EXHAUSTED,
    )
