"""The runner, with an endpoint that a test plays: every end of a batch, retries, fairness, and a change of gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.batches import job as jobs
from services.gateway.http.batches import runner as runners
from services.gateway.http.batches.call import LineAnswer
from services.gateway.http.batches.endpoint import _create
from services.gateway.http.batches.objects import Batch, BatchBody
from services.gateway.http.batches.runner import BatchRunner
from services.gateway.http.batches.store import BatchStore
from services.gateway.http.files.records import Page
from services.gateway.http.files.store import FileStore
from shared.config import GatewaySettings
from shared.errors import RequestError
from shared.exposition import BatchMeter

ENDPOINT = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
Call = Callable[[str, bytes, str], Awaitable[LineAnswer]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "POLL", 0.01)
    monkeypatch.setattr(runners, "DISK_REST", 0.02)
    monkeypatch.setattr(jobs, "SAVE_SECONDS", 0.01)
    monkeypatch.setattr(jobs, "FIRST_REST", 0.001)
    monkeypatch.setattr(jobs, "LONGEST_REST", 0.01)


class Place:
    """A folder, and a clock."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.now = 1000.0
        self.files = FileStore(root, max_file_bytes=1 << 20, max_tenant_bytes=1 << 24, clock=lambda: self.now)
        self.store = BatchStore(self.files)

    def batch(self, count: int, tenant: str = "t", *, content: bytes | None = None) -> Batch:
        text = content if content is not None else b"".join(line(index) for index in range(count))
        upload = self.files.begin(tenant)
        upload.write(text)
        file = self.files.finish(tenant, upload, "a", "batch", None)
        body = BatchBody(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        return _create(self.store, tenant, body).batch

    def results(self, batch: Batch, tenant: str = "t") -> tuple[list[Any], list[Any]]:
        """The lines of both files, which clients see."""
        found = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            lines: list[Any] = []
            if isinstance(file_id, str):
                text = self.files.content(tenant, self.files.get(tenant, file_id).id).read_text()
                lines = [json.loads(one) for one in text.splitlines()]
            found.append(lines)
        return found[0], found[1]

    async def until(self, batch: Batch, *statuses: str, tenant: str = "t") -> Batch:
        async with asyncio.timeout(30):
            while (found := self.store.get(tenant, batch.id)).status not in (statuses or ENDED):
                await asyncio.sleep(0.005)
        return found


def line(index: int) -> bytes:
    body = {"custom_id": f"id-{index}", "method": "POST", "url": ENDPOINT, "body": {"prompt": index}}
    return json.dumps(body).encode() + b"\n"


async def echo(path: str, body: bytes, tenant: str) -> LineAnswer:
    assert path == ENDPOINT
    return LineAnswer(200, f"request-of-{tenant}", body)


def make(place: Place, call: Call, **settings: Any) -> BatchRunner:
    made: Any = call
    return BatchRunner(place.store, made, GatewaySettings(files_dir="x", **settings), BatchMeter("m"))


@contextlib.asynccontextmanager
async def running(place: Place, call: Call, **settings: Any) -> AsyncIterator[BatchRunner]:
    runner = make(place, call, **settings)
    task = asyncio.create_task(runner.run())
    yield runner
    runner.leave()
    async with asyncio.timeout(10):
        await task


def ids(lines: list[Any]) -> list[int]:
    return sorted(int(one["custom_id"].removeprefix("id-")) for one in lines)


async def test_every_line_is_answered_once_and_the_files_are_the_tenant_s(tmp_path: Path) -> None:
    place = Place(tmp_path)
    batch = place.batch(50)
    async with running(place, echo) as runner:
        done = await place.until(batch)
        async with asyncio.timeout(10):
            while not runner.meter.batches["completed"]:
                await asyncio.sleep(0.005)
    assert done.status == "completed" and done.completed_at == 1000 and done.in_progress_at == 1000
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (50, 50, 0)
    output, errors = place.results(done)
    assert ids(output) == list(range(50)) and not errors
    assert all(one["response"]["body"] == {"prompt": int(one["custom_id"][3:])} for one in output)
    assert output[0]["response"]["request_id"] == "request-of-t"
    assert not list((tmp_path / "queue").iterdir())
    purposes = [file.purpose for file in place.files.page("t", Page("", 9))[0]]
    assert sorted(purposes) == ["batch", "batch_output"]
    assert runner.meter.lines["completed"] == 50


async def test_a_failed_line_goes_to_the_error_file(tmp_path: Path) -> None:
    async def call(path: str, body: bytes, tenant: str) -> LineAnswer:
        odd = json.loads(body)["prompt"] % 2
        return LineAnswer(400, "r", b'{"error": {"message": "odd"}}') if odd else LineAnswer(200, "r", b"{}")

    place = Place(tmp_path)
    batch = place.batch(10)
    async with running(place, call):
        done = await place.until(batch)
    output, errors = place.results(done)
    assert done.status == "completed" and (done.request_counts.completed, done.request_counts.failed) == (5, 5)
    assert ids(output) == [0, 2, 4, 6, 8] and ids(errors) == [1, 3, 5, 7, 9]
    assert errors[0]["response"]["status_code"] == 400 and errors[0]["error"] is None


@pytest.mark.parametrize(("status", "num_tries", "ends_well"), [(503, 9, True), (429, 9, True), (500, 2, True),
                                                                (500, 9, False), (400, 1, False)])  # fmt: skip
async def test_what_may_be_retried_is(tmp_path: Path, status: int, num_tries: int, ends_well: bool) -> None:
    """Each line fails so many times before it would succeed."""
    tries = Counter[bytes]()

    async def call(path: str, body: bytes, tenant: str) -> LineAnswer:
        tries[body] += 1
        return LineAnswer(status, "", b'{"error": {}}') if tries[body] <= num_tries else LineAnswer(200, "", b"{}")

    place = Place(tmp_path)
    batch = place.batch(4)
    async with running(place, call) as runner:
        done = await place.until(batch)
    output, errors = place.results(done)
    assert (ids(output), ids(errors)) == (([0, 1, 2, 3], []) if ends_well else ([], [0, 1, 2, 3]))
    if ends_well:
        assert set(tries.values()) == {num_tries + 1} and runner.meter.lines["retried"] == 4 * num_tries
    else:
        assert set(tries.values()) == {3 if status == 500 else 1}


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_an_early_end_says_what_was_not_done(tmp_path: Path, how: str) -> None:
    aborted = []

    async def call(path: str, body: bytes, tenant: str) -> LineAnswer:
        if json.loads(body)["prompt"] < 5:
            return LineAnswer(200, "", b"{}")
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            aborted.append(body)
            raise

    place = Place(tmp_path)
    batch = place.batch(20)
    async with running(place, call, batch_concurrency=3):
        async with asyncio.timeout(30):
            while place.store.get("t", batch.id).request_counts.completed < 5:
                await asyncio.sleep(0.005)
        if how == "cancelled":
            asked = place.store.cancel("t", batch.id)
            assert asked.status == "cancelling" and isinstance(asked.cancelling_at, int)
        else:
            place.now += 86400
        done = await place.until(batch)
    assert done.status == how and isinstance(getattr(done, f"{how}_at"), int)
    output, errors = place.results(done)
    assert ids(output) == [0, 1, 2, 3, 4] and ids(errors) == list(range(5, 20))
    assert {one["error"]["code"] for one in errors} == {f"batch_{how}"}
    assert len(aborted) == 3, "what ran was ended"
    with pytest.raises(RequestError, match=how):
        place.store.cancel("t", batch.id)
    assert not list((tmp_path / "queue").iterdir())


async def test_a_batch_that_cannot_be_run_fails_and_says_why(tmp_path: Path) -> None:
    place = Place(tmp_path)
    wrong = place.batch(0, content=line(0) + b"{\n" + line(0))
    gone = place.batch(1)
    place.files._remove("t", gone.input_file_id)  # a client cannot while the batch lives
    async with running(place, echo):
        failed, lost = await place.until(wrong), await place.until(gone)
    assert failed.status == lost.status == "failed"
    assert [(error.code, error.line) for error in failed.errors.data] == [  # type: ignore[union-attr]
        ("invalid_json_line", 2), ("duplicate_custom_id", 3)]  # fmt: skip
    assert lost.errors.data[0].code == "input_file_not_found"  # type: ignore[union-attr]
    assert place.results(failed) == ([], [])


async def test_what_was_done_of_a_batch_that_cannot_go_on_is_the_client_s(tmp_path: Path) -> None:
    """Its gateway ends, and the next one does not find the input."""
    place, gate = Place(tmp_path), asyncio.Semaphore(2)

    async def call(path: str, body: bytes, tenant: str) -> LineAnswer:
        await gate.acquire()
        return LineAnswer(200, "", body)

    batch = place.batch(5)
    async with running(place, call, batch_concurrency=1):
        while not gate.locked():
            await asyncio.sleep(0.005)
    place.files._remove("t", batch.input_file_id)
    async with running(place, echo):
        failed = await place.until(batch)
    assert failed.status == "failed" and failed.errors.data[0].code == "input_file_not_found"  # type: ignore[union-attr]
    output, errors = place.results(failed)
    assert ids(output) == [0, 1] and not errors
    contents = {path.stem for path in tmp_path.rglob("*.data")}
    assert contents == {failed.output_file_id}, "nothing is left that no client can delete"


async def test_places_are_shared_by_tenants_and_their_batches(tmp_path: Path) -> None:
    begun, gate = list[str](), asyncio.Semaphore(0)

    async def call(path: str, body: bytes, tenant: str) -> LineAnswer:
        begun.append(tenant)
        await gate.acquire()
        return LineAnswer(200, "", b"{}")

    place = Place(tmp_path)
    many = [place.batch(40, "greedy") for _ in range(4)]
    few = place.batch(3, "modest")
    async with running(place, call, batch_concurrency=6):
        for one in (*many, few):
            await place.until(one, "in_progress", tenant="modest" if one is few else "greedy")
        await until_begun(begun, 6)
        await asyncio.sleep(0.05)
        num_first = len(begun)
        gate.release()
        await until_begun(begun, 7)
        early = Counter(begun)
        for _ in range(163):
            gate.release()
        for one in many:
            await place.until(one, tenant="greedy")
        await place.until(few, tenant="modest")
    assert early["modest"] >= 1, "the tenant that came last has the first place that is free"
    assert Counter(begun) == {"greedy": 160, "modest": 3}
    assert num_first == 6, "no more run at a time"


async def until_begun(begun: list[str], count: int) -> None:
    async with asyncio.timeout(30):
        while len(begun) < count:
            await asyncio.sleep(0.005)


async def test_one_gateway_at_a_time_and_the_next_goes_on(tmp_path: Path) -> None:
    """Each of twenty gateways leaves, or is cut off, in the middle."""
    calls = Counter[int]()

    async def call(path: str, body: bytes, tenant: str) -> LineAnswer:
        await asyncio.sleep(0.002)
        calls[json.loads(body)["prompt"]] += 1
        return LineAnswer(200, "", body)

    place = Place(tmp_path)
    batch = place.batch(300)
    for number in range(20):
        runner, other = make(place, call), make(place, call)
        tasks = [asyncio.create_task(one.run()) for one in (runner, other)]
        await asyncio.sleep(0.03)
        assert not (runner.meter.is_runner and other.meter.is_runner)
        for one, task in zip((runner, other), tasks, strict=True):
            if number % 2:
                one.leave()
            else:
                task.cancel()
        await asyncio.wait(tasks)
    async with running(place, call):
        done = await place.until(batch)
    output, errors = place.results(done)
    assert ids(output) == list(range(300)) and not errors and done.request_counts.completed == 300


async def test_a_death_while_it_ends_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    batch = place.batch(5)
    publish, failures = FileStore.publish, iter([1, 1, 0, 1])

    def flaky(self: FileStore, tenant: str, file: Any) -> None:
        publish(self, tenant, file)
        if next(failures, 0):
            raise OSError("the disk is away")

    monkeypatch.setattr(FileStore, "publish", flaky)
    place.now = 1000.0
    async with running(place, echo):
        done = await place.until(batch)
    assert done.status == "completed" and ids(place.results(done)[0]) == [0, 1, 2, 3, 4]


async def test_a_disk_that_is_full_for_a_while_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.gateway.http.batches.ledger import Ledger

    answered, refusals = Ledger.answered, iter([True, False, True, True] * 5)

    def sometimes(self: Ledger, *values: Any) -> None:
        if next(refusals, False):
            raise OSError("no space left")
        answered(self, *values)

    monkeypatch.setattr(Ledger, "answered", sometimes)
    place = Place(tmp_path)
    batch = place.batch(20)
    async with running(place, echo):
        done = await place.until(batch)
    assert ids(place.results(done)[0]) == list(range(20))


async def test_a_record_that_cannot_be_read_harms_no_other(tmp_path: Path) -> None:
    place = Place(tmp_path)
    broken, good = place.batch(2), place.batch(2)
    (place.files.tenant_folder("t") / "batches" / f"{broken.id}.json").write_bytes(b"\0\0")
    async with running(place, echo):
        assert (await place.until(good)).status == "completed"


async def test_unfinished_batches_of_a_tenant_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.gateway.http.batches import store as stores

    monkeypatch.setattr(stores, "MAX_QUEUED", 2)
    monkeypatch.setattr(stores, "MAX_BATCHES", 3)
    place = Place(tmp_path)
    first = place.batch(1)
    place.batch(1)
    with pytest.raises(RequestError, match="the limit is 2"):
        place.batch(1)
    place.batch(1, "other")
    async with running(place, echo):
        await place.until(first)
        for _ in range(3):
            place.now += 1
            await place.until(place.batch(1))
    assert len(place.store.page("t", Page("", 99))[0]) == 3, "the oldest that ended are forgotten"
    with pytest.raises(RequestError, match="no batch"):
        place.store.get("t", first.id)
