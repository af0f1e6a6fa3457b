"""Work that is computed in a thread or at the call: its order, its end, its failures."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shared.actor.executor import InlineExecutor, PacedExecutor, ThreadExecutor
from shared.errors import ProtocolError
from shared.messages import Holdings, Message
from shared.processes.idle_time import LEAST_URGENT
from shared.transport.memory import MemoryOutbox, MemoryTransport


class Recorder(MemoryOutbox):
    def __init__(self, network: MemoryTransport, sent: list[tuple[str, int]]) -> None:
        super().__init__(network)
        self._sent = sent

    def send(self, address: str, message: Message) -> None:
        assert isinstance(message, Holdings)
        self._sent.append((address, message.report_id))


class Line(MemoryTransport):
    """Keeps what is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def outbox(self) -> Recorder:
        return Recorder(self, self.sent)

    @property
    def answers(self) -> list[int]:
        assert {address for address, _ in self.sent} <= {self.scheduler_address}
        return [number for _, number in self.sent]


class Echo:
    """Answers each number with itself, two pieces of work after it came; negative numbers are malformed."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(1000)  # one piece of work passes for each permit
        self.began = threading.Semaphore(0)
        self.broken = -1  # the number at which computing fails
        self.applied: list[int] = []
        self._pieces: list[int | None] = []

    @property
    def is_idle(self) -> bool:
        return not self._pieces

    def apply(self, work: int) -> None:
        if work < 0:
            raise ProtocolError("negative")
        self.applied.append(work)
        self._pieces += [None, work]

    def turn(self) -> list[Holdings]:
        self.began.release()
        assert self.gate.acquire(timeout=10)
        piece = self._pieces.pop(0)
        if piece is not None and piece == self.broken:
            raise RuntimeError("broken")
        return [] if piece is None else [Holdings(1, piece, 0, 0)]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_inline_all_is_computed_when_the_call_returns() -> None:
    line, echo = Line(), Echo()
    executor = InlineExecutor(echo, line)
    for number in (3, 1):
        executor.submit(number)
    assert line.answers == [3, 1] and executor.failure is None
    with pytest.raises(ProtocolError):
        executor.submit(-1)
    executor.submit(4)
    assert line.answers == [3, 1, 4]


def sliced(computation: Echo, line: Line) -> PacedExecutor[int]:
    """A slice ends with each piece of work: whenever it is asked, the clock is a second further."""
    times = iter(range(1000))
    return PacedExecutor(computation, line, clock=lambda: next(times))


async def test_what_fits_into_a_slice_is_computed_when_the_call_returns() -> None:
    line = Line()
    executor = PacedExecutor(Echo(), line, clock=lambda: 0.0)
    for number in (3, 1):
        executor.submit(number)
    assert line.answers == [3, 1] and executor.failure is None
    with pytest.raises(ProtocolError):
        executor.submit(-1)


async def test_between_two_slices_the_loop_does_what_else_is_due() -> None:
    line, echo = Line(), Echo()
    executor = sliced(echo, line)
    executor.submit(3)
    asyncio.get_running_loop().call_soon(executor.submit, 1)
    assert echo.applied == [3] and line.answers == []
    await asyncio.sleep(0)
    assert echo.applied == [3, 1] and line.answers == [3]
    while not echo.is_idle:
        await asyncio.sleep(0)
    assert line.answers == [3, 1] and executor.failure is None


async def test_a_failure_between_two_calls_is_told_and_ends_the_work() -> None:
    line, echo = Line(), Echo()
    echo.broken = 2
    executor = sliced(echo, line)
    executor.submit(2)
    executor.submit(4)
    await asyncio.sleep(0)
    assert isinstance(executor.failure, RuntimeError)
    await asyncio.sleep(0)
    assert line.answers == [] and not echo.is_idle


async def test_what_is_not_computed_is_dropped_at_the_end() -> None:
    line, echo = Line(), Echo()
    executor = sliced(echo, line)
    executor.submit(3)
    executor.close()
    await asyncio.sleep(0)
    assert line.answers == [] and not echo.is_idle


def test_a_thread_answers_in_order_and_malformed_work_costs_itself() -> None:
    line, echo = Line(), Echo()
    executor = ThreadExecutor(echo, line, name="echo", on_failure=lambda: None)
    for number in (3, -1, 1, 2):
        executor.submit(number)
    until(lambda: line.answers == [3, 1, 2])
    executor.submit(5)
    until(lambda: line.answers == [3, 1, 2, 5])
    executor.close()
    assert executor.failure is None


def test_work_that_comes_meanwhile_is_applied_before_the_next_piece() -> None:
    line, echo = Line(), Echo()
    echo.gate = threading.Semaphore(0)
    executor = ThreadExecutor(echo, line, name="echo", on_failure=lambda: None)
    executor.submit(1)
    assert echo.began.acquire(timeout=10)
    executor.submit(2)
    executor.submit(3)
    echo.gate.release()
    assert echo.began.acquire(timeout=10)
    assert echo.applied == [1, 2, 3] and line.answers == []
    echo.gate.release(100)
    until(lambda: line.answers == [1, 2, 3])
    executor.close()


def test_closing_finishes_one_piece_and_drops_the_rest() -> None:
    line, echo = Line(), Echo()
    echo.gate = threading.Semaphore(1)
    executor = ThreadExecutor(echo, line, name="echo", on_failure=lambda: None)
    executor.submit(1)
    assert echo.began.acquire(timeout=10) and echo.began.acquire(timeout=10)
    executor.submit(2)
    closing = threading.Thread(target=executor.close)
    closing.start()
    until(lambda: executor._work.qsize() == 1)  # the end alone: 2 is dropped
    echo.gate.release(100)
    closing.join(timeout=10)
    assert not closing.is_alive() and line.answers == [1] and echo.applied == [1]


def test_a_failure_ends_the_thread_and_is_reported_once() -> None:
    line, echo = Line(), Echo()
    echo.broken = 2
    failures: list[BaseException | None] = []
    executor: ThreadExecutor[int] = ThreadExecutor(
        echo, line, name="echo", on_failure=lambda: failures.append(executor.failure)
    )
    for number in (1, 2, 3):
        executor.submit(number)
    until(lambda: failures)
    assert isinstance(executor.failure, RuntimeError) and failures == [executor.failure]
    executor.close()
    assert line.answers == [1]


class Swift:
    """Takes work as fast as it can."""

    is_idle = True

    def apply(self, work: int) -> None:
        pass

    def turn(self) -> list[Holdings]:
        return []


def test_closing_while_the_thread_takes_the_last_of_the_work() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            executor = ThreadExecutor(Swift(), Line(), name="swift", on_failure=lambda: None)
            for number in range(400):
                executor.submit(number)
            executor.close()
            assert executor.failure is None
    finally:
        sys.setswitchinterval(interval)


class Niceness(Swift):
    """Answers with the niceness of the thread that computes."""

    is_idle = False

    def turn(self) -> list[Holdings]:
        self.is_idle = True
        return [Holdings(1, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 0, 0)]

    def apply(self, work: int) -> None:
        self.is_idle = False


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a thread's own only on Linux")
def test_only_the_thread_itself_gives_way() -> None:
    before, line = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), Line()
    wanted = min(before + 3, LEAST_URGENT)
    executor = ThreadExecutor(Niceness(), line, name="nice", on_failure=lambda: None, niceness=3)
    executor.submit(0)
    until(lambda: line.answers != [])
    executor.close()
    assert line.answers == [wanted]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
