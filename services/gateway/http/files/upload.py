"""A form with one file, on its way from the network to a disk: no more of it is in memory than one piece."""

from __future__ import annotations

import asyncio
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from services.gateway.access.intake import BODY, Body
from services.gateway.http.errors.failures import UnsupportedMediaTypeError
from services.gateway.http.files.objects import PURPOSES, FileObject
from services.gateway.http.files.store import FileStore, Upload
from services.gateway.http.requests.reading import field_error, read_number
from shared.errors import RejectCode, RequestError

FORM = b"multipart/form-data"
PIECE = 1 << 20  # bytes that are written at a time
MAX_FIELD_BYTES = 1024  # of a part that is no file
MAX_NAME_CHARS = 255
SHORTEST, LONGEST = 3600, 30 * 86400  # seconds that a file may be kept where it is not kept for good
FILE, PURPOSE = "file", "purpose"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = (PURPOSE, ANCHOR, SECONDS)


class UploadForm:
    """The parts of a form as they come: `pieces` has what has come of the file and is not taken yet."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pieces = bytearray()
        self.is_whole = False
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._name_part,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises RequestError where it is no form, or has what is not known."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestError(f"the body is not a form: {error}") from None

    def _begin(self) -> None:
        self._name, self._disposition = "", b""
        self._value.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == FILE:
            if self.filename is not None:
                raise RequestError("file: a form has one file", field=FILE)
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:MAX_NAME_CHARS] or "upload.jsonl"
        elif self._name not in FIELDS:
            raise RequestError(f"{self._name[:64]}: this field is not served", field=self._name[:64])

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self.pieces += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise field_error(self._name, f"has more than {MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _finish(self) -> None:
        self.is_whole = True


def read_form(request: Request) -> UploadForm:
    """An empty form, by the request's headers."""
    given = request.headers.get("content-type", "")
    kind, options = parse_options_header(given)
    if kind != FORM or not options.get(b"boundary"):
        raise UnsupportedMediaTypeError(
            f"a file is sent as a form, with the content-type multipart/form-data (got {given[:64]!r})",
            field="content-type",
        )
    try:
        return UploadForm(options[b"boundary"])
    except FormParserError as error:
        raise RequestError(f"content-type: {error}", field="content-type") from None


async def receive_file(request: Request, store: FileStore, tenant: str) -> FileObject:
    """Store the file that a request brings.  Raises RequestError, and keeps nothing of it, where that cannot be."""
    form = read_form(request)
    body: Body | None = request.scope.get(BODY)
    upload = await asyncio.to_thread(store.begin, tenant)
    try:
        async for data in request.stream():
            form.feed(data)
            if len(form.pieces) >= PIECE:
                await _store(form, upload, body)
        await _store(form, upload, body)
        seconds = _check(form)
        assert form.filename is not None
        finish: Any = (tenant, upload, form.filename, form.fields[PURPOSE], seconds)
        return await asyncio.to_thread(store.finish, *finish)
    except ClientDisconnect:
        raise RequestError("the client went away", code=RejectCode.CANCELLED) from None
    except OSError as error:
        raise RequestError(f"the file could not be stored: {error.strerror}", code=RejectCode.UNAVAILABLE) from error
    finally:
        await asyncio.shield(asyncio.to_thread(upload.abandon))  # nothing where it has become a file


async def _store(form: UploadForm, upload: Upload, body: Body | None) -> None:
    data = bytes(form.pieces)
    form.pieces.clear()
    await asyncio.to_thread(upload.write, data)
    if body is not None:
        body.stored(len(data))


def _check(form: UploadForm) -> int | None:
    """The seconds that the file is kept; None: for good."""
    if not form.is_whole:
        raise RequestError("the form is incomplete: the body ends before the closing boundary")
    if form.filename is None:
        raise RequestError("file: missing required field `file`", field=FILE)
    purpose = form.fields.get(PURPOSE, "")
    if purpose not in PURPOSES:
        raise RequestError(f"purpose must be one of {', '.join(PURPOSES)}, got {purpose[:64]!r}", field=PURPOSE)
    if ANCHOR not in form.fields and SECONDS not in form.fields:
        return None
    return read_expiry(form.fields.get(ANCHOR), form.fields.get(SECONDS, ""))


def read_expiry(anchor: str | None, seconds: str, field: str = "expires_after") -> int:
    """The seconds that a file is kept."""
    if anchor != "created_at":
        raise field_error(f"{field}.anchor", f"must be created_at, got {str(anchor)[:64]!r}")
    return read_number(seconds, f"{field}.seconds", SHORTEST, LONGEST)
