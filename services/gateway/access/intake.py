"""Bodies in transit: how many bytes at a time, how fast, and which senders have to wait.  No I/O; the clock is given.

A request counts here from its first byte to its last; what becomes of it then is the admission's (`limits.py`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shared.config import GatewaySettings
from shared.errors import RejectCode, RequestError
from shared.fairness.debts import Debts

SMALL = 64 << 10  # bytes of a request that are always read: they cost no more than its headers do
PATIENCE = 0.5  # seconds of debt up to which a sender is only kept waiting
REFUSAL = 1.5  # seconds, and up to twice as many, until a sender with more debt is refused (`refusal_wait`)
REFUSED_BYTES_PER_SECOND = 1 << 20  # that one may send for nothing, for ever ...
CREDIT = 16.0  # ... and so many seconds' worth of it in one burst
FASTEST = 16 << 20  # bytes a second of one sender, on the average: receiving takes processors that others need ...
BURST = 0.25  # ... beyond so many seconds' worth of it
BODY = "pageant.body"  # in the scope of a request with a body: what is counted of it
SLOWEST = 16 << 10  # bytes a second, on the average of a body, once it has had its time


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Bytes at a time, of all and of one sender; seconds without any, and of grace."""

    total: int
    sender: int
    seconds: float


class BodyTimeoutError(RequestError):
    """A body that stopped half-way, or comes too slowly."""


class BodyIntake:
    """All requests of one gateway that are being received.

    Invariant: what is held is the sum over the bodies under way of what each has beyond its first `SMALL` bytes.
    """

    def __init__(self, limits: IntakeLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.debts = Debts(CREDIT, clock)
        self._pace = Debts(BURST, clock)
        self.num_bytes = 0
        self.clock = clock
        self._of_sender: Counter[str] = Counter()

    def body(self, sender: str) -> Body:
        return Body(self, sender)

    def refused(self, sender: str, num_bytes: int) -> None:
        """So many bytes were received for nothing."""
        if num_bytes > SMALL:
            self.debts.charge(sender, num_bytes / REFUSED_BYTES_PER_SECOND)

    def wait(self, sender: str) -> float:
        """Seconds that a sender's next large request has to wait before it is read; `REFUSAL` and more: in vain."""
        return max(0.0, self.debts.of(sender))

    def rest(self, sender: str, num_bytes: int) -> float:
        """Seconds until the next of a sender's bytes are asked for, now that so many have come."""
        self._pace.charge(sender, num_bytes / FASTEST)
        return max(0.0, self._pace.of(sender))

    def in_debt(self, sender: str) -> RequestError:
        seconds = max(self.debts.of(sender), 0.1)
        return RequestError(
            "earlier large requests of this sender were refused, so this one was refused too: retry later",
            code=RejectCode.RESOURCE_EXHAUSTED,
            retry_after_ms=int(1000 * seconds),
        )

    def take(self, sender: str, num_bytes: int) -> None:
        """Hold so many bytes more; raises RequestError where that is too much."""
        if self._of_sender[sender] + num_bytes > self.limits.sender:
            raise too_much(
                "from this sender", self._of_sender[sender], self.limits.sender, RejectCode.RESOURCE_EXHAUSTED
            )
        if self.num_bytes + num_bytes > self.limits.total:
            raise too_much("at this gateway", self.num_bytes, self.limits.total, RejectCode.UNAVAILABLE)
        self._of_sender[sender] += num_bytes
        self.num_bytes += num_bytes

    def release(self, sender: str, num_bytes: int) -> None:
        self._of_sender[sender] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._of_sender[sender]:
            del self._of_sender[sender]


class Body:
    """One body under way: `grow` with each piece, `close` at the end, whatever the end."""

    def __init__(self, intake: BodyIntake, sender: str) -> None:
        self.num_bytes = 0
        self._intake = intake
        self._sender = sender
        self._held = 0
        self._num_stored = 0
        self._began = intake.clock()

    def grow(self, num_bytes: int) -> float:
        """Returns the seconds to rest; raises RequestError where there is no room for it, or it comes too slowly."""
        self.num_bytes += num_bytes
        if (more := self.num_bytes - self._num_stored - SMALL - self._held) > 0:
            self._intake.take(self._sender, more)
            self._held += more
        seconds = self._intake.clock() - self._began - self._intake.limits.seconds
        if seconds * SLOWEST > self.num_bytes:
            raise self.late()
        return self.rest(num_bytes)

    def stored(self, num_bytes: int) -> None:
        """So many bytes are on a disk, and no longer in memory."""
        self._num_stored += num_bytes
        released = min(num_bytes, self._held)
        self._held -= released
        self._intake.release(self._sender, released)

    def rest(self, num_bytes: int) -> float:
        return self._intake.rest(self._sender, num_bytes)

    def late(self) -> BodyTimeoutError:
        return BodyTimeoutError(
            f"the body did not come in time: {self.num_bytes} bytes in {self._intake.clock() - self._began:.1f} s; "
            f"it may pause for at most body_timeout={self._intake.limits.seconds:g} s, and must have {SLOWEST} bytes "
            "for each second after its first body_timeout seconds",
            code=RejectCode.DEADLINE_EXCEEDED,
        )

    def close(self) -> None:
        self._intake.release(self._sender, self._held)
        self._held = 0


def make_intake(settings: GatewaySettings) -> BodyIntake:
    """By the settings; every sender can send one request of the largest size, and another one beside it."""
    total = max(settings.max_receiving_bytes, 2 * settings.max_request_bytes)
    return BodyIntake(IntakeLimits(total, max(total // 2, settings.max_request_bytes), settings.body_timeout))


def refusal_wait() -> float:
    """Seconds: asking again at once would cost others each time, and so would all refused ones by asking together."""
    return random.uniform(REFUSAL, 2 * REFUSAL)


def too_much(where: str, num_bytes: int, limit: int, code: RejectCode) -> RequestError:
    return RequestError(
        f"{num_bytes} bytes of requests are being received {where}, the limit is {limit} (max_receiving_bytes)",
        code=code,
        retry_after_ms=1000,
    )
