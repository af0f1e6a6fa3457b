"""All streams of one detokenizer, and the messages about them.  No sockets, no clock."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import structlog

from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.stream import StreamGapError, TextStream
from shared.errors import RejectCode
from shared.messages import (
    OpenStream,
    RequestRejected,
    SequenceText,
    SequenceTokens,
    StopMatched,
    StreamLost,
    TokenBatch,
)
from shared.processes.logging import request_logger
from shared.tracing.latency import LatencyTracker
from shared.tracing.phases import Phase

log = structlog.get_logger()

MAX_CLOSED = 4096  # streams remembered after their end, for as long as tokens may be under way: some steps

Key = tuple[str, int]


class StreamTable:
    """Open streams by (request_id, index), and what was said since it was last taken.

    Invariant: a stream is in the table from its opening to its finish, its closing or its loss; those that ended here
    are remembered for a while, so that tokens still under way for them are not taken for a loss.
    """

    def __init__(self, decoders: DecoderFactory, *, max_closed: int = MAX_CLOSED) -> None:
        self.streams: dict[Key, TextStream] = {}
        self._decoders = decoders
        self._max_closed = max_closed
        self._closed: OrderedDict[Key, None] = OrderedDict()  # oldest first
        self._texts: dict[str, list[SequenceText]] = {}
        self._rejections: list[tuple[str, RequestRejected]] = []
        self._stopped: list[StopMatched] = []
        self._lost: dict[Key, None] = {}
        self._times = 0.0, 0.0, 0.0  # now, since when there was no pause, and when the step came back

    def apply(self, batch: TokenBatch, now: float = 0.0, busy_since: float = 0.0) -> None:
        """Take one scheduler step's word, at this time; the times are Unix seconds, for accounts only."""
        self._times = now, busy_since, batch.stamp
        for opened in batch.opened:
            self._open(opened)
        for tokens in batch.sequences:
            self._advance(tokens)
        for request_id, index in batch.closed:
            self._close((request_id, index))

    def forget_gateway(self, gateway: str) -> None:
        """Drop the streams of a gateway that has left."""
        for key in [key for key, stream in self.streams.items() if stream.opened.header.gateway == gateway]:
            self._close(key)

    def clear(self) -> None:
        """Forget everything: the scheduler that opened these streams is gone."""
        self.streams.clear()
        self._closed.clear()

    def take_texts(self, now: float = 0.0) -> dict[str, list[SequenceText]]:
        """New text by gateway since the last call; it leaves now."""
        taken, self._texts = self._texts, {}
        for texts in taken.values():
            for place, said in enumerate(texts):
                if (latency := said.latency) is not None:
                    booked = LatencyTracker(Phase.DETOKENISE, latency.stamp, latency).breakdown(now)
                    texts[place] = msgspec.structs.replace(said, latency=booked)
        return taken

    def take_rejections(self) -> list[tuple[str, RequestRejected]]:
        """Requests that could not be decoded, with their gateways, since the last call."""
        taken, self._rejections = self._rejections, []
        return taken

    def take_notices(self) -> list[StopMatched | StreamLost]:
        """What the scheduler has to know since the last call; each lost stream once."""
        lost = [StreamLost(request_id, index) for request_id, index in self._lost]
        taken: list[StopMatched | StreamLost] = [*self._stopped, *lost]
        self._stopped, self._lost = [], {}
        return taken

    def _open(self, opened: OpenStream) -> None:
        key = (opened.header.request_id, opened.index)
        self._closed.pop(key, None)
        try:
            self.streams[key] = TextStream(opened, self._decoders)
        except Exception:
            self._fail(key, opened)

    def _advance(self, tokens: SequenceTokens) -> None:
        key = (tokens.request_id, tokens.index)
        stream = self.streams.get(key)
        if stream is None:
            if key not in self._closed:
                self._lost[key] = None
            return
        try:
            said = stream.advance(tokens, *self._times)
        except StreamGapError as error:
            request_logger(log, stream.opened.header).warning("stream_lost", index=tokens.index, reason=str(error))
            del self.streams[key]
            self._lost[key] = None
            return
        except Exception:
            self._fail(key, stream.opened)
            return
        if said is not None:
            self._texts.setdefault(stream.opened.header.gateway, []).append(said)
        if stream.finish_reason is not None:
            if said is not None and said.latency is not None:
                request_logger(log, stream.opened.header).info(
                    "stream_finished",
                    index=tokens.index,
                    num_output_tokens=stream.num_tokens,
                    finish_reason=stream.finish_reason,
                )
            self._close(key)
            if tokens.finish_reason is None:
                self._stopped.append(StopMatched(tokens.request_id, tokens.index, stream.num_tokens))

    def _fail(self, key: Key, opened: OpenStream) -> None:
        """A defect of ours in one stream ends its request, and only that."""
        request_logger(log, opened.header).exception("stream_failed", index=opened.index)
        request_id, index = key
        num_tokens = self.streams[key].num_tokens if key in self.streams else 0
        self._close(key)
        rejection = RequestRejected(request_id, RejectCode.INTERNAL, "the output could not be decoded")
        self._rejections.append((opened.header.gateway, rejection))
        # No service reads what the scheduler would still generate.
        self._stopped.append(StopMatched(request_id, index, num_tokens))

    def _close(self, key: Key) -> None:
        self.streams.pop(key, None)
        self._closed.pop(key, None)
        self._closed[key] = None
        if len(self._closed) > self._max_closed:
            self._closed.popitem(last=False)
