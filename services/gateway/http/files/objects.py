"""The official objects of /v1/files, which are also what lies beside each file's content."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

PURPOSES = ("batch",)  # of files that clients may store: nothing else here reads one
OUTPUT_PURPOSE = "batch_output"

T = TypeVar("T")


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET
    filename: str
    purpose: str
    status: str = "processed"


class StoredList(msgspec.Struct, Generic[T], kw_only=True):
    """A page of what is stored."""

    object: str = "list"
    data: list[T]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileList(StoredList[FileObject]):
    pass


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True
