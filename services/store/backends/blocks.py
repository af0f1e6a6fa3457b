"""Blocks in another system, behind the memory and the disk of a store.

One thread puts blocks there, another asks for them.  Whatever the other system does costs misses: one that is slow is
left alone for a while, and what it gives back is only taken if it is the block that was asked for, byte for byte.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TypeVar

import structlog

from services.store.backends.interface import BackendAddress, ValueStore
from services.store.backends.sealed import SEAL_BYTES, sealed, unsealed
from shared.data_link.server import HeldBlock
from shared.transport.link import worth_a_line

log = structlog.get_logger()

ANSWER_SECONDS = 2.0  # that blocks are waited for
REST_SECONDS = 10.0  # that a backend is asked nothing after it failed, or did not answer in time
CLOSE_SECONDS = 5.0  # that the last blocks may take
MAX_KNOWN = 1 << 20  # keys that are there, as far as is known; the newest
MAX_LOOKUPS = 64  # that wait

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Question:
    """What the reading thread is to ask."""

    keys: list[bytes]
    block_bytes: int  # 0: only which of them are there
    deadline: float  # by time.monotonic
    found: dict[bytes, HeldBlock] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


class BackendBlocks:
    """Any thread may call.

    A key is known to be there if this store has put it there, or has found it when it was told to look (`look_up`).
    Invariant: a key that was taken is in `_pending` until it is known, or is said to be dropped.
    """

    def __init__(self, address: BackendAddress, max_pending: int, seconds: float = ANSWER_SECONDS) -> None:
        """`max_pending`: bytes that wait to be put."""
        self.on_dropped: Callable[[list[bytes]], None] = lambda keys: None  # by any thread, with keys that are gone
        self.on_looked_up: Callable[[list[bytes], list[bytes]], None] = lambda found, absent: None
        self.num_put = 0  # blocks
        self.num_failed = 0  # calls
        self.num_corrupt = 0  # values that were not what their names say
        self._seconds = seconds
        self._max_pending = max_pending
        self._condition = threading.Condition()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._pending: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._pending_bytes = 0
        self._to_drop: dict[bytes, None] = {}  # keys that may still be there, and must not be found
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._is_closed = False
        self._closes_at = float("inf")
        self._reading = BackendConnection(address.reader, self._failed)
        self._writing = BackendConnection(address.writer, self._failed)
        writer = threading.Thread(target=self._write, name="backend-out", daemon=True)
        reader = threading.Thread(target=self._answer, name="backend-in", daemon=True)
        self._threads = (writer, reader)
        for thread in self._threads:
            thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._known or key in self._pending

    def __len__(self) -> int:
        return len(self._known)

    def keys(self) -> list[bytes]:
        with self._condition:
            return list(dict.fromkeys([*self._known, *self._pending]))

    def put(self, key: bytes, block: HeldBlock) -> bool:
        """Have a block put there; False where that is not possible at present."""
        with self._condition:
            if key in self:
                return True
            if self._is_closed or self._writing.is_resting or self._pending_bytes + len(block[1]) > self._max_pending:
                return False
            self._pending[key] = block
            self._pending_bytes += len(block[1])
            self._condition.notify()
            return True

    def read(self, keys: Sequence[bytes], block_bytes: int) -> list[HeldBlock]:
        """Those of the first keys that are all known to be there, and come in time and in this size."""
        with self._condition:
            blocks = {key: self._pending[key] for key in keys if key in self._pending}
            there = list(takewhile(self.__contains__, keys))
        if asked := [key for key in there if key not in blocks]:
            blocks |= self._fetched(asked, block_bytes)
        found = takewhile(lambda key: key in blocks and len(blocks[key][1]) == block_bytes, there)
        return [blocks[key] for key in found]

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Find out which keys are there; `on_looked_up` says so.  Without an answer in time it says nothing."""
        with self._condition:
            known = [key for key in keys if key in self]
        asked = [key for key in keys if key not in known]
        if not asked or self._reading.is_resting or self._questions.qsize() >= MAX_LOOKUPS:
            self.on_looked_up(known, asked)
            return
        if known:
            self.on_looked_up(known, [])
        self._questions.put(Question(asked, 0, time.monotonic() + self._seconds))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Have them not be found any more, there neither."""
        with self._condition:
            for key in keys:
                if key in self:
                    self._known.pop(key, None)
                    self._take_pending(key)
                    self._drop_later(key)
            self._condition.notify()

    def close(self) -> None:
        """Put what waits, as far as there is time."""
        with self._condition:
            self._is_closed = True
            self._closes_at = time.monotonic() + CLOSE_SECONDS
            self._condition.notify()
        self._questions.put(None)
        for thread in self._threads:
            thread.join(timeout=CLOSE_SECONDS)

    # -- the thread that reads

    def _fetched(self, keys: list[bytes], block_bytes: int) -> dict[bytes, HeldBlock]:
        if self._reading.is_resting:
            return {}
        question = Question(keys, block_bytes, time.monotonic() + self._seconds)
        self._questions.put(question)
        if not question.done.wait(self._seconds):
            self._reading.rest(f"no answer in {self._seconds} s")
            return {}
        return question.found

    def _answer(self) -> None:
        self._reading.use(lambda backend: None)  # connect at once: a first question is soon to be answered
        while (question := self._questions.get()) is not None:
            if time.monotonic() < question.deadline:
                self._ask(question)
            question.done.set()
        self._reading.close()

    def _ask(self, question: Question) -> None:
        names, size = [key.hex() for key in question.keys], SEAL_BYTES + question.block_bytes
        if not question.block_bytes:
            answers = self._reading.use(lambda backend: backend.has(names))
            if answers is not None:
                self._looked_up(question.keys, answers)
            return
        values = self._reading.use(lambda backend: backend.get(names, size))
        absent: list[bytes] = []
        corrupt: list[bytes] = []
        for key, value in zip(question.keys, values or (), strict=False):
            if value is None:
                absent.append(key)
            elif (block := unsealed(key, value, question.block_bytes)) is not None:
                question.found[key] = block
            else:
                corrupt.append(key)
        if corrupt:
            self.num_corrupt += len(corrupt)
            log.warning("backend_blocks_corrupt", num_blocks=len(corrupt), num_corrupt=self.num_corrupt)
            self.drop(corrupt)  # there too, so that they can be put again
        if gone := absent + corrupt:
            with self._condition:
                for key in absent:
                    self._known.pop(key, None)
            self.on_dropped(gone)

    def _looked_up(self, keys: list[bytes], answers: list[bool]) -> None:
        with self._condition:
            found = [key for key, is_there in zip(keys, answers, strict=True) if is_there and key not in self._to_drop]
        for key in found:
            self._learn(key)
        self.on_looked_up(found, [key for key in keys if key not in found])

    def _learn(self, key: bytes) -> None:
        gone: list[bytes] = []
        with self._condition:
            self._known[key] = None
            self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                gone.append(self._known.popitem(last=False)[0])
        if gone:
            self.on_dropped(gone)

    # -- the thread that writes

    def _write(self) -> None:
        while True:
            with self._condition:
                while not (self._pending or self._is_closed or (self._to_drop and not self._writing.is_resting)):
                    self._condition.wait(REST_SECONDS if self._to_drop else None)
                drops = list(self._to_drop)
                key, block = next(iter(self._pending.items()), (b"", None))
            self._drop(drops)
            if block is not None and time.monotonic() < self._closes_at:
                self._put(key, block)
            elif self._is_closed:
                self._writing.close()
                return

    def _drop(self, keys: Iterable[bytes]) -> None:
        """What cannot be dropped now, as the backend fails or rests, stays for later."""
        for key in keys:
            if self._writing.use(partial(_dropped, name=key.hex())) is None:
                return
            with self._condition:
                self._to_drop.pop(key, None)

    def _drop_later(self, key: bytes) -> None:
        if len(self._to_drop) < MAX_KNOWN:
            self._to_drop[key] = None

    def _put(self, key: bytes, block: HeldBlock) -> None:
        is_there = self._writing.use(lambda backend: backend.put(key.hex(), sealed(key, block)))
        if is_there is False:
            self._writing.rest("a block is not taken")
        gone: list[bytes] = []
        with self._condition:
            is_wanted = self._pending.get(key) is block
            if is_wanted:
                self._take_pending(key)
            elif is_there:  # it was dropped meanwhile
                self._drop_later(key)
            if not is_there:  # what waits beside it is not put either
                gone = [key, *self._pending]
                self._pending.clear()
                self._pending_bytes = 0
        if is_there and is_wanted:
            self.num_put += 1
            self._learn(key)
        if gone:
            self.on_dropped(gone)

    def _take_pending(self, key: bytes) -> None:
        if (waiting := self._pending.pop(key, None)) is not None:
            self._pending_bytes -= len(waiting[1])

    def _failed(self, reason: str) -> None:
        self.num_failed += 1
        if worth_a_line(self.num_failed):
            log.warning("backend_failed", reason=reason, num_failed=self.num_failed)


def _dropped(backend: ValueStore, name: str) -> bool:
    backend.drop(name)
    return True


class BackendConnection:
    """One thread's connection: made when it is first used, and again a while after it failed."""

    def __init__(self, connect: Callable[[], ValueStore], failed: Callable[[str], None]) -> None:
        self._connect = connect
        self._failed = failed
        self._backend: ValueStore | None = None
        self._rests_until = 0.0

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def rest(self, reason: str) -> None:
        """Ask nothing for a while; any thread may say so."""
        self._rests_until = time.monotonic() + REST_SECONDS
        self._failed(reason)

    def use(self, action: Callable[[ValueStore], T]) -> T | None:
        """None where it fails, or rests."""
        if self.is_resting:
            return None
        try:
            if self._backend is None:
                self._backend = self._connect()
            return action(self._backend)
        except Exception as error:  # whatever a foreign library raises is a miss
            self.close()
            self.rest(str(error) or type(error).__name__)
            return None

    def close(self) -> None:
        backend, self._backend = self._backend, None
        try:
            if backend is not None:
                backend.close()
        except Exception as error:
            log.info("backend_not_closed", reason=str(error))
