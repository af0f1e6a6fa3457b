"""A client that comes back: under which key its answer is kept, what of it the client has, and how events say so.

The `Idempotency-Key` header names an answer.  Every event of a stream under a key has an id, which says how much of
each sequence the client has with it: `12.45,9.31` are 12 tokens and 45 characters of the first and so on.  Sent back as
`Last-Event-ID`, to any gateway, it is all that is needed to go on behind it: no gateway remembers what a client has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from services.gateway.access.header import check_key
from services.gateway.http.requests.reading import field_error
from services.gateway.streams.stream import Position, StreamDelta
from shared.errors import RequestError

KEY_HEADER = "idempotency-key"
POSITION_HEADER = "last-event-id"
POSITIONS = re.compile(r"\d{1,9}\.\d{1,9}(?:,\d{1,9}\.\d{1,9}){0,4095}")


def key_of(request: Request, place: int = 0) -> str:
    """The key of a request's answer, or of its part for the prompt at `place`; empty where it has none."""
    key = request.headers.get(KEY_HEADER, "")
    check_key(key)
    return f"{key}\0{place}" if key and place else key


def positions_of(request: Request, num_sequences: int) -> list[Position] | None:
    """What a client that comes back has; None where it asks for the first time, or for everything."""
    text = request.headers.get(POSITION_HEADER)
    if text is None:
        return None
    if not request.headers.get(KEY_HEADER):
        raise RequestError(f"{POSITION_HEADER} needs the {KEY_HEADER} of the first call", field=KEY_HEADER)
    if not POSITIONS.fullmatch(text):
        raise field_error(POSITION_HEADER, f"must be the id of an event, got {text[:64]!r}")
    pairs = [pair.split(".") for pair in text.split(",")]
    if len(pairs) > num_sequences:
        raise field_error(POSITION_HEADER, f"has {len(pairs)} positions, more than n")
    found = [Position(int(tokens), int(characters)) for tokens, characters in pairs]
    return [*found, *[Position()] * (num_sequences - len(found))]


def refuse_position(request: Request, what: str) -> None:
    """Where `what` an endpoint answers with is always sent as a whole."""
    if positions_of(request, 1) is not None:
        raise field_error(POSITION_HEADER, f"is not supported here: {what} is sent again from its start only")


class Bookmark:
    """How much of each sequence a client has with the events so far."""

    def __init__(self, num_sequences: int, has: Sequence[Position] | None, *, is_kept: bool) -> None:
        self._positions = list(has or [Position()] * num_sequences)
        self._is_kept = is_kept

    def add(self, index: int, delta: StreamDelta) -> None:
        """The next event has this too."""
        had = self._positions[index]
        num_chars = sum(map(len, delta.text))
        self._positions[index] = Position(had.num_tokens + len(delta.token_ids), had.num_chars + num_chars)

    @property
    def line(self) -> bytes:
        """The id of an event as a line; empty where the answer has no key: no client could come back for it."""
        if not self._is_kept:
            return b""
        return b"id: " + ",".join(f"{one.num_tokens}.{one.num_chars}" for one in self._positions).encode() + b"\n"


class Rest:
    """Parts what a client has of one sequence from what it has not, where the whole is sent again: calls and
    reasoning can only be parsed from the start of a text."""

    def __init__(self, has: Position) -> None:
        self._num_tokens = has.num_tokens
        self._num_chars = has.num_chars

    def split(self, delta: StreamDelta) -> tuple[StreamDelta | None, StreamDelta | None]:
        """The part that the client has and the part that is new; None where there is none."""
        text, ids = "".join(delta.text), delta.token_ids
        num_chars, num_tokens = min(len(text), self._num_chars), min(len(ids), self._num_tokens)
        if not (num_chars or num_tokens):
            return None, delta
        self._num_chars -= num_chars
        self._num_tokens -= num_tokens
        had = StreamDelta(delta.index, [text[:num_chars]], ids[:num_tokens])
        new = msgspec.structs.replace(
            delta, text=[text[num_chars:]], token_ids=ids[num_tokens:], logprobs=delta.logprobs[num_tokens:],
            prompt_logprobs=[],
        )  # fmt: skip
        is_new = len(text) > num_chars or len(ids) > num_tokens or delta.end is not None
        return had, new if is_new else None
