"""One batch from its validation to its end, as the gateway that runs it has it in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec import UNSET, Raw

from services.gateway.http.batches.call import LineAnswer
from services.gateway.http.batches.ledger import Ledger
from services.gateway.http.batches.lines import Line, Lines, read_lines
from services.gateway.http.batches.objects import BatchError, BatchErrors, BatchRecord, ResultError, ResultResponse
from services.gateway.http.batches.store import BatchStore
from services.gateway.http.files.objects import OUTPUT_PURPOSE, FileObject
from shared.config import GatewaySettings

log = structlog.get_logger()

T = TypeVar("T")

SAVE_SECONDS = 1.0  # between two records of what is done
FIRST_REST, LONGEST_REST = 0.25, 5.0  # seconds after a line that may be tried again
WORDS = {
    "expired": ResultError(code="batch_expired", message="the batch's completion window ended before this request"),
    "cancelled": ResultError(code="batch_cancelled", message="the batch was cancelled before this request"),
}


class Job:
    """Its lines are taken one by one, and settled or put back; `run` sees to all else.

    Invariant: a line is settled (in the ledger), running, put back, or behind the cursor, and one of these only.
    """

    def __init__(self, store: BatchStore, record: BatchRecord, settings: GatewaySettings) -> None:
        self.record = record
        self.tenant = record.tenant
        self.running: set[asyncio.Task[None]] = set()
        self.last_turn = 0  # of the runner, at which a line of it was begun
        self._store = store
        self._settings = settings
        self._lines: Lines | None = None
        self._ledger: Ledger | None = None
        self._cursor = 0
        self._put_back: deque[int] = deque()
        self._tries: Counter[int] = Counter()
        self._rests_until = 0.0  # of time.monotonic()
        self._num_rests = 0  # since the last line that was settled
        self._ends_as = record.ends_as
        self._changed = asyncio.Event()

    # -- for the runner

    def is_ready(self, now: float) -> bool:
        """Whether `take` has a line."""
        if self._ends_as or self._ledger is None or self._lines is None or now < self._rests_until:
            return False
        while self._cursor < len(self._lines) and self._ledger.is_done(self._cursor):
            self._cursor += 1
        return bool(self._put_back) or self._cursor < len(self._lines)

    def take(self) -> int:
        """The place of the next line."""
        if self._put_back:
            return self._put_back.popleft()
        self._cursor += 1
        return self._cursor - 1

    async def read(self, index: int) -> Line:
        assert self._lines is not None
        return await asyncio.to_thread(self._lines.read, index)

    async def settle(self, index: int, line: Line, answer: LineAnswer) -> bool:
        """Note an answer; False where the line is to be tried again.  Raises OSError where it cannot be noted."""
        self._tries[index] += 1
        if answer.may_be_retried(self._tries[index]):
            self.put_back(index, answer.retry_after)
            return False
        assert self._ledger is not None
        response = ResultResponse(status_code=answer.status, request_id=answer.request_id, body=Raw(answer.body))
        await asyncio.to_thread(self._ledger.answered, index, line.custom_id, response)
        del self._tries[index]
        self._num_rests = 0
        return True

    def put_back(self, index: int, seconds: float = 0.0) -> None:
        """A line is to be tried again, and the batch rests: for so many seconds at least, longer each time."""
        self._put_back.append(index)
        now = time.monotonic()
        if now >= self._rests_until:
            self._rests_until = now + max(seconds, min(FIRST_REST * 2**self._num_rests, LONGEST_REST))
            self._num_rests = min(self._num_rests + 1, 16)

    def ended(self, task: asyncio.Task[None]) -> None:
        """A line runs no more."""
        self.running.discard(task)
        self._changed.set()

    def end(self, status: str) -> None:
        """End before the last line, as expired or cancelled."""
        self._ends_as = self._ends_as or status
        self._changed.set()

    # -- its life

    async def run(self) -> None:
        """To its end.  Raises OSError where the disk does not do its part; being cancelled leaves it for another."""
        try:
            if not await to_the_end(self._open):
                return
            while not self._ends_as and self._ledger is not None and self._has_more:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAVE_SECONDS):
                        while not self._ends_as and self._has_more:
                            await self._changed.wait()
                            self._changed.clear()
                await to_the_end(self._save)
            await end_all(self.running)
            await to_the_end(self._conclude)
        finally:
            await end_all(self.running)
            await to_the_end(self._close)

    @property
    def _has_more(self) -> bool:
        assert self._ledger is not None and self._lines is not None
        return bool(self.running) or self._ledger.num_completed + self._ledger.num_failed < len(self._lines)

    # -- with the disk, in threads

    def _open(self) -> bool:
        """Read the lines and what is done of them; False where the batch has failed."""
        record, settings, files = self.record, self._settings, self._store.files
        try:
            path = files.content(record.tenant, record.batch.input_file_id)
            lines, errors = read_lines(path, record.batch.endpoint, max_lines=settings.max_batch_lines,
                                       max_bytes=settings.max_request_bytes)  # fmt: skip
        except FileNotFoundError:
            self._fail([BatchError(code="input_file_not_found", message="the input file is not there any more")])
            return False
        self._lines = lines
        if errors:
            self._fail(errors)
            return False
        if record.batch.status == "validating":
            record.batch.status = "in_progress"
            record.batch.in_progress_at = self._now()
            record.batch.request_counts.total = len(lines)
            record.output_id, record.error_id = files.new_id(), files.new_id()
            self._store.save(record)
        self._ledger = Ledger(*self._contents(), record.batch.id, len(lines))
        return True

    def _contents(self) -> tuple[Path, Path]:
        """Where the results lie: answers, and refusals."""
        files, record = self._store.files, self.record
        return files.content(record.tenant, record.output_id), files.content(record.tenant, record.error_id)

    def _fail(self, errors: list[BatchError]) -> None:
        batch = self.record.batch
        batch.status, batch.failed_at, batch.errors = "failed", self._now(), BatchErrors(data=errors)
        if self.record.output_id:  # a gateway that has ended had begun it: what it wrote is the client's
            self._publish_both(Ledger(*self._contents(), batch.id, batch.request_counts.total))
        self._end()

    def _save(self) -> None:
        """What is done, for clients that look."""
        assert self._ledger is not None
        counts = self.record.batch.request_counts
        if (counts.completed, counts.failed) != (self._ledger.num_completed, self._ledger.num_failed):
            counts.completed, counts.failed = self._ledger.num_completed, self._ledger.num_failed
            self._store.save(self.record)

    def _conclude(self) -> None:
        """Every step may be done again by another gateway, where this one dies behind it."""
        record, batch, ledger = self.record, self.record.batch, self._ledger
        assert ledger is not None and self._lines is not None
        if batch.status != "finalizing":
            record.ends_as = self._ends_as or "completed"
            if record.ends_as == "cancelled":
                batch.cancelling_at = self._store.cancelled_at(self._store.entry(record)) or self._now()
            batch.status, batch.finalizing_at = "finalizing", self._now()
            self._store.save(record)
        for index in ledger.unfinished():
            ledger.given_up(index, self._lines.read(index).custom_id, WORDS[record.ends_as])
        counts = batch.request_counts
        counts.completed, counts.failed = ledger.num_completed, ledger.num_failed
        self._publish_both(ledger)
        batch.status = record.ends_as
        setattr(batch, f"{record.ends_as}_at", self._now())
        self._end()

    def _publish_both(self, ledger: Ledger) -> None:
        num_bytes, num_error_bytes = ledger.close()
        self.record.batch.output_file_id = self._publish(self.record.output_id, "output", num_bytes)
        self.record.batch.error_file_id = self._publish(self.record.error_id, "error", num_error_bytes)

    def _publish(self, file_id: str, kind: str, num_bytes: int) -> str:
        """Show a file of results to clients; an empty one is not kept."""
        files, record, now = self._store.files, self.record, self._now()
        if not num_bytes:
            files.content(record.tenant, file_id).unlink(missing_ok=True)
            return UNSET  # type: ignore[return-value]
        expires = now + record.output_seconds if record.output_seconds else UNSET
        file = FileObject(
            id=file_id, bytes=num_bytes, created_at=now, expires_at=expires, purpose=OUTPUT_PURPOSE,
            filename=f"{record.batch.id}_{kind}.jsonl",
        )  # fmt: skip
        files.publish(record.tenant, file)
        return file_id

    def _end(self) -> None:
        record, batch = self.record, self.record.batch
        self._store.save(record)
        self._store.forget(self._store.entry(record))
        counts = batch.request_counts
        log.info("batch_completed", batch_id=batch.id, tenant=record.tenant, status=batch.status, total=counts.total,
                 completed=counts.completed, failed=counts.failed, seconds=self._now() - batch.created_at)  # fmt: skip

    def _close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._ledger is not None:
            self._ledger.close()

    def _now(self) -> int:
        return int(self._store.clock())


async def end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    running = list(tasks)
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


async def to_the_end(work: Callable[[], T]) -> T:
    """Do `work` in a thread.  Being cancelled waits for its end: nothing is written after the lock is given up."""
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise
