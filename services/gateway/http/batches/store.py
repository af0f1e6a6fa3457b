"""The batches on the disk: a record of each in its tenant's folder, and a queue that the gateways share.

    batches                    of a tenant: `ID.json`
    queue/TENANT.ID            a batch that has not ended; its record is written after this, and ends before it
    queue/TENANT.ID.cancel     its client wants it to end

Whichever gateway a client asks writes the first record and the wish to cancel; the gateway that holds the lock
(`runner.py`) writes all else.  All of it blocks.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

from services.gateway.http.batches.objects import ENDED, UNDER_WAY, Batch, BatchRecord
from services.gateway.http.files.records import Page, Records, new_id, not_found, write_whole
from services.gateway.http.files.store import FileStore
from shared.errors import RejectCode, RequestError

PREFIX = "batch_"
CANCEL = ".cancel"
MAX_QUEUED = 100  # batches of a tenant that have not ended
MAX_BATCHES = 10_000  # of a tenant; where there are more, the oldest that have ended are forgotten
NEWBORN = 60.0  # seconds in which an entry of the queue may be without its record


class QueueEntry(msgspec.Struct, frozen=True):
    """A batch in the queue."""

    folder: str  # the name of its tenant's
    batch_id: str

    @property
    def name(self) -> str:
        return f"{self.folder}.{self.batch_id}"


class BatchStore:
    """Raises RequestError where a client asks for what is not there, or for too much."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self.clock = files.clock
        files.in_use = self.inputs
        self._queue = files.root / "queue"
        self._queue.mkdir(mode=0o700, exist_ok=True)

    # -- for clients

    def new_id(self) -> str:
        return new_id(PREFIX, self.clock())

    def create(self, record: BatchRecord) -> None:
        entry, records = self.entry(record), self._records(self._folder(record))
        mine = {other.batch_id for other in self.queued()[0] if other.folder == entry.folder}
        if len(mine) >= MAX_QUEUED:
            raise RequestError(
                f"{len(mine)} batches of this tenant have not ended, the limit is {MAX_QUEUED}",
                code=RejectCode.RESOURCE_EXHAUSTED,
                retry_after_ms=60_000,
            )
        known = records.ids()
        for old in [one for one in known if one not in mine][: max(0, len(known) + 1 - MAX_BATCHES)]:
            records.remove(old)
        write_whole(self._queue / entry.name, b"")
        records.write(record.batch.id, record)

    def get(self, tenant: str, batch_id: str) -> Batch:
        folder = self.files.tenant_folder(tenant)
        if (record := self._records(folder).read(batch_id)) is None:
            raise not_found("batch", batch_id, "batch_id")
        return self._shown(folder.name, record)

    def page(self, tenant: str, page: Page) -> tuple[list[Batch], bool]:
        """A tenant's batches; and whether there are more."""
        folder = self.files.tenant_folder(tenant)
        records = self._records(folder)
        found, has_more = page.of(records.ids(), records.read)
        return [self._shown(folder.name, record) for record in found], has_more

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """A wish, which is fulfilled as soon as the lines that run are ended."""
        found = self.get(tenant, batch_id)
        if found.status in ENDED:
            raise RequestError(f"the batch has ended: it is {found.status}", field="batch_id")
        if found.status in UNDER_WAY:
            entry = QueueEntry(self.files.tenant_folder(tenant).name, batch_id)
            (self._queue / (entry.name + CANCEL)).touch(0o600)
            found = self.get(tenant, batch_id)
        return found

    def inputs(self, tenant: str) -> set[str]:
        """The files that a tenant's batches read which have not ended."""
        folder = self.files.tenant_folder(tenant)
        records = self._records(folder)
        queued = (records.read(entry.batch_id) for entry in self.queued()[0] if entry.folder == folder.name)
        return {one.batch.input_file_id for one in queued if one is not None and one.batch.status not in ENDED}

    # -- for the gateway that runs them

    def lock(self) -> int | None:
        """A descriptor that holds the lock until it is closed, or its process ends; None where another has it."""
        descriptor = os.open(self.files.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def queued(self) -> tuple[list[QueueEntry], set[str]]:
        """The batches that have not ended, the oldest first; and the names of those that are to be cancelled."""
        names = [path.name for path in self._queue.iterdir()]
        entries = [QueueEntry(*name.split(".")) for name in names if name.count(".") == 1 and not name.startswith(".")]
        entries.sort(key=lambda entry: entry.batch_id)
        return entries, {name.removesuffix(CANCEL) for name in names if name.endswith(CANCEL)}

    def load(self, entry: QueueEntry) -> BatchRecord | None:
        """None where it has ended, or was never made; the queue forgets it then."""
        record = self._records(self.files.root / "tenants" / entry.folder).read(entry.batch_id)
        if record is None and time.time() - self._time_of(self._queue / entry.name) < NEWBORN:
            return None
        if record is None or record.batch.status in ENDED:
            self.forget(entry)
            return None
        return record

    def save(self, record: BatchRecord) -> None:
        self._records(self._folder(record)).write(record.batch.id, record)

    def forget(self, entry: QueueEntry) -> None:
        """The queue has nothing of a batch any more."""
        (self._queue / entry.name).unlink(missing_ok=True)
        (self._queue / (entry.name + CANCEL)).unlink(missing_ok=True)

    def cancelled_at(self, entry: QueueEntry) -> int:
        """Unix seconds of the wish; 0: there is none."""
        return int(self._time_of(self._queue / (entry.name + CANCEL)))

    def entry(self, record: BatchRecord) -> QueueEntry:
        return QueueEntry(self._folder(record).name, record.batch.id)

    def _shown(self, folder: str, record: BatchRecord) -> Batch:
        """As clients see it: a wish to cancel is a status too."""
        batch = record.batch
        if batch.status in UNDER_WAY and (asked := self.cancelled_at(QueueEntry(folder, batch.id))):
            return msgspec.structs.replace(batch, status="cancelling", cancelling_at=asked)
        return batch

    def _time_of(self, path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _folder(self, record: BatchRecord) -> Path:
        return self.files.tenant_folder(record.tenant)

    def _records(self, folder: Path) -> Records[BatchRecord]:
        return Records(folder / "batches", BatchRecord, PREFIX)


def make_batch_store(files: FileStore | None) -> BatchStore | None:
    return None if files is None else BatchStore(files)
