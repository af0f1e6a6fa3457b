"""The official objects of /v1/batches, and what the disk has of a batch beside them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.http.files.objects import StoredList

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
WINDOW = "24h"
WINDOW_SECONDS = 86400
UNDER_WAY = ("validating", "in_progress")  # what may still be cancelled
ENDED = ("completed", "failed", "expired", "cancelled")

Time = int | UnsetType  # Unix seconds; absent until it happens


class OutputExpiry(msgspec.Struct, kw_only=True):
    anchor: str  # created_at
    seconds: int  # 3,600 to 2,592,000


class BatchBody(msgspec.Struct, kw_only=True):
    """A batch to make of a file of JSON lines, each with `custom_id`, `method`, `url` and `body`."""

    input_file_id: str  # of a file with the purpose `batch`
    endpoint: str  # the url of every line: /v1/completions, /v1/chat/completions, /v1/responses or /v1/embeddings
    completion_window: str  # 24h
    metadata: dict[str, str] | None = None  # 16 pairs of at most 64 and 512 characters
    output_expires_after: OutputExpiry | None = None  # when the files of results go; default: never


class BatchError(msgspec.Struct, kw_only=True, omit_defaults=True):
    code: str
    message: str
    line: int | None = None  # of the file, from 1
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Of lines; those that are neither completed nor failed are still to do."""

    total: int = 0
    completed: int = 0  # lines of the output file
    failed: int = 0  # lines of the error file


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    errors: BatchErrors | UnsetType = UNSET
    output_file_id: str | UnsetType = UNSET
    error_file_id: str | UnsetType = UNSET
    created_at: int
    expires_at: int
    in_progress_at: Time = UNSET
    finalizing_at: Time = UNSET
    completed_at: Time = UNSET
    failed_at: Time = UNSET
    expired_at: Time = UNSET
    cancelling_at: Time = UNSET
    cancelled_at: Time = UNSET
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(StoredList[Batch]):
    pass


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as it lies on the disk.  After its creation only the gateway that runs batches writes it."""

    batch: Batch
    tenant: str
    output_id: str = ""  # of the files that it writes, which clients see at its end
    error_id: str = ""
    output_seconds: int = 0  # for which those are kept; 0: for good
    ends_as: str = ""  # its last status, once it is finalizing


# -- the lines of results


class ResultResponse(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class LineResult(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: ResultResponse | None = None
    error: ResultError | None = None
