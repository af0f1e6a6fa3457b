"""Bytes and back: one reused encoder, one decoder per inbox, a hash of the whole schema."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import ProtocolError
from shared.messages.base import Message
from shared.messages.schema import described

MAX_MESSAGE_BYTES = 64 << 20

# Beside what does not fit its type: arrays in arrays without end, and lengths that no memory has.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError, MemoryError)

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One message -> its msgpack bytes."""
    return _encoder.encode(message)


class MessageDecoder(Generic[T]):
    """Decodes the messages of one inbox's union, and nothing else."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes | memoryview) -> T:
        """Raises ProtocolError where `data` is too large or is no message of this inbox."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except UNDECODABLE as error:
            raise ProtocolError(f"undecodable message of {len(data)} bytes: {error}") from error


@cache
def schema_hash() -> str:
    """A hash over every message of every inbox; instances that disagree refuse each other."""
    from shared.messages.inboxes import INBOXES

    return hashlib.sha256(described(INBOXES).encode()).hexdigest()[:16]
