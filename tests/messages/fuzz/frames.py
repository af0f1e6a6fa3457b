"""Frames of every degree of wrongness: well-formed nonsense, wrong types, torn and flipped bytes, noise, bombs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from shared.messages.inboxes import INBOXES
from tests.messages.fuzz.values import Nonsense

ABSURD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), "", "x" * 1000, b"", b"\xff" * 9, [], {}, [[]],
    {"a": 1}, [None] * 40, "\ud7ff",
)  # fmt: skip
BOMBS = (
    b"\x91" * 100_000,  # arrays in arrays
    b"\x81\xa1x" * 50_000,  # maps in maps
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",  # bytes that do not come
    b"\xdb\xff\xff\xff\xff",
    b"\x92\xa8AddRequest" + b"\x91" * 5000,
    b"\x9f",
    b"",
    b"\x80",
    b"\xc1",
)
PREPARED = 4096  # well-formed frames of an inbox, from which the torn and flipped ones are made


class FrameFuzzer:
    """An endless stream of frames for one inbox.  Deterministic for one seed."""

    def __init__(self, union: Any, seed: int, known: Sequence[str | int] = ()) -> None:
        self._rng = random.Random(seed)
        self._nonsense = Nonsense(self._rng, known)
        self._kinds = get_args(union)
        self._others = sorted({k for inbox in INBOXES for k in get_args(inbox)}, key=lambda kind: kind.__name__)
        self._prepared = [self._well_formed() for _ in range(PREPARED)]

    def __iter__(self) -> Iterator[bytes]:
        makers = (self._well_formed, self._foreign, self._mistyped, self._torn, self._flipped, self._noise, self._bomb)
        weights = (30, 3, 15, 10, 36, 5, 1)
        while True:
            for make in self._rng.choices(makers, weights, k=64):
                yield make()

    def _well_formed(self) -> bytes:
        return self._nonsense.message(self._rng.choice(self._kinds))

    def _foreign(self) -> bytes:
        """A message of any inbox, timers and signals among them."""
        return self._nonsense.message(self._rng.choice(self._others))

    def _mistyped(self) -> bytes:
        """A message with one value somewhere in it that is none of its field's, one more, or one less."""
        content = msgspec.msgpack.decode(self._rng.choice(self._prepared), strict=False)
        self._spoil(content)
        return msgspec.msgpack.encode(content)

    def _spoil(self, content: Any) -> None:
        rng = self._rng
        while content:
            index = rng.randrange(len(content))
            if isinstance(content[index], list) and content[index] and rng.random() < 0.7:
                content = content[index]
                continue
            change = rng.random()
            if change < 0.7:
                content[index] = rng.choice(ABSURD)
            elif change < 0.85:
                del content[index]
            else:
                content.insert(index, rng.choice(ABSURD))
            return

    def _torn(self) -> bytes:
        frame = self._rng.choice(self._prepared)
        return frame[: self._rng.randrange(len(frame) + 1)] + self._rng.randbytes(self._rng.choice((0, 0, 1, 7)))

    def _flipped(self) -> bytes:
        data = bytearray(self._rng.choice(self._prepared))
        for _ in range(self._rng.randrange(1, 5)):
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)
        return bytes(data)

    def _noise(self) -> bytes:
        return self._rng.randbytes(self._rng.randrange(200))

    def _bomb(self) -> bytes:
        return self._rng.choice(BOMBS)
