"""/v1/batches at a whole gateway: its bodies, its tenants, and the requests that it makes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import TokenizeRequest
from tests.unit.gateway.http.client import Http, http
from tests.unit.gateway.troupe import LAST

ENDPOINT = "/v1/completions"
KEYS = {"api_keys": "one:key-of-one,two:key-of-two"}


def lines(count: int = 2, **body: Any) -> bytes:
    return b"\n".join(
        json.dumps(
            {"custom_id": f"id-{index}", "method": "POST", "url": ENDPOINT, "body": {"prompt": f"p{index}"} | body}
        ).encode()
        for index in range(count)
    )


async def file_of(h: Http, content: bytes, **headers: str) -> str:
    answer = await h.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)}, headers=headers
    )
    found: str = answer.json()["id"]
    return found


async def create(h: Http, file_id: str, *, headers: dict[str, str] | None = None, **changes: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"} | changes
    return await h.client.post("/v1/batches", json=body, headers=headers or {})


async def ended(h: Http, batch_id: str, headers: dict[str, str] | None = None) -> Any:
    async with asyncio.timeout(30):
        while True:
            found = (await h.client.get(f"/v1/batches/{batch_id}", headers=headers or {})).json()
            if found["status"] in ("completed", "failed", "cancelled"):
                return found
            await asyncio.sleep(0.02)


async def answer(h: Http, text: str = "one two") -> TokenizeRequest:
    request = await h.troupe.request()
    h.troupe.say(request, text, **LAST)
    return request


async def test_lines_are_requests_of_the_tenant_in_the_background(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path), **KEYS) as h:
        key = {"authorization": "Bearer key-of-one"}
        file_id = await file_of(h, lines(), **key)
        made = (await create(h, file_id, headers=key, metadata={"for": "me"})).json()
        assert made["object"] == "batch" and made["status"] == "validating" and made["metadata"] == {"for": "me"}
        assert made["expires_at"] - made["created_at"] == 86400 and "output_file_id" not in made
        requests = [await answer(h), await answer(h)]
        assert {request.text for request in requests} == {"p0", "p1"}
        for request in requests:
            assert request.header.tenant == "one" and request.header.is_background
        done = await ended(h, made["id"], key)
        assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        output = (await h.client.get(f"/v1/files/{done['output_file_id']}/content", headers=key)).text
        found = [json.loads(one) for one in output.splitlines()]
        assert {one["custom_id"] for one in found} == {"id-0", "id-1"}
        assert {one["response"]["request_id"] for one in found} == {one.header.request_id for one in requests}
        assert found[0]["response"]["body"]["choices"][0]["text"] == "one two"
        other = {"authorization": "Bearer key-of-two"}
        for path in (f"/v1/batches/{made['id']}", f"/v1/files/{done['output_file_id']}/content"):
            assert (await h.client.get(path, headers=other)).status_code == 404
        assert (await h.client.get("/v1/batches", headers=other)).json()["data"] == []
        assert (await h.client.post(f"/v1/batches/{made['id']}/cancel", headers=other)).status_code == 404
        listed = (await h.client.get("/v1/batches", headers=key)).json()
        assert [one["id"] for one in listed["data"]] == [made["id"]] and not listed["has_more"]
        stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"key-of-one" not in stored, "keys are not stored"


async def test_no_client_can_say_what_the_gateway_says_of_a_line(tmp_path: Path) -> None:
    async with http(**KEYS) as h:
        headers = {
            "authorization": "Bearer key-of-one",
            "pageant.caller": "two",
            "x-tenant": "two",
            "is-background": "1",
        }
        asked = h.post("/v1/completions", {"prompt": "x"}, **headers)
        request = await answer(h)
        assert request.header.tenant == "one" and not request.header.is_background
        assert (await asked).status_code == 200


async def test_another_tenant_s_file_is_no_input(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path), **KEYS) as h:
        file_id = await file_of(h, lines(), authorization="Bearer key-of-one")
        refused = await create(h, file_id, headers={"authorization": "Bearer key-of-two"})
        assert refused.status_code == 404 and refused.json()["error"]["param"] == "input_file_id"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "7d"}, "completion_window"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], param: str) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        refused = await create(h, await file_of(h, lines()), **changes)
        assert refused.json()["error"]["param"] == param and refused.status_code in (400, 404)
        assert not list((tmp_path / "queue").iterdir())


async def test_a_file_that_a_batch_reads_cannot_be_deleted(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        file_id = await file_of(h, lines())
        made = (await create(h, file_id, output_expires_after={"anchor": "created_at", "seconds": 3600})).json()
        assert (await h.client.delete(f"/v1/files/{file_id}")).status_code == 400
        await h.troupe.request()
        asked = (await h.client.post(f"/v1/batches/{made['id']}/cancel")).json()
        assert asked["status"] in ("cancelling", "cancelled")
        done = await ended(h, made["id"])
        assert done["status"] == "cancelled" and done["request_counts"]["failed"] == 2
        assert (await h.client.delete(f"/v1/files/{file_id}")).status_code == 200
        errors = (await h.client.get(f"/v1/files/{done['error_file_id']}")).json()
        assert errors["expires_at"] == errors["created_at"] + 3600


async def test_a_refused_line_and_its_numbers(tmp_path: Path) -> None:
    async with http(files_dir=str(tmp_path)) as h:
        done = await ended(h, (await create(h, await file_of(h, lines(3, suffix="x")))).json()["id"])
        assert done["request_counts"] == {"total": 3, "completed": 0, "failed": 3} and "output_file_id" not in done
        text = (await h.client.get(f"/v1/files/{done['error_file_id']}/content")).text
        for one in map(json.loads, text.splitlines()):
            assert one["response"]["status_code"] == 400
            assert one["response"]["body"]["error"]["param"] == "suffix"
        assert h.troupe.gateway.batches is not None
        numbers = {
            (sample.name, sample.labels.get("outcome", "")): sample.value
            for family in text_string_to_metric_families((await h.client.get("/metrics")).text)
            for sample in family.samples
            if sample.name.startswith("pageant_batch")
        }
        assert numbers["pageant_batch_lines_total", "failed"] == 3
        assert numbers["pageant_batch_runner", ""] == 1
