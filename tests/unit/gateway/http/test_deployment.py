"""/deployment: what the page draws, and the orders of an operator, over a real socket to a supervisor's desk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.supervision.orders import Fulfilment, OrderDesk
from services.cli.supervision.supervisor import Role, Supervisor
from shared.messages import GetLoad, Load, MoveCounts, WorkerLoad
from shared.processes.supervision import desk_path
from tests.unit.cli.supervision.test_supervisor import FakeProcess
from tests.unit.gateway.http.client import Http, http

KEYS = "operator:battery-staple,acme:correct-horse"
AS_OPERATOR = {"authorization": "Bearer battery-staple"}
AS_ACME = {"authorization": "Bearer correct-horse"}
COUNTERS = ("num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits", "num_chunked_prefills",
            "num_prompt_tokens", "num_finished", "num_aborted", "num_rejected")  # fmt: skip

MOVES = MoveCounts(num_stored_blocks=8, num_fetched_tokens=9)


@contextlib.asynccontextmanager
async def supervised(directory: Path) -> AsyncIterator[Supervisor]:
    """A supervisor of fake processes, which takes orders in this directory."""
    cast = [Role("worker"), Role("scheduler")]
    supervisor = Supervisor(cast, lambda role: FakeProcess(role.name, []), report=lambda _: None)
    supervisor.start()
    desk = OrderDesk(desk_path(directory))
    work = Fulfilment(desk, supervisor, lambda child: child.alive, report=lambda _: None)

    async def loop() -> None:
        while True:
            supervisor.poll()
            work.poll()
            await asyncio.sleep(0.002)

    task = asyncio.create_task(loop())
    try:
        yield supervisor
    finally:
        task.cancel()
        desk.close()


async def look(h: Http, **headers: str) -> Any:
    asked = asyncio.create_task(h.client.get("/deployment", headers=headers))
    question = await h.troupe.get(h.troupe.scheduler, GetLoad)
    worker = WorkerLoad("worker-1", 2, 100, 50, 20, 9)
    numbers: dict[str, Any] = dict.fromkeys(COUNTERS, 5)
    h.troupe.tell(Load(question.request_id, 3, 4, [worker], num_output_tokens=77, moves=MOVES, **numbers))
    response = await asked
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    return response.json()


async def test_the_view_says_what_scheduler_roster_and_supervisor_know(tmp_path: Path) -> None:
    async with http(runtime_dir=str(tmp_path)) as h, supervised(tmp_path):
        view = await look(h)
        assert (view["model"], view["reason"]) == ("tiny", "")
        assert (view["counts"]["running"], view["counts"]["waiting"], view["counts"]["output_tokens"]) == (3, 4, 77)
        assert (view["counts"]["stored_blocks"], view["counts"]["fetched_tokens"]) == (8, 9)
        assert view["workers"] == [{"instance": "worker-1", "running": 2, "blocks": 100, "free_blocks": 50,
                                    "cached_blocks": 20, "steps": 9}]  # fmt: skip
        live = {one["service"]: len(one["instances"]) for one in view["services"]}
        assert live["scheduler"] == 1 and min(live["worker"], live["tokenizer"]) >= 1 and live["draft"] == 0
        assert [(one["service"], one["state"]) for one in view["supervisor"]["processes"]] == [
            ("worker", "ready"), ("scheduler", "ready")]  # fmt: skip
        assert view["refusal"] == "" and view["gateway"] == {"open_streams": 0, "paused_streams": 0}


async def test_an_order_reaches_the_supervisor_and_is_answered_at_once(tmp_path: Path) -> None:
    async with http(runtime_dir=str(tmp_path)) as h, supervised(tmp_path) as supervisor:
        response = await h.post("/deployment/scale", {"replicas": {"worker": 3}})
        assert (response.status_code, response.json()) == (202, {"accepted": "scale worker=3"})
        assert (await h.post("/deployment/restart", {"services": ["scheduler", "scheduler"]})).status_code == 202
        async with asyncio.timeout(10):
            while len(supervisor.cast("worker")) != 3 or supervisor.children[1].num_lives != 2:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("restart", {"services": ["prompter"]}, "services", "there is no service 'prompter'"),
        ("restart", {"services": []}, "services", "is empty"),
        ("restart", {}, "services", "services"),
        ("scale", {"replicas": {"worker": 0}}, "replicas", "at least 1"),
        ("scale", {"replicas": {"scheduler": 2}}, "replicas", "at most 1"),
        ("scale", {"replicas": {"worker": 65}}, "replicas", "more than 64"),
        ("scale", {"replicas": {}}, "replicas", "is empty"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_field(
    path: str, body: Any, field: str, words: str, tmp_path: Path
) -> None:
    async with http(runtime_dir=str(tmp_path)) as h, supervised(tmp_path) as supervisor:
        status, error = await h.refusal(f"/deployment/{path}", body)
        assert (status, error["param"]) == (400, field) and words in error["message"]
        assert len(supervisor.children) == 2


async def test_orders_are_for_operators_alone(tmp_path: Path) -> None:
    async with http(runtime_dir=str(tmp_path), api_keys=KEYS) as h, supervised(tmp_path) as supervisor:
        assert (await h.client.get("/deployment")).status_code == 401
        assert "operator" in (await look(h, **AS_ACME))["refusal"]
        assert (await look(h, **AS_OPERATOR))["refusal"] == ""
        for path, body in (("restart", {"services": ["worker"]}), ("scale", {"replicas": {"worker": 2}})):
            assert (await h.post(f"/deployment/{path}", body)).status_code == 401
            assert (await h.refusal(f"/deployment/{path}", body, **AS_ACME))[0] == 403
        assert len(supervisor.children) == 2 and supervisor.children[0].num_lives == 1
        assert (await h.post("/deployment/scale", {"replicas": {"worker": 2}}, **AS_OPERATOR)).status_code == 202


async def test_without_a_supervisor_orders_are_refused_in_words_and_the_view_says_so(tmp_path: Path) -> None:
    async with http(runtime_dir=str(tmp_path)) as h:
        status, error = await h.refusal("/deployment/restart", {"services": ["worker"]})
        assert status == 404 and "docker compose restart" in error["message"]
        view = await look(h)
        assert view["supervisor"] is None and "docker compose" in view["refusal"]


async def test_a_supervisor_that_hangs_up_or_talks_nonsense_is_no_supervisor(tmp_path: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with http(runtime_dir=str(tmp_path)) as h:
        server = await asyncio.start_unix_server(hang_up, str(desk_path(tmp_path)))
        assert (await look(h))["supervisor"] is None
        assert (await h.refusal("/deployment/restart", {"services": ["worker"]}))[0] == 503
        server.close()


async def test_while_no_scheduler_answers_the_gateway_tells_of_itself() -> None:
    async with http() as h:
        view = (await h.client.get("/deployment")).json()
        assert view["counts"] is None and view["workers"] == []
