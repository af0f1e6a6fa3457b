"""The fingerprint of a deployment: only processes that match it may join, so that no output changes in the middle.

It is that of the live workers.  While a request is alive it outlives them: the successor of the only worker must give
the same bits.  It outlives the scheduler too, because gateways send the fingerprints with which their streams began.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shared.messages import Fingerprint, Hello, WorkerCapacity
from shared.messages.fingerprint import TEXT_PARTS, difference

AGREED = ("model", "vocab_size", "max_model_len")  # by all workers: what is asked of one may be asked of any
AGREED_UNMIXED = (*AGREED, "block_size", "dtype")
ALIVE = "the worker that began the open requests"


class Known(msgspec.Struct, frozen=True):
    """What an instance sent in its hello."""

    name: str  # of the instance, for messages
    fingerprint: Fingerprint | None
    capacity: WorkerCapacity | None = None  # of workers


class FingerprintGuard:
    """Compares joining processes with the present ones, and with the last worker while its requests are alive."""

    def __init__(self, *, mixed_workers: bool) -> None:
        self.mixed_workers = mixed_workers
        self._last: Known | None = None  # worker

    def refusal(self, hello: Hello, present: Iterable[Known], *, is_alive: bool) -> str:
        """The reason why an instance cannot join, with every part that differs; empty where it can."""
        mine = Known(hello.instance, hello.fingerprint, hello.worker)
        others = list(present)
        if is_alive and self._last is not None and not self.mixed_workers:
            others.append(self._last)
        return next(filter(None, (self._difference(mine, other) for other in others)), "")

    def _difference(self, mine: Known, other: Known) -> str:
        """Two workers are compared in all that they compute with, other processes in their handling of text."""
        is_whole = mine.capacity is not None and (other.capacity is not None or other is self._last)
        found = [_capacity_difference(mine, other, AGREED if self.mixed_workers else AGREED_UNMIXED)]
        if mine.fingerprint is not None and other.fingerprint is not None:
            one, two = mine.fingerprint, other.fingerprint
            if self.mixed_workers or not is_whole:
                one, two = text_of(one), text_of(two)
            found.append(difference(one, two, other.name))
        elif is_whole and mine.fingerprint is not other.fingerprint:
            found.append(f"it has no fingerprint, but {other.name} has one" if mine.fingerprint is None else "")
        words = "; ".join(filter(None, found)).split("; ")
        return "; ".join(dict.fromkeys(words))  # a dtype is among both

    def joined(self, hello: Hello) -> None:
        """A worker has joined: from here on others are compared with it."""
        if hello.worker is not None:
            self._last = Known(hello.instance, hello.fingerprint, hello.worker)

    def recall(self, alive: Sequence[Fingerprint], workers: Iterable[Known]) -> dict[str, str]:
        """A gateway's streams began with these under an earlier scheduler.  Returns the workers that joined before this
        gateway and compute otherwise, with the differences; they have to leave."""
        if self.mixed_workers or not alive:
            return {}
        found = {one.name: difference(one.fingerprint, alive[0], ALIVE) for one in workers if one.fingerprint}
        if all(found.values()):
            self._last = Known(ALIVE, alive[0])
        return {name: words for name, words in found.items() if words}

    def fingerprints(self, workers: Iterable[Known], *, is_alive: bool) -> list[Fingerprint]:
        """Of the workers that are there, each once; else of the last one while its requests are alive."""
        found = list(dict.fromkeys(known.fingerprint for known in workers if known.fingerprint is not None))
        if not found and is_alive and self._last is not None and self._last.fingerprint is not None:
            found.append(self._last.fingerprint)
        return found


def with_fingerprint(hello: Hello) -> Hello:
    """The core knows a worker's fingerprint by its name."""
    if hello.worker is None:
        return hello
    name = hello.fingerprint.name if hello.fingerprint is not None else ""
    return msgspec.structs.replace(hello, worker=msgspec.structs.replace(hello.worker, fingerprint=name))


def text_of(fingerprint: Fingerprint) -> Fingerprint:
    return Fingerprint(**{part: getattr(fingerprint, part) for part in TEXT_PARTS})


def _capacity_difference(mine: Known, other: Known, names: Iterable[str]) -> str:
    if mine.capacity is None or other.capacity is None:
        return ""
    one, two = mine.capacity, other.capacity
    differing = (name for name in names if getattr(one, name) != getattr(two, name))
    return "; ".join(
        f"its {name} is {getattr(one, name)!r}, that of {other.name} is {getattr(two, name)!r}" for name in differing
    )
