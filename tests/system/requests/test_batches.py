"""Batches at a real troupe: by OpenAI's package, and while processes are killed."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.batches import BatchOrder, perform
from tests.system.harness import Troupe, troupe

NEEDS_OPENAI = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the openai package")
NUM_LINES = 240
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {  # by the name of a user
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 5}),
    "embeddings": ("/v1/embeddings", {"input": "Once"}),
    "responses": ("/v1/responses", {"input": "Once", "max_output_tokens": 16}),
}


def test_no_line_is_lost_or_double_whatever_is_killed(tmp_path: Path) -> None:
    outcome = perform(tmp_path, BatchOrder(NUM_LINES, gap=0.5, parts=8, max_tokens=64, concurrency=2, seconds=200))
    assert outcome.status == "completed"
    assert (outcome.num_missing, outcome.num_double, outcome.num_strange) == (0, 0, 0)
    assert outcome.kills["everything"] >= 1 and outcome.kills["gateway"] >= 1


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    directory = tmp_path_factory.mktemp("batches")
    options = ("--num-threads", "1", "--num-blocks", "512", "--files-dir", str(directory / "files"))
    keys = ",".join(f"{user}:key-of-{user}" for user in ("other", *ENDPOINTS))
    with troupe(directory, *options, environment={"PAGEANT_API_KEYS": keys}) as started:
        yield started


@NEEDS_OPENAI
@pytest.mark.parametrize("user", ENDPOINTS)
def test_openai_s_package_runs_a_batch(running: Troupe, user: str) -> None:
    """A user for each endpoint, who sees what is his own."""
    from openai import NotFoundError, OpenAI

    endpoint, body = ENDPOINTS[user]
    lines = [{"custom_id": f"id-{index}", "method": "POST", "url": endpoint, "body": body} for index in range(8)]
    mine, other = (OpenAI(base_url=f"{running.url}/v1", api_key=f"key-of-{name}") for name in (user, "other"))
    text = "\n".join(map(json.dumps, lines)).encode()
    file = mine.files.create(file=("lines.jsonl", text), purpose="batch")
    assert mine.files.content(file.id).read() == text and mine.files.retrieve(file.id) == file
    batch = mine.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "a test"}
    )
    deadline = time.monotonic() + 60
    while batch.status != "completed" and time.monotonic() < deadline:
        time.sleep(0.1)
        batch = mine.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.metadata == {"for": "a test"}, batch
    assert batch.request_counts is not None and batch.request_counts.completed == len(lines)
    assert batch.output_file_id is not None and not batch.error_file_id
    found = [json.loads(line) for line in mine.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(line["custom_id"] for line in found) == [line["custom_id"] for line in lines]
    assert all(line["response"]["status_code"] == 200 for line in found)
    assert [listed.id for listed in mine.batches.list(limit=1)] == [batch.id]
    assert {listed.id for listed in mine.files.list(order="asc")} == {file.id, batch.output_file_id}
    assert not list(other.files.list()) and not list(other.batches.list())
    with pytest.raises(NotFoundError):
        other.files.content(batch.output_file_id)
    assert mine.files.delete(file.id).deleted
