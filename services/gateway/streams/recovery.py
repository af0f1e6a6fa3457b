"""Recovery of open streams and questions: which service has each, and what happens when that service is lost."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from services.gateway.bus.bus import Bus
from services.gateway.bus.calls import Calls, PendingCall
from services.gateway.bus.deployment import RosterView
from services.gateway.bus.refusals import UNSENDABLE, unavailable, unsendable
from services.gateway.streams.journal import StreamJournal
from services.gateway.streams.stream import Stream
from shared.errors import RequestError
from shared.messages import AttachRequest, StreamLost

PATIENCE = 5.0  # seconds of silence until a stream is sent again; doubles each time, since it may just be queued
REST = 12  # times as long for what is in the background, which rests as long as others are served


class Quiet(msgspec.Struct):
    """How many tokens a stream has, and since when."""

    num_tokens: int
    since: float
    patience: float


class StreamRecovery:
    """Invariant: every stream of the journal that has not ended is at a tokenizer, behind it, or paused.

    When a service is lost, a stream pauses until every service that it needs is there again, or `resume_timeout` has
    passed.  Then its request is sent again from where the stream stands.  To send it too often is harmless: the
    scheduler knows its requests, and output that has come already is dropped here.
    """

    def __init__(
        self, bus: Bus, deployment: RosterView, journal: StreamJournal, calls: Calls, resume_timeout: float
    ) -> None:
        self._paused: dict[str, tuple[Stream, float]] = {}  # with the time since when, in the order of pausing
        self._refused: dict[str, float] = {}  # by request, when a service first said that it could not take it now
        self.watchdog = SilenceWatchdog()
        self._bus = bus
        self._deployment = deployment
        self._journal = journal
        self._calls = calls
        self._resume_timeout = resume_timeout

    @property
    def paused(self) -> list[Stream]:
        """Open streams that no service works on: each is sent again once all services are there."""
        return [stream for stream, _ in self._paused.values() if not stream.ended]

    def dispatch(self, stream: Stream) -> None:
        """Send a stream's request, if every service that it needs is there; else pause the stream.  One that no message
        can hold ends."""
        stream.tokenizer = self._deployment.tokenizer(stream.header.request_id)
        if self._deployment.absent_for(stream.fingerprint):
            self.pause(stream)
            return
        self._paused.pop(stream.header.request_id, None)
        request = stream.next_request
        if stream.latency is not None:
            request = msgspec.structs.replace(request, latency=stream.latency.sent())
        receiver = self._bus.scheduler if isinstance(request, AttachRequest) else stream.tokenizer
        try:
            self._bus.send(receiver, request)
        except UNSENDABLE as error:
            stream.fail(unsendable(error))

    def forget(self, stream: Stream) -> None:
        """The stream has ended, or its client has gone."""
        self._paused.pop(stream.header.request_id, None)
        self._refused.pop(stream.header.request_id, None)

    def refused(self, stream: Stream, error: RequestError) -> None:
        """A service could not take the request: it is sent again with the next roster, which may have a service that
        can, until `resume_timeout` after the first refusal."""
        now = time.monotonic()
        if now - self._refused.setdefault(stream.header.request_id, now) > self._resume_timeout:
            stream.fail(error)
            return
        stream.is_resumed |= stream.is_heard
        self.pause(stream)

    def heard(self, request_id: str) -> None:
        """Output has come: a service has taken the request."""
        if self._refused:
            self._refused.pop(request_id, None)

    # -- a service is missing

    def pause(self, stream: Stream) -> None:
        if not stream.ended:
            self._paused.setdefault(stream.header.request_id, (stream, time.monotonic()))

    def pause_all(self) -> None:
        """The scheduler has forgotten all streams: pause every one."""
        for stream in self._journal:
            stream.is_resumed |= bool(stream.tokenizer)
            self.pause(stream)

    def replace_tokenizers(self, gone: set[str]) -> None:
        """Send requests that a lost tokenizer had to another one; the scheduler ignores those that it already has."""
        for stream in self._journal:
            if stream.tokenizer in gone and not stream.ended:
                self._move(stream)
        for call in self._calls:
            if call.address in gone:
                self._ask_again(call)

    def _move(self, stream: Stream) -> None:
        if stream.answered or stream.header.request_id in self._paused:
            stream.tokenizer = self._deployment.tokenizer(stream.header.request_id)
        else:
            self.dispatch(stream)

    def _ask_again(self, call: PendingCall) -> None:
        call.address = self._deployment.tokenizer(call.question.request_id)
        if not call.address:
            return
        try:
            self._bus.send(call.address, call.question)
        except UNSENDABLE as error:
            self._calls.fail(call.question.request_id, unsendable(error))

    # -- a service has come, or time has passed

    def resume(self) -> None:
        """Send again what waited for a service, if all services are there now."""
        if not self._deployment.absent:
            for stream in self.paused:
                self.dispatch(stream)
        for call in self._calls:
            if not call.address:
                self._ask_again(call)

    def check_overdue(self, now: float) -> None:
        """End streams that were paused too long; send those again that have been silent too long."""
        for stream in self.paused:
            if now - self._paused[stream.header.request_id][1] <= self._resume_timeout:
                continue
            absent = self._deployment.absent_for(stream.fingerprint)
            stream.fail(unavailable(absent or "no service took the request in time"))
        for stream in self.watchdog.overdue(self._journal, now):
            if stream.header.request_id not in self._paused:
                self._bus.send(self._bus.scheduler, StreamLost(stream.header.request_id, 0))
                stream.is_resumed = True
                self.dispatch(stream)

    def fail_all(self, reason: str) -> None:
        """End every stream and question with UNAVAILABLE."""
        for stream in self._journal:
            stream.fail(unavailable(reason))
        for call in self._calls:
            self._calls.fail(call.question.request_id, unavailable(reason))


class SilenceWatchdog:
    """Notices open streams that have been silent for long: their request or their output may have been lost without the
    loss of a process, as when a network was cut and mended.

    It compares the number of tokens of every stream with that of the last look.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._quiet: dict[str, Quiet] = {}

    def overdue(self, streams: Iterable[Stream], now: float) -> list[Stream]:
        """The streams that are to be sent again; `streams` are all that are open, and others are forgotten."""
        before, self._quiet = self._quiet, {}
        found = []
        for stream in streams:
            request_id, num_tokens = stream.header.request_id, stream.num_output_tokens
            quiet = before.get(request_id)
            if quiet is None or quiet.num_tokens != num_tokens:
                quiet = Quiet(num_tokens, now, self._patience * (REST if stream.header.is_background else 1))
            elif now - quiet.since > quiet.patience and not stream.ended:
                quiet = Quiet(num_tokens, now, 2 * quiet.patience)
                found.append(stream)
            self._quiet[request_id] = quiet
        return found
