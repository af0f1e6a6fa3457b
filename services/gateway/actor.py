"""The gateway's shell: its mailbox, the roster's consequences for open streams, and the gRPC server's life."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TypeVar

import structlog

from services.gateway.calls import Call, Calls, Question
from services.gateway.pace import Pace, stretch
from services.gateway.server import FrontServer
from services.gateway.status import rejected, unavailable
from services.gateway.streams import Journal, Stream
from shared.actor import MemberActor, Phase
from shared.actor.actor import Handlers
from shared.config import Settings
from shared.errors import ProtocolError, RejectCode, RequestError
from shared.logging import request_logger
from shared.messages import (
    AbortRequest,
    DecodeResult,
    EncodeResult,
    GatewayInbox,
    GetLoad,
    Load,
    Member,
    Message,
    Refused,
    RequestRejected,
    Roster,
    ServiceName,
    TextBatch,
    Tick,
    TokenizeRequest,
)
from shared.transport import Transport, pick

log = structlog.get_logger()

WAIT_FOR_SERVICES = 0.2  # seconds: long enough for a replica that is just being replaced, no more
NEEDED = (ServiceName.TOKENIZER, ServiceName.WORKER, ServiceName.DETOKENIZER)
BYTES_PER_TOKEN = 8  # of a prompt, generously

M = TypeVar("M", bound=Message)


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
        self.calls = Calls()
        self.pace = Pace(stretch=stretch())
        self.server = FrontServer(self, settings)
        self._scheduler_seen = 0.0
        self._flush_due = False
        self._changed = asyncio.Event()  # the roster or the phase

    def handlers(self) -> Handlers:
        return {
            TextBatch: self.handle_text,
            RequestRejected: self.handle_rejected,
            EncodeResult: self.handle_answer,
            DecodeResult: self.handle_answer,
            Load: self.handle_answer,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    # -- life

    async def on_start(self) -> None:
        await self.server.start()
        await super().on_start()
        self.spawn(self.server.follow_health())

    def on_drain(self, deadline: float) -> None:
        self._notice()
        self.spawn(self._leave(deadline))

    async def _leave(self, deadline: float) -> None:
        """Let the open streams go on until `deadline`, then end them and stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.time()):
                while len(self.journal):
                    await self.changed()
        self.fail_all("the server is shutting down")
        self.stop()
        self.post(Tick())  # wakes the run loop, which sees that it is over

    async def on_stop(self) -> None:
        await self.server.stop()
        await super().on_stop()

    # -- what the servicers ask for

    @property
    def missing(self) -> str:
        """Why no request can be served now, or an empty string."""
        if self.phase >= Phase.DRAINING:
            return "the server is draining"
        if not self.scheduler_is_live:
            return "no scheduler is live"
        absent = [service for service in NEEDED if not self.members(service)]
        if absent:
            return f"no {' and no '.join(absent)} is live"
        return "" if self.phase is Phase.READY else "the gateway is starting"

    async def until_available(self) -> None:
        """Return once requests can be served; raises RequestError, soon, where they cannot."""
        if not self.missing:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_FOR_SERVICES):
                while self.missing and self.phase < Phase.DRAINING:
                    await self.changed()
        if self.missing:
            raise unavailable(self.missing)

    async def changed(self) -> None:
        """Wait for the next change of the roster or the phase."""
        await self._changed.wait()

    def open(self, request: TokenizeRequest) -> Stream:
        """Journal a request and send it on; raises RequestError where there is no room."""
        stream = Stream(request, self._tokenizer(request.header.request_id))
        self.journal.add(stream)
        self.send(stream.tokenizer, request)
        self.outbox.flush()  # at once: its first token waits for nothing else
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream, and let the troupe forget it: aborted, or acknowledged where it had come to its end."""
        self.journal.remove(stream)
        if not (stream.error and stream.error.code in DONE):
            reason = "finished" if stream.finished else "cancelled"
            self.send_soon(stream.tokenizer, AbortRequest(stream.header.request_id, reason))
        if self.phase is Phase.DRAINING:
            self._notice()

    def abort(self, *, request_id: str = "", label: str = "", tenant: str = "") -> int:
        """End the streams so named; returns how many there were."""
        streams = self.journal.find(request_id=request_id, label=label, tenant=tenant)
        for stream in streams:
            stream.fail(RequestError("aborted by a client's Abort", code=RejectCode.CANCELLED))
        return len(streams)

    async def ask_tokenizer(self, question: Question, seconds: float) -> Message:
        return await self._ask(question, self._tokenizer(question.request_id), seconds)

    async def ask_load(self, seconds: float) -> Message:
        if not self.scheduler_is_live:
            raise unavailable("no scheduler is live")
        return await self._ask(GetLoad(uuid.uuid4().hex, self.inbox.address), self.scheduler, seconds)

    async def _ask(self, question: Question, address: str, seconds: float) -> Message:
        call = self.calls.add(question, address)
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

    def _tokenizer(self, key: str) -> str:
        """The live replica that serves `key`; raises RequestError where there is none."""
        address = pick(key, [member.address for member in self.members(ServiceName.TOKENIZER)])
        if address is None:
            raise unavailable("no tokenizer is live")
        return address

    # -- the mailbox

    def handle_text(self, batch: TextBatch) -> None:
        for news in batch.sequences:
            if (stream := self.journal.get(news.request_id)) is None:
                continue  # closed meanwhile; its abort is on the way
            try:
                stream.accept(news)
                self.pace.add(stream)
            except ProtocolError as error:
                request_logger(log, stream.header).warning("output_lost", reason=str(error))
                stream.fail(unavailable("part of the output was lost"))

    def before_flush(self) -> None:
        self.pace.release()

    def handle_rejected(self, message: RequestRejected) -> None:
        error = rejected(message)
        self.calls.fail(message.request_id, error)
        if stream := self.journal.get(message.request_id):
            stream.fail(error)

    def handle_answer(self, message: EncodeResult | DecodeResult | Load) -> None:
        self.calls.resolve(message.request_id, message)

    # -- the roster's consequences

    def handle_roster(self, roster: Roster) -> None:
        super().handle_roster(roster)
        self._scheduler_seen = time.monotonic()
        self._notice()

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        gone = {member.address for member in left if member.service is ServiceName.TOKENIZER}
        if gone:
            self._replace_tokenizers(gone)

    def on_new_scheduler(self) -> None:
        self.fail_all("the scheduler was replaced")

    def on_tick(self) -> None:
        if self.phase is Phase.DRAINING:  # still alive: its streams go on
            self.send(self.scheduler, self.heartbeat())
        if time.monotonic() - self._scheduler_seen > 2 * self.settings.heartbeat_timeout:
            self.fail_all("the scheduler was lost")
        self._notice()

    def fail_all(self, reason: str) -> None:
        """End every stream and question with UNAVAILABLE."""
        for stream in self.journal:
            stream.fail(unavailable(reason))
        for call in self.calls:
            self.calls.fail(call.question.request_id, unavailable(reason))

    def _replace_tokenizers(self, gone: set[str]) -> None:
        """What a lost replica had not passed on is asked of another; the scheduler ignores what it already has."""
        for stream in self.journal:
            if stream.tokenizer in gone and not stream.ended:
                self._move_stream(stream)
        for call in self.calls:
            if call.address in gone:
                self._move_call(call)

    def _move_stream(self, stream: Stream) -> None:
        try:
            stream.tokenizer = self._tokenizer(stream.header.request_id)
        except RequestError as error:
            if not stream.answered:
                stream.fail(error)
            return
        if not stream.answered:
            self.send(stream.tokenizer, stream.request)

    def _move_call(self, call: Call) -> None:
        try:
            call.address = self._tokenizer(call.question.request_id)
            self.send(call.address, call.question)
        except RequestError as error:
            self.calls.fail(call.question.request_id, error)

    def _notice(self) -> None:
        """Wake whoever waits in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()


# A request that ended thus was ended by the troupe itself, which needs no word of it.
DONE = frozenset({RejectCode.INVALID_ARGUMENT, RejectCode.NOT_FOUND, RejectCode.RESOURCE_EXHAUSTED})
