"""The files of clients on a disk: a folder for each tenant, in it a content and a record for each file.

All of it blocks, and is called from threads.  A file is there for clients once it has its record, which is written
last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET

from services.gateway.http.files.objects import FileObject
from services.gateway.http.files.records import SUFFIX, Page, Records, new_id, not_found
from shared.config import GatewaySettings
from shared.errors import ConfigError, RejectCode, RequestError

PREFIX = "file-"
UPLOAD = ".upload-"  # a content on its way
ABANDONED = 3600.0  # seconds without a byte after which an upload's gateway has died
MAX_FILES = 10_000  # of one tenant


class FileStore:
    """Raises RequestError where a client asks for what is not there, or for too much."""

    def __init__(
        self, root: Path, *, max_file_bytes: int, max_tenant_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.root = root
        self.clock = clock
        self.in_use: Callable[[str], set[str]] = lambda tenant: set()  # the files that a tenant's batches read
        self._max_file_bytes = max_file_bytes
        self._max_tenant_bytes = max_tenant_bytes

    def tenant_folder(self, tenant: str) -> Path:
        """Its name says nothing about the tenant, and no tenant's name is part of a path."""
        return self.root / "tenants" / hashlib.sha256(f"tenant\0{tenant}".encode()).hexdigest()[:32]

    def content(self, tenant: str, file_id: str) -> Path:
        """Where the content of a file lies; `file_id` is one of ours."""
        return self._folder(tenant) / f"{file_id}.data"

    def new_id(self) -> str:
        return new_id(PREFIX, self.clock())

    def get(self, tenant: str, file_id: str, field: str = "") -> FileObject:
        if (found := self._living(tenant, file_id)) is None:
            raise not_found("file", file_id, field)
        return found

    def page(self, tenant: str, page: Page, purpose: str = "") -> tuple[list[FileObject], bool]:
        """The tenant's files, of one purpose or of all; and whether there are more."""

        def read(file_id: str) -> FileObject | None:
            found = self._living(tenant, file_id)
            return found if found is not None and purpose in ("", found.purpose) else None

        return page.of(self._records(tenant).ids(), read)

    def delete(self, tenant: str, file_id: str) -> None:
        if file_id in self.in_use(tenant):
            raise RequestError("a batch that has not ended reads this file: cancel it before", field="file_id")
        self.get(tenant, file_id)
        self._remove(tenant, file_id)

    def publish(self, tenant: str, file: FileObject) -> None:
        """A content that lies in its place becomes a file for clients."""
        self._records(tenant).write(file.id, file)

    # -- uploads

    def begin(self, tenant: str) -> Upload:
        """Room for a new file, or RequestError where the tenant has too much."""
        folder = self._folder(tenant)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        room, ids = self._room(tenant), self._records(tenant).ids()
        if room <= 0 or len(ids) >= MAX_FILES:
            living = [file_id for file_id in ids if self._living(tenant, file_id) is not None]  # removes the others
            room, ids = self._room(tenant), living
        if len(ids) >= MAX_FILES:
            raise _full(f"this tenant has {MAX_FILES} files, the most that there may be")
        if room <= 0:
            raise self._too_much()
        return Upload(folder / f"{UPLOAD}{secrets.token_hex(8)}", self._max_file_bytes, room)

    def finish(self, tenant: str, upload: Upload, filename: str, purpose: str, seconds: int | None) -> FileObject:
        """The upload becomes a file, for so many seconds or for good."""
        try:
            if self._used(tenant) > self._max_tenant_bytes:  # several came at a time
                raise self._too_much()
            upload.close()
            now = int(self.clock())
            file = FileObject(
                id=self.new_id(),
                bytes=upload.num_bytes,
                created_at=now,
                expires_at=UNSET if seconds is None else now + seconds,
                filename=filename,
                purpose=purpose,
            )
            content = self.content(tenant, file.id)
            upload.path.replace(content)
            try:
                self.publish(tenant, file)
            except BaseException:
                content.unlink(missing_ok=True)
                raise
        except BaseException:
            upload.abandon()
            raise
        return file

    def _room(self, tenant: str) -> int:
        """Bytes that the tenant may still have."""
        return self._max_tenant_bytes - self._used(tenant)

    def _used(self, tenant: str) -> int:
        """Bytes of all contents of a tenant, of those on their way too; forgets those of gateways that have died."""
        num_bytes, now = 0, self.clock()
        with os.scandir(self._folder(tenant)) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    if entry.name.startswith(UPLOAD) and now - stat.st_mtime > ABANDONED:
                        Path(entry.path).unlink()
                    else:
                        num_bytes += stat.st_size
        return num_bytes

    def _too_much(self) -> RequestError:
        return _full(f"the files of this tenant fill max_tenant_file_bytes={self._max_tenant_bytes}: delete some")

    def _folder(self, tenant: str) -> Path:
        return self.tenant_folder(tenant) / "files"

    def _records(self, tenant: str) -> Records[FileObject]:
        return Records(self._folder(tenant), FileObject, PREFIX)

    def _living(self, tenant: str, file_id: str) -> FileObject | None:
        """A file whose time is over is removed by the first that asks for it, once no batch reads it."""
        found = self._records(tenant).read(file_id)
        if found is None or found.expires_at is UNSET or found.expires_at > self.clock():
            return found
        if file_id in self.in_use(tenant):
            return found
        self._remove(tenant, file_id)
        return None

    def _remove(self, tenant: str, file_id: str) -> None:
        self._records(tenant).remove(file_id)
        self.content(tenant, file_id).unlink(missing_ok=True)


class Upload:
    """One content on its way to the disk."""

    def __init__(self, path: Path, max_bytes: int, room: int) -> None:
        self.path = path
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._room = room
        self._file = path.open("xb")

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise RequestError(f"the file has more than max_file_bytes={self._max_bytes} bytes", field="file")
        if self.num_bytes > self._room:
            raise _full(f"the file does not fit: this tenant has room for {self._room} bytes (max_tenant_file_bytes)")
        self._file.write(data)

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # a disk may be full of what is thrown away here
            self._file.close()
        self.path.unlink(missing_ok=True)


def _full(message: str) -> RequestError:
    return RequestError(message, field="file", code=RejectCode.PERMISSION_DENIED, reason="storage_limit_exceeded")


def make_file_store(settings: GatewaySettings) -> FileStore | None:
    """None where there is no folder for it.  Raises ConfigError where the folder cannot be used."""
    if not settings.files_dir:
        return None
    root = Path(settings.files_dir).resolve()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "tenants").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"files_dir {root} cannot be used: {error.strerror}") from error
    return FileStore(root, max_file_bytes=settings.max_file_bytes, max_tenant_bytes=settings.max_tenant_file_bytes)
