"""Open streams and questions in the troupe's hands: who has each, and what is done when whoever had it is lost."""

from __future__ import annotations

import time

import msgspec

from services.gateway.bus.bus import Bus
from services.gateway.bus.calls import Call, Calls
from services.gateway.bus.deployment import Deployment
from services.gateway.bus.refusals import unavailable
from services.gateway.streams.journal import Journal
from services.gateway.streams.paused import PausedStreams
from services.gateway.streams.silence import Silence
from services.gateway.streams.stream import Stream
from shared.messages import AttachRequest, StreamLost


class Custody:
    """Every stream of the journal that has not ended is with a tokenizer, beyond it, or paused.

    When a service is lost a stream pauses, until everybody is there again or `resume_timeout` has passed; then it is
    asked again from where it stands.  To ask too often is harmless: the scheduler knows its requests, and what has come
    already is dropped here.
    """

    def __init__(self, bus: Bus, deployment: Deployment, journal: Journal, calls: Calls, resume_timeout: float) -> None:
        self.paused = PausedStreams()
        self.silence = Silence()
        self._bus = bus
        self._deployment = deployment
        self._journal = journal
        self._calls = calls
        self._resume_timeout = resume_timeout

    def entrust(self, stream: Stream) -> None:
        """Send a stream's request on, where somebody is there for all that it needs; else it is paused."""
        stream.tokenizer = self._deployment.tokenizer(stream.header.request_id)
        if self._deployment.absent_for(stream.fingerprint):
            self.pause(stream)
            return
        self.paused.discard(stream)
        request = stream.next_request
        if stream.account is not None:
            request = msgspec.structs.replace(request, ledger=stream.account.sent())
        receiver = self._bus.scheduler if isinstance(request, AttachRequest) else stream.tokenizer
        self._bus.send(receiver, request)

    def forget(self, stream: Stream) -> None:
        """It has ended, or its client has gone."""
        self.paused.discard(stream)

    # -- somebody is missing

    def pause(self, stream: Stream) -> None:
        self.paused.add(stream, time.monotonic())

    def pause_all(self) -> None:
        """The scheduler knows of none any more."""
        for stream in self._journal:
            stream.is_resumed |= bool(stream.tokenizer)
            self.pause(stream)

    def replace_tokenizers(self, gone: set[str]) -> None:
        """What a lost replica had not passed on is asked of another; the scheduler ignores what it already has."""
        for stream in self._journal:
            if stream.tokenizer in gone and not stream.ended:
                self._move(stream)
        for call in self._calls:
            if call.address in gone:
                self._ask_again(call)

    def _move(self, stream: Stream) -> None:
        if stream.answered or stream in self.paused:
            stream.tokenizer = self._deployment.tokenizer(stream.header.request_id)
        else:
            self.entrust(stream)

    def _ask_again(self, call: Call) -> None:
        call.address = self._deployment.tokenizer(call.question.request_id)
        if call.address:
            self._bus.send(call.address, call.question)

    # -- somebody has come, or time has passed

    def resume(self) -> None:
        """Ask again for what waited for somebody, as far as everybody is there now."""
        if not self._deployment.absent:
            for stream in self.paused.all():
                self.entrust(stream)
        for call in self._calls:
            if not call.address:
                self._ask_again(call)

    def look_after(self, now: float) -> None:
        """End what has waited too long for somebody's return; ask after what has been silent for long."""
        for stream in self.paused.overdue(now, self._resume_timeout):
            absent = self._deployment.absent_for(stream.fingerprint)
            stream.fail(unavailable(absent or "nobody took the request in time"))
        for stream in self.silence.overdue(self._journal, now):
            if stream not in self.paused:
                self._bus.send(self._bus.scheduler, StreamLost(stream.header.request_id, 0))
                stream.is_resumed = True
                self.entrust(stream)

    def fail_all(self, reason: str) -> None:
        """End every stream and question with UNAVAILABLE."""
        for stream in self._journal:
            stream.fail(unavailable(reason))
        for call in self._calls:
            self._calls.fail(call.question.request_id, unavailable(reason))
