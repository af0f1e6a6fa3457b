"""The journal of open streams, within what one gateway agrees to remember."""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.streams.stream import Stream
from shared.errors import RejectCode, RequestError
from shared.messages import EncodeRequest, TokenizeRequest


class StreamJournal:
    """All open streams of one gateway, by request id, within what this gateway agrees to remember."""

    def __init__(self, max_streams: int, max_bytes: int) -> None:
        self.max_streams = max_streams
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    def add(self, stream: Stream) -> None:
        """Raises RequestError where this gateway already holds as much as it may."""
        size = prompt_bytes(stream.request)
        if len(self) >= self.max_streams:
            raise _full(f"{len(self)} streams are open at this gateway, the limit is {self.max_streams}")
        if self.num_bytes + size > self.max_bytes and self._streams:
            raise _full(f"{self.num_bytes} bytes of prompts are open at this gateway, the limit is {self.max_bytes}")
        self.num_bytes += size
        self._streams[stream.header.request_id] = stream

    def remove(self, stream: Stream) -> None:
        if self.get(stream.header.request_id) is stream:
            del self._streams[stream.header.request_id]
            self.num_bytes -= prompt_bytes(stream.request)

    def find(self, *, request_id: str = "", label: str = "", tenant: str = "") -> list[Stream]:
        """The stream of an id, or all of a tenant's streams under a label."""
        if request_id:
            stream = self.get(request_id)
            return [stream] if stream else []
        return [stream for stream in self if label and (stream.header.label, stream.header.tenant) == (label, tenant)]


def prompt_bytes(request: TokenizeRequest | EncodeRequest) -> int:
    """About what a request's prompt takes in memory."""
    token_ids = request.token_ids if isinstance(request, TokenizeRequest) else None
    chat = sum(len(message.content) + len(message.reasoning) for message in request.chat or ())
    calls = sum(len(call.arguments) for message in request.chat or () for call in message.tool_calls)
    options = request.chat_options
    beside = len(options.tools) + len(options.template_args) if options is not None else 0
    return len(request.text or "") + chat + calls + beside + len(token_ids or b"")


def _full(reason: str) -> RequestError:
    return RequestError(reason, code=RejectCode.RESOURCE_EXHAUSTED, retry_after_ms=1000)
