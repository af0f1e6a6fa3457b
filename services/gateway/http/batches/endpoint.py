"""/v1/batches."""

from __future__ import annotations

import asyncio

import structlog
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.objects import json_response
from services.gateway.http.batches.objects import (
    ENDPOINTS,
    WINDOW,
    WINDOW_SECONDS,
    Batch,
    BatchBody,
    BatchList,
    BatchRecord,
    RequestCounts,
)
from services.gateway.http.batches.store import BatchStore
from services.gateway.http.files.endpoint import read_page, served
from services.gateway.http.files.upload import PURPOSE, read_expiry
from services.gateway.http.middleware.origins import check_origin
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error
from shared.errors import RequestError

log = structlog.get_logger()

INPUT_PURPOSE = "batch"
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
MAX_PAIRS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512


class Batches:
    """The endpoints."""

    def __init__(self, gate: Gate, store: BatchStore | None) -> None:
        self._gate = gate
        self._store = store

    async def create(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, BatchBody)
        store, tenant = self._place(request)
        record = await asyncio.to_thread(_create, store, tenant, body)
        log.info("batch_created", batch_id=record.batch.id, tenant=tenant, endpoint=body.endpoint,
                 input_file_id=body.input_file_id)  # fmt: skip
        return json_response(record.batch)

    async def list(self, request: Request) -> Response:
        store, tenant = self._place(request)
        found, has_more = await asyncio.to_thread(store.page, tenant, read_page(request, MAX_LIMIT, DEFAULT_LIMIT))
        ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {}
        return json_response(BatchList(data=found, has_more=has_more, **ends))

    async def retrieve(self, request: Request) -> Response:
        store, tenant = self._place(request)
        return json_response(await asyncio.to_thread(store.get, tenant, request.path_params["batch_id"]))

    async def cancel(self, request: Request) -> Response:
        check_origin(request, self._gate.settings.access)
        store, tenant = self._place(request)
        return json_response(await asyncio.to_thread(store.cancel, tenant, request.path_params["batch_id"]))

    def _place(self, request: Request) -> tuple[BatchStore, str]:
        return served(self._store), self._gate.caller(request).tenant


def _create(store: BatchStore, tenant: str, body: BatchBody) -> BatchRecord:
    """Raises RequestError naming the field that cannot be."""
    if body.endpoint not in ENDPOINTS:
        raise field_error("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if body.completion_window != WINDOW:
        raise field_error("completion_window", f"must be {WINDOW}")
    _check_metadata(body.metadata or {})
    expiry = body.output_expires_after
    seconds = 0 if expiry is None else read_expiry(expiry.anchor, str(expiry.seconds), "output_expires_after")
    file = store.files.get(tenant, body.input_file_id, "input_file_id")
    if file.purpose != INPUT_PURPOSE:
        raise RequestError(
            f"input_file_id: the {PURPOSE} of this file is {file.purpose}, not {INPUT_PURPOSE}", field="input_file_id"
        )
    now = int(store.clock())
    batch = Batch(
        id=store.new_id(),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        request_counts=RequestCounts(),
        metadata=body.metadata,
    )
    record = BatchRecord(batch=batch, tenant=tenant, output_seconds=seconds)
    store.create(record)
    return record


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_PAIRS:
        raise field_error("metadata", f"has {len(metadata)} pairs, more than {MAX_PAIRS}")
    for name, value in metadata.items():
        if len(name) > MAX_NAME_CHARS or len(value) > MAX_VALUE_CHARS:
            raise RequestError(
                f"metadata: names have at most {MAX_NAME_CHARS} characters, values {MAX_VALUE_CHARS}", field="metadata"
            )
