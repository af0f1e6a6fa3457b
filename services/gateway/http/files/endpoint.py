"""/v1/files."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from services.gateway.http.answers.objects import json_response
from services.gateway.http.files.objects import DeletedFile, FileList
from services.gateway.http.files.records import Page, not_found
from services.gateway.http.files.store import FileStore
from services.gateway.http.files.upload import receive_file
from services.gateway.http.middleware.origins import check_origin
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error, read_number
from shared.errors import RejectCode, RequestError

T = TypeVar("T")

MAX_LIMIT = 10_000


class Files:
    """The endpoints."""

    def __init__(self, gate: Gate, store: FileStore | None) -> None:
        self._gate = gate
        self._store = store

    async def create(self, request: Request) -> Response:
        check_origin(request, self._gate.settings.access)
        store, tenant = self._place(request)
        return json_response(await receive_file(request, store, tenant))

    async def list(self, request: Request) -> Response:
        store, tenant = self._place(request)
        page, purpose = read_page(request, MAX_LIMIT, MAX_LIMIT), request.query_params.get("purpose", "")
        found, has_more = await asyncio.to_thread(store.page, tenant, page, purpose)
        ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {}
        return json_response(FileList(data=found, has_more=has_more, **ends))

    async def retrieve(self, request: Request) -> Response:
        store, tenant = self._place(request)
        return json_response(await asyncio.to_thread(store.get, tenant, request.path_params["file_id"]))

    async def delete(self, request: Request) -> Response:
        store, tenant = self._place(request)
        file_id: str = request.path_params["file_id"]
        await asyncio.to_thread(store.delete, tenant, file_id)
        return json_response(DeletedFile(id=file_id))

    async def content(self, request: Request) -> Response:
        store, tenant = self._place(request)
        file = await asyncio.to_thread(store.get, tenant, request.path_params["file_id"])
        path = store.content(tenant, file.id)
        if not await asyncio.to_thread(path.is_file):
            raise not_found("content of the file", file.id)
        headers = {"x-content-type-options": "nosniff"}  # the page may load scripts of this server: this is none
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename, headers=headers)

    def _place(self, request: Request) -> tuple[FileStore, str]:
        return served(self._store), self._gate.caller(request).tenant


def served(store: T | None) -> T:
    """Raises RequestError where no folder for files is set."""
    if store is None:
        raise RequestError(
            "files and batches are not served here: the setting files_dir (PAGEANT_FILES_DIR) names a folder for them",
            code=RejectCode.NOT_FOUND,
        )
    return store


def read_page(request: Request, most: int, default: int) -> Page:
    """`after`, `limit` and `order` of a list."""
    given = request.query_params
    limit, order = read_number(given.get("limit", str(default)), "limit", 1, most), given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise field_error("order", f"must be asc or desc, got {order[:32]!r}")
    return Page(given.get("after", ""), limit, newest_first=order == "desc")
