"""A batch while its deployment is killed, piece by piece and all at once: each line is in the output once.

scripts/prove_batches [--lines 10000] [--gap 4] [--seed 1] [--check]

All services are real processes with the bundled model, two gateways and two workers.  Every `--gap` seconds, as long as
the batch goes on between two kills, one process gets SIGKILL, services in turn; every seventh time all of them and
their supervisor get it together, and another deployment goes on in the same folder.  Some lines are refused, and belong
to the error file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from scripts.bench.common.deployment import ServedDeployment, lasting_port
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.tokens import MODEL
from scripts.bench.common.turns import say

EVERYTHING = "everything"
TURNS = ("gateway", EVERYTHING, "worker", "scheduler", "tokenizer", "detokenizer", "gateway")  # what is killed
ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
READY_SECONDS = 120.0
PATIENCE = 60.0  # seconds in which a request of the client must have succeeded
REFUSED = 50  # one line in so many cannot be served


@dataclass(frozen=True)
class BatchOrder:
    """How long a batch, and how many seconds between two kills."""

    num_lines: int
    gap: float
    parts: int = 24  # one of them must be done between two kills
    max_tokens: int = 16  # of a line; others have less
    concurrency: int = 16  # lines that run at a time
    seed: int = 1
    seconds: float = 900.0  # in which it must have ended


@dataclass
class BatchOutcome:
    """What came of it."""

    status: str = ""
    num_lines: int = 0
    num_missing: int = 0
    num_double: int = 0
    num_strange: int = 0  # answers in the wrong file, or of another line
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def content(order: BatchOrder) -> bytes:
    """Lines with prompts of their own; one in fifty asks for what is refused."""
    lines = []
    for index in range(order.num_lines):
        prompt, num_tokens = f"Once upon a time number {index}", 1 + index % order.max_tokens
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
        if index % REFUSED == REFUSED - 1:
            body["temperature"] = -1
        lines.append(json.dumps({"custom_id": f"line-{index}", "method": "POST", "url": ENDPOINT, "body": body}))
    return "\n".join(lines).encode()


def perform(directory: Path, order: BatchOrder) -> BatchOutcome:
    """On processes that are started for this, and ended."""
    outcome, http_port = BatchOutcome(num_lines=order.num_lines), lasting_port()
    settings = {
        "model": str(MODEL), "port": lasting_port(), "http_port": http_port, "num_threads": 1,
        "files_dir": str(directory / "files"), "batch_concurrency": order.concurrency,
    }  # fmt: skip
    with (
        ServedDeployment(settings, "--workers", "2", "--gateways", "2") as deployment,
        httpx2.Client(base_url=f"http://127.0.0.1:{http_port}/v1", timeout=10, trust_env=False) as client,
    ):
        _perform(client, deployment, order, outcome)
    return outcome


def _perform(client: httpx2.Client, deployment: ServedDeployment, order: BatchOrder, outcome: BatchOutcome) -> None:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", content(order))}}
    file_id = _insist(lambda: client.post("/files", **form), READY_SECONDS).json()["id"]
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    batch = _insist(lambda: client.post("/batches", json=body)).json()
    path, began = f"/batches/{batch['id']}", time.monotonic()
    next_kill, next_done, rng = began + order.gap, 0, random.Random(order.seed)
    while batch["status"] not in ENDED and time.monotonic() < began + order.seconds:
        done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
        if time.monotonic() >= next_kill and done >= next_done:
            killed = _kill(deployment, TURNS[outcome.kills.total() % len(TURNS)], rng)
            outcome.kills[killed] += 1
            next_kill = time.monotonic() + order.gap
            next_done = done + order.num_lines // order.parts
            say(f"{done} of {order.num_lines}; {killed} killed")
        time.sleep(0.1)
        batch = _insist(lambda: client.get(path), READY_SECONDS).json()
    outcome.seconds, outcome.status = time.monotonic() - began, batch["status"]
    _compare(client, batch, order, outcome)


def _kill(deployment: ServedDeployment, what: str, rng: random.Random) -> str:
    """One process of a service, or everything; a service without a live process is starting already."""
    if what == EVERYTHING:
        deployment.begin_anew()
    elif pids := deployment.pids(what):
        os.kill(rng.choice(pids), signal.SIGKILL)
    return what


def _compare(client: httpx2.Client, batch: Any, order: BatchOrder, outcome: BatchOutcome) -> None:
    seen = Counter[str]()
    for name, is_error in (("output_file_id", False), ("error_file_id", True)):
        if file_id := batch.get(name):
            text = _insist(lambda file_id=file_id: client.get(f"/files/{file_id}/content")).text  # type: ignore[misc]
            for line in map(json.loads, text.splitlines()):
                index = int(line["custom_id"].removeprefix("line-"))
                seen[line["custom_id"]] += 1
                answer = line["response"]
                tokens = 0 if is_error else answer["body"]["usage"]["completion_tokens"]
                is_right = answer["status_code"] == 400 if is_error else tokens == 1 + index % order.max_tokens
                outcome.num_strange += not is_right or is_error != (index % REFUSED == REFUSED - 1)
    outcome.num_missing = outcome.num_lines - len(seen)
    outcome.num_double = sum(count - 1 for count in seen.values())


def _insist(ask: Callable[[], httpx2.Response], seconds: float = PATIENCE) -> httpx2.Response:
    """Ask until there is an answer: gateways are killed under their clients."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            response = ask()
            if response.status_code == 200:
                return response
            reason = response.text
        except httpx2.HTTPError as error:
            reason = repr(error)
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer in {seconds:g} s: {reason}")
        time.sleep(0.1)


def lines(outcome: BatchOutcome) -> list[Result]:
    kills = ", ".join(f"{count} {service}" for service, count in outcome.kills.items())
    return [
        Result(f"lines of a batch that is {outcome.status}", outcome.num_lines, "lines", note=f"killed: {kills}"),
        Result("missing in the output", outcome.num_missing, "lines", at_most=0),
        Result("double in the output", outcome.num_double, "lines", at_most=0),
        Result("with another line's answer, or in the wrong file", outcome.num_strange, "lines", at_most=0),
        Result("time", outcome.seconds, "s"),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--gap", type=float, default=4.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = perform(Path(directory), BatchOrder(arguments.lines, arguments.gap, seed=arguments.seed))
    return finish(lines(outcome), check=arguments.check, title="A batch under kills")
