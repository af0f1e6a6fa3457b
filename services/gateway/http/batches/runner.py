"""Runs the batches of a deployment, in one of its gateways at a time: the one that holds the lock of the folder.

The kernel takes the lock from a process that dies, whatever it died of, and another gateway goes on from the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter

import structlog

from services.gateway.http.batches.call import LineCall
from services.gateway.http.batches.job import Job, end_all
from services.gateway.http.batches.store import BatchStore, QueueEntry
from shared.config import GatewaySettings
from shared.exposition import BatchMeter

log = structlog.get_logger()

POLL = 0.5  # seconds between looks at the queue, and at the lock
DISK_REST = 5.0  # seconds after the disk has failed
MAX_JOBS, MAX_TENANT_JOBS = 128, 4  # batches under way at a time; others wait


class BatchRunner:
    """`run` is one task of the gateway, and `leave` has it end soon."""

    def __init__(self, store: BatchStore, call: LineCall, settings: GatewaySettings, meter: BatchMeter) -> None:
        self.meter = meter
        self._store = store
        self._call = call
        self._settings = settings
        self._jobs: dict[QueueEntry, Job] = {}
        self._tasks: dict[QueueEntry, asyncio.Task[None]] = {}
        self._resting: dict[QueueEntry, float] = {}  # until when, of time.monotonic(): what has failed here
        self._num_turns = 0
        self._is_leaving = False
        self._wake = asyncio.Event()

    def leave(self) -> None:
        """End the lines that run, and leave them to another gateway."""
        self._is_leaving = True
        self._wake.set()

    async def run(self) -> None:
        while not self._is_leaving:
            seconds, lock = POLL, None
            try:
                lock = await asyncio.to_thread(self._store.lock)
                if lock is not None:
                    await self._lead()
            except OSError as error:
                log.error("batches_paused", reason=str(error), seconds=DISK_REST)
                seconds = DISK_REST
            finally:
                await end_all(self._tasks.values())
                self.meter.is_runner = False
                if lock is not None:
                    os.close(lock)
            await self._rest(seconds)

    async def _lead(self) -> None:
        log.info("batch_runner_started")
        self.meter.is_runner, next_look = True, 0.0
        while not self._is_leaving:
            if time.monotonic() >= next_look:
                await self._look()
                next_look = time.monotonic() + POLL
            self._begin_lines()
            await self._rest(max(0.0, next_look - time.monotonic()))

    async def _rest(self, seconds: float) -> None:
        if not self._is_leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
        self._wake.clear()

    # -- batches

    async def _look(self) -> None:
        """Begin what is new, and end what is cancelled or too old."""
        entries, cancelled = await asyncio.to_thread(self._store.queued)
        now, unix_now = time.monotonic(), self._store.clock()
        self._resting = {entry: until for entry, until in self._resting.items() if until > now}
        of_tenant = Counter(entry.folder for entry in self._jobs)
        for entry in entries:
            if entry in self._jobs or entry in self._resting or len(self._jobs) >= MAX_JOBS:
                continue
            if of_tenant[entry.folder] < MAX_TENANT_JOBS or entry.name in cancelled:
                of_tenant[entry.folder] += await self._begin(entry)
        for entry, job in self._jobs.items():
            if entry.name in cancelled:
                job.end("cancelled")
            elif job.record.batch.expires_at <= unix_now:
                job.end("expired")
        self.meter.num_batches = len(self._jobs)

    async def _begin(self, entry: QueueEntry) -> bool:
        try:
            record = await asyncio.to_thread(self._store.load, entry)
        except Exception as error:  # no record of ours, or no disk: what it says helps, and others are not to suffer
            self._failed(entry, error)
            return False
        if record is None:
            return False
        job = self._jobs[entry] = Job(self._store, record, self._settings)
        task = self._tasks[entry] = asyncio.create_task(self._run_job(entry, job))
        task.add_done_callback(lambda _: self._wake.set())
        return True

    async def _run_job(self, entry: QueueEntry, job: Job) -> None:
        try:
            await job.run()
            self.meter.batches[job.record.batch.status] += 1
        except Exception as error:
            self._failed(entry, error)
        finally:
            del self._jobs[entry], self._tasks[entry]

    def _failed(self, entry: QueueEntry, error: Exception) -> None:
        """It is tried again later, from its files."""
        trace = None if isinstance(error, OSError) else error
        log.error("batch_paused", batch_id=entry.batch_id, reason=str(error), seconds=DISK_REST, exc_info=trace)
        self._resting[entry] = time.monotonic() + DISK_REST

    # -- lines

    def _begin_lines(self) -> None:
        """Fill the free places: in turns of tenants, and of each tenant's batches."""
        now = time.monotonic()
        running = Counter[str]()
        for job in self._jobs.values():
            running[job.tenant] += len(job.running)
        while running.total() < self._settings.batch_concurrency:
            last_turn = Counter[str]()
            for job in self._jobs.values():
                last_turn[job.tenant] = max(last_turn[job.tenant], job.last_turn)
            ready = [job for job in self._jobs.values() if job.is_ready(now)]
            if not ready:
                break
            first = min(ready, key=lambda job: (running[job.tenant], last_turn[job.tenant], job.last_turn))
            self._num_turns += 1
            first.last_turn = self._num_turns
            running[first.tenant] += 1
            task = asyncio.create_task(self._run_line(first, first.take()))
            first.running.add(task)
            task.add_done_callback(first.ended)
            task.add_done_callback(lambda _: self._wake.set())
        self.meter.num_lines = running.total()

    async def _run_line(self, job: Job, index: int) -> None:
        batch = job.record.batch
        try:
            line = await job.read(index)
            answer = await self._call(batch.endpoint, bytes(line.body), job.tenant)
            is_settled = await job.settle(index, line, answer)
        except Exception as error:  # it could not be stored, or there is a defect: a line is never lost for that
            trace = None if isinstance(error, OSError) else error
            log.error("batch_line_not_stored", batch_id=batch.id, reason=str(error), exc_info=trace)
            job.put_back(index, DISK_REST)
            self.meter.lines["retried"] += 1
            return
        outcome = "retried" if not is_settled else "completed" if 200 <= answer.status < 300 else "failed"
        self.meter.lines[outcome] += 1
