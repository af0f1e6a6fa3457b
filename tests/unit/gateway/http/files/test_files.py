"""/v1/files: what is stored, who sees it, and how much of it there may be."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from services.gateway.http.files.objects import FileObject
from services.gateway.http.files.records import Page, Records, is_id, new_id
from services.gateway.http.files.store import ABANDONED, MAX_FILES, UPLOAD, FileStore, make_file_store
from shared.config import GatewaySettings
from shared.errors import ConfigError, RequestError
from tests.unit.gateway.http.client import Http, http

KEYS = {"api_keys": "one:key-of-one,two:key-of-two"}
TEXT = b'{"custom_id": "a"}\n'


async def upload(h: Http, content: bytes = TEXT, *, key: str = "", **fields: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    form = {"purpose": "batch"} | fields
    return await h.client.post(
        "/v1/files", data={name: value for name, value in form.items() if value is not None},
        files={"file": ("lines.jsonl", content, "application/octet-stream")}, headers=headers,
    )  # fmt: skip


def form(*parts: bytes) -> tuple[bytes, dict[str, str]]:
    """A body of raw parts, and its headers."""
    body = b"".join(b"--edge\r\n" + part + b"\r\n" for part in parts) + b"--edge--\r\n"
    return body, {"content-type": "multipart/form-data; boundary=edge"}


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value


FILE_PART = part("file", TEXT, '; filename="a.jsonl"')


async def test_a_file_is_stored_listed_read_and_deleted(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path / "files")) as h:
        content = os.urandom(3 << 20)  # more than one piece, and any bytes
        made = (await upload(h, content)).json()
        assert made["object"] == "file" and made["id"].startswith("file-") and made["status"] == "processed"
        assert (made["bytes"], made["filename"], made["purpose"]) == (len(content), "lines.jsonl", "batch")
        assert "expires_at" not in made
        path = f"/v1/files/{made['id']}"
        assert (await h.client.get(path)).json() == made
        assert (await h.client.get(f"{path}/content")).content == content
        listed = (await h.client.get("/v1/files")).json()
        assert listed["data"] == [made] and listed["object"] == "list" and not listed["has_more"]
        assert (await h.client.delete(path)).json() == {"id": made["id"], "object": "file", "deleted": True}
        for gone in (path, f"{path}/content"):
            assert (await h.client.get(gone)).status_code == 404
        assert (await h.client.delete(path)).status_code == 404
        assert not list((tmp_path / "files").rglob("*.data")), "nothing is left of it"


async def test_a_list_has_pages_and_both_orders(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        ids = []
        for _ in range(5):
            ids.append((await upload(h)).json()["id"])
            time.sleep(0.002)  # ids sort by milliseconds

        async def page(**query: Any) -> tuple[list[str], bool]:
            found = (await h.client.get("/v1/files", params=query)).json()
            return [one["id"] for one in found["data"]], found["has_more"]

        assert await page() == (ids[::-1], False)
        assert await page(order="asc", limit=2) == (ids[:2], True)
        assert await page(order="asc", limit=2, after=ids[1]) == (ids[2:4], True)
        assert await page(order="asc", limit=2, after=ids[3]) == (ids[4:], False)
        assert await page(after=ids[2]) == ([ids[1], ids[0]], False)
        assert await page(purpose="batch_output") == ([], False)
        long = ("0" * 16 + "9", "1" + "0" * 5000, "0" * 5000 + "1")  # of more digits than Python reads
        limits: list[dict[str, Any]] = [{"limit": limit} for limit in (0, "many", 10_001, *long)]
        for query, field in (*((query, "limit") for query in limits), ({"order": "up"}, "order")):
            refused = await h.client.get("/v1/files", params=query)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field


async def test_a_tenant_sees_its_own_files_only(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path), **KEYS) as h:
        made = (await upload(h, key="key-of-one")).json()
        other = {"authorization": "Bearer key-of-two"}
        for method, path in (
            ("GET", f"/v1/files/{made['id']}"),
            ("GET", f"/v1/files/{made['id']}/content"),
            ("DELETE", f"/v1/files/{made['id']}"),
        ):
            assert (await h.client.request(method, path, headers=other)).status_code == 404
        assert (await h.client.get("/v1/files", headers=other)).json()["data"] == []
        assert (await h.client.get("/v1/files")).status_code == 401
        mine = await h.client.get(f"/v1/files/{made['id']}/content", headers={"authorization": "Bearer key-of-one"})
        assert mine.content == TEXT
        assert not any("one" in path.name for path in tmp_path.rglob("*") if path.is_dir()), "names say nothing"


@pytest.mark.parametrize(
    "name", ["../../secret", "file-..", "file-" + "0" * 31, "file-" + "g" * 32, "batch_" + "0" * 32]
)
async def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_text("{}")
    assert not is_id("file-", name)
    records = Records(tmp_path / "tenants" / "t" / "files", FileObject, "file-")
    assert records.read(name) is None
    async with http(files_dir=str(tmp_path)) as h:
        assert (await h.client.get("/v1/files/" + name.replace("/", "%2F"))).status_code == 404


@pytest.mark.parametrize(
    ("parts", "status", "param"),
    [
        ((FILE_PART,), 400, "purpose"),
        ((part("purpose", b"fine-tune"), FILE_PART), 400, "purpose"),
        ((part("purpose", b"batch"),), 400, "file"),
        ((part("purpose", b"batch"), FILE_PART, FILE_PART), 400, "file"),
        ((part("purpose", b"x" * 2000), FILE_PART), 400, "purpose"),
        ((part("colour", b"red"), FILE_PART), 400, "colour"),
        ((part("purpose", b"batch"), part("expires_after[seconds]", b"4000"), FILE_PART), 400, "expires_after.anchor"),
    ],
)
async def test_a_form_that_cannot_be_is_refused_by_name(
    tmp_path: Path, parts: tuple[bytes, ...], status: int, param: str
) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        body, headers = form(*parts)
        answer = await h.client.post("/v1/files", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and "files" in path.parts], "nothing is kept"


async def test_what_is_no_form_is_refused(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        assert (await h.client.post("/v1/files", json={"purpose": "batch"})).status_code == 415
        body, headers = form(part("purpose", b"batch"), FILE_PART)
        for broken in (body[: len(body) // 2], b"--other" + body, b""):
            answer = await h.client.post("/v1/files", content=broken, headers=headers)
            assert answer.status_code == 400, answer.text
        assert not list(tmp_path.rglob(f"{UPLOAD}*"))


async def test_too_much_is_refused(tmp_path: Path) -> None:
    limits = {"max_file_bytes": 2000, "max_tenant_file_bytes": 3000}
    async with http(files_dir=str(tmp_path), **limits) as h:
        answer = await upload(h, b"x" * 2001)
        assert answer.status_code == 400 and "max_file_bytes=2000" in answer.json()["error"]["message"]
        first = (await upload(h, b"x" * 2000)).json()
        answer = await upload(h, b"x" * 1001)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "storage_limit_exceeded"
        assert (await upload(h, b"x" * 1000)).status_code == 200
        assert (await upload(h, b"x")).status_code == 403
        await h.client.delete(f"/v1/files/{first['id']}")
        assert (await upload(h, b"x")).status_code == 200
        assert not list(tmp_path.rglob(f"{UPLOAD}*"))


async def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """More than all bodies in transit may have together: what is on the disk does not count."""
    limits = {"max_request_bytes": 1 << 20, "max_receiving_bytes": 6 << 20, "max_file_bytes": 20 << 20}
    async with http(files_dir=str(tmp_path), **limits) as h:
        assert (await upload(h, bytes(16 << 20))).json()["bytes"] == 16 << 20
        assert h.troupe.gateway.intake.num_bytes == 0


async def test_a_file_ends_with_its_time(tmp_path: Path) -> None:
    now = 1000.0
    store = FileStore(tmp_path, max_file_bytes=99, max_tenant_bytes=99, clock=lambda: now)

    def made(seconds: int | None) -> FileObject:
        one = store.begin("t")
        one.write(b"abc")
        return store.finish("t", one, "a", "batch", seconds)

    for_good, short = made(None), made(5)
    now = 1004.9
    assert store.get("t", short.id).expires_at == 1005
    now = 1005.0
    assert store.page("t", Page("", 9)) == ([for_good], False)
    with pytest.raises(RequestError, match="no file"):
        store.get("t", short.id)
    assert not store.content("t", short.id).exists() and store.content("t", for_good.id).exists()


async def test_files_whose_time_is_over_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    store = FileStore(tmp_path, max_file_bytes=99, max_tenant_bytes=3, clock=lambda: now)

    def made() -> FileObject:
        one = store.begin("t")
        one.write(b"abc")
        return store.finish("t", one, "a", "batch", 5)

    read, limit = made(), "max_tenant_file_bytes=3"
    with pytest.raises(RequestError, match=limit):
        store.begin("t")
    now = 1006.0
    store.in_use = lambda tenant: {read.id} if tenant == "t" else set()
    with pytest.raises(RequestError, match=limit):  # a batch reads it still
        store.begin("t")
    with pytest.raises(RequestError, match="a batch that has not ended reads this file"):
        store.delete("t", read.id)
    assert store.get("t", read.id) == read
    store.in_use = lambda tenant: set()
    assert made().id != read.id and not store.content("t", read.id).exists()
    now = 1012.0
    monkeypatch.setattr("services.gateway.http.files.store.MAX_FILES", 1)
    made()
    with pytest.raises(RequestError, match="1 files, the most"):
        store.begin("t")


async def test_a_file_without_a_record_leaves_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = FileStore(tmp_path, max_file_bytes=99, max_tenant_bytes=99)
    one = store.begin("t")
    one.write(b"abc")
    monkeypatch.setattr(store, "publish", full)
    with pytest.raises(OSError, match="No space"):
        store.finish("t", one, "a", "batch", None)
    store.begin("t").abandon()
    assert not list(tmp_path.rglob("*.data"))


async def test_what_a_dead_gateway_left_is_forgotten(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_file_bytes=99, max_tenant_bytes=99)
    left = store.begin("t")
    left.write(b"x" * 99)
    left.close()
    with pytest.raises(RequestError, match="max_tenant_file_bytes"):
        store.begin("t")
    long_ago = time.time() - ABANDONED - 1
    os.utime(left.path, (long_ago, long_ago))
    store.begin("t").abandon()
    assert not left.path.exists()


async def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_file_bytes=99, max_tenant_bytes=99)
    store.begin("t").abandon()
    folder = store.content("t", "x").parent
    record = msgspec.json.encode(FileObject(id="file-x", bytes=0, created_at=1, filename="a", purpose="batch"))
    for _ in range(MAX_FILES):
        (folder / f"{new_id('file-', 1.0)}.json").write_bytes(record)
    with pytest.raises(RequestError, match=str(MAX_FILES)):
        store.begin("t")
    store.begin("other").abandon()


async def test_pages_of_other_origins_cannot_send_a_form(tmp_path: Path) -> None:
    body, headers = form(part("purpose", b"batch"), FILE_PART)
    async with http(files_dir=str(tmp_path), cors_allow_origins="https://ours.example") as h:
        own = str(h.client.base_url).rstrip("/")
        for origin, status in (("https://evil.example", 403), ("null", 403), ("https://ours.example", 200), (own, 200)):
            answer = await h.client.post("/v1/files", content=body, headers=headers | {"origin": origin})
            assert answer.status_code == status, origin
        cancel = await h.client.post(f"/v1/batches/batch_{'0' * 32}/cancel", headers={"origin": "https://evil.example"})
        assert cancel.status_code == 403


async def test_without_a_folder_nothing_is_served() -> None:
    async with http() as h:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches")):
            answer = await h.client.request(method, path)
            assert answer.status_code == 404 and "files_dir" in answer.json()["error"]["message"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="files_dir"):
        make_file_store(GatewaySettings(files_dir=str(tmp_path / "file" / "folder")))
