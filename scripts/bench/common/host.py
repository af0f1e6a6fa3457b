"""What the host of a virtual machine takes from it, and measuring while it takes little.

Linux calls that time steal: something was ready to run, and another guest had the processor.  It comes in bursts of
tens of milliseconds, so it is the tails of latencies; no change of ours is seen through it.  It is counted by the
kernel, whatever came out of the measurement: repeating a run because of it is no choice among results.

A host that has many guests gives a processor that halts to another, and takes its time to give it back.  So what waits
and works in turns, as a server does, loses up to half of its time where a loop that never waits loses a hundredth.
`awake` keeps processors from halting meanwhile, as in a guest booted with idle=poll.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from services.cli.supervision.processes import start
from shared.processes.proc import TICK

QUIET = 0.02  # of the processor time that was wanted
BURST = 0.1  # seconds of a processor in half a second: queues grow meanwhile that make the tail of a minute
LOOK = 0.5
STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns: idle, waiting for a device
STEAL = 7

MAX_LATENCY = Path("/dev/cpu_dma_latency")  # Linux, "PM Quality Of Service Interface": as long as it is open

COUNTING = "while True: pass"
WAKEFUL = """
import os, sys
from shared.processes.idle_time import take_idle_time_only
os.sched_setaffinity(0, {int(sys.argv[1])})
take_idle_time_only()
while True:
    os.sched_yield()  # to processes that use idle time for work
"""

T = TypeVar("T")


class Host:
    """Tells what it took since it was last asked."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._last = self._read()

    def taken(self) -> float:
        """The share of the processor time wanted here that went to others; 0 where the kernel does not say."""
        stolen, wanted = self._since()
        return stolen / wanted if wanted else 0.0

    def seconds(self) -> float:
        """Of a processor, all together."""
        return self._since()[0] / TICK

    def _since(self) -> tuple[int, int]:
        now, before = self._read(), self._last
        self._last = now
        return now[0] - before[0], now[1] - before[1]

    def _read(self) -> tuple[int, int]:
        """Ticks of all processors so far: taken, and wanted."""
        try:
            first, *_ = self._stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0, 0
        ticks = [int(field) for field in first.split()[1 : STEAL + 2]]
        return ticks[STEAL], sum(ticks) - sum(ticks[column] for column in IDLE)


@contextmanager
def awake() -> Iterator[None]:
    """No processor that we may use halts until the block ends.

    Linux is asked to be back at work within 0 us, so that it polls where it has nothing to do: a message between two
    processes takes a tenth of the time.  Where that is not ours to ask, processes take all idle time instead; others
    wait for those now and then, some 100 ms at worst (Linux 6.18).
    """
    try:
        wish = MAX_LATENCY.open("r+b", buffering=0)
    except OSError:
        with _kept_busy():
            yield
        return
    with wish:
        wish.write(struct.pack("i", 0))
        yield


def _kept_busy() -> AbstractContextManager[None]:
    """By work that gives way to any other."""
    return _running([["-c", WAKEFUL, str(core)] for core in sorted(os.sched_getaffinity(0))])


def cores_taken(count: int) -> AbstractContextManager[None]:
    """So many processes that only count, as urgent as any, run until the block ends."""
    return _running([["-c", COUNTING]] * count)


@contextmanager
def _running(programs: list[list[str]]) -> Iterator[None]:
    """Python runs these until the block ends."""
    processes = [start([sys.executable, *program], dict(os.environ)) for program in programs]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Try(Generic[T]):
    """A measurement, and how much the host took meanwhile."""

    result: T
    taken: float
    burst: float  # seconds of a processor, in the worst half second
    number: int  # from 1

    @property
    def noise(self) -> float:
        """Over 1 it was not quiet."""
        return max(self.taken / QUIET, self.burst / BURST)

    @property
    def note(self) -> str:
        return f"host took {100 * self.taken:.1f} %, {1000 * self.burst:.0f} ms at once, try {self.number}"


async def in_quiet(measure: Callable[[], Awaitable[T]], tries: int) -> Try[T]:
    """The first of so many tries in which the host took little, in all and at once, or else the quietest."""
    host, best = Host(), None
    for number in range(1, tries + 1):
        host.taken()
        async with _bursts() as bursts:
            result = await measure()
        found = Try(result, host.taken(), max(bursts, default=0.0), number)
        if best is None or found.noise < best.noise:
            best = found
        if found.noise <= 1.0:
            break
    if best is None:
        raise ValueError("tries must be at least 1")
    return best


@asynccontextmanager
async def _bursts() -> AsyncIterator[list[float]]:
    """Grows by what the host takes in each half second of the block."""
    host, found = Host(), list[float]()

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK)
            found.append(host.seconds())

    task = asyncio.create_task(look())
    try:
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
