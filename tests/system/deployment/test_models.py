"""Two models behind one gateway: each answers as itself, one makes room for the other, and no stream is lost by it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from tests.system.harness import MODEL, ROOT, Troupe, ask, streaming, troupe

SMALL = ROOT / "models" / "pageant-stories-draft"
FIRST = MODEL.name
PROMPT = "Tom had a red ball and a"


def table(directory: Path) -> str:
    """A configuration in which the small model sleeps until it is asked for."""
    file = directory / "pageant.toml"
    lines = ("[models.small]", f'model = "{SMALL}"', 'aliases = ["tiny"]', "asleep = true", "max_num_seqs = 8")
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def model(directory: Path, *words: str) -> tuple[int, list[str]]:
    """`pageant model ...`: its status, and the lines that it printed."""
    command = [sys.executable, "-m", "services.cli", "model", *words, "--runtime-dir", str(directory / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def post(running: Troupe, model: str, **more: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, **more}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{running.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def listed(running: Troupe) -> list[str]:
    with urllib.request.urlopen(f"{running.url}/v1/models", timeout=10) as answer:
        return [model["id"] for model in json.loads(answer.read())["data"]]


def for_model(name: str, **sampling: Any) -> Any:
    request = ask(PROMPT, **sampling)
    request.model = name
    return request


async def interrupted(running: Troupe, requests: list[Any], between: Callable[[], Any]) -> tuple[list[Any], Any]:
    """All requests at once, and `between` in a thread once all stream; their answers, and what it returned."""
    async with running.channel() as channel:
        tasks = await streaming(channel, requests)
        found = await asyncio.to_thread(between)
        return [[answer.token_ids for answer in answers] for answers in await asyncio.gather(*tasks)], found


def test_swap(tmp_path: Path) -> None:  # a short name, since sockets lie in the test's folder
    """32 streams of one model: a request for the other one wakes that, in its place; then it comes back."""
    options = ("--heartbeat-interval", "0.1", "--num-threads", "1", "--max-awake-models", "1", "--model-turn", "1")
    with troupe(tmp_path, "--config", table(tmp_path), *options) as running:
        assert listed(running) == [FIRST, "small", "tiny"]
        with grpc.insecure_channel(running.address) as channel:
            names = inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=10)
        assert [model.name for model in names.models] == [FIRST, "small"]
        (before,) = running.pids("worker")
        requests = [for_model(FIRST, max_tokens=200, temperature=0.8, seed=n, ignore_eos=True) for n in range(32)]
        undisturbed = [[answer.token_ids for answer in answers] for answers in running.generate(requests)]

        def woken_and_swapped() -> tuple[Any, tuple[int, list[str]]]:
            small = post(running, "tiny")
            assert before not in running.pids("worker") and len(running.pids("worker")) == 1, "memory was given back"
            return small, model(tmp_path, "swap", FIRST)

        disturbed, (small, said) = asyncio.run(interrupted(running, requests, woken_and_swapped))
        assert disturbed == undisturbed
        assert small["model"] == "small" and said[0] == 0 and said[1][-1].startswith(f"model {FIRST} is in memory")
        text = post(running, FIRST)["choices"][0]["text"]
        assert text and text != small["choices"][0]["text"]
        finished = [line for line in running.logs() if line["event"] == "request_finished"]
        waited = [line["phases"].get("waking", 0) for line in finished]
        assert sum(one > 100 for one in waited) == 33, "the one that woke its model, and all that were interrupted"

        assert model(tmp_path, "swap", "none") == (1, [f"there is no model 'none'; there are: {FIRST}, small"])
        taken = "the name 'tiny' of model 'x' is taken by model 'small'"
        assert model(tmp_path, "add", "x", str(SMALL), "--alias", "tiny") == (1, [taken])
        status, said = model(tmp_path, "add", "x", "models/none")
        assert status == 1 and said == ["Error: model directory 'models/none' does not exist"]
        status, _ = model(tmp_path, "add", "org/new", str(SMALL), "--asleep", "--set", "max_num_seqs=2")
        assert status == 0 and listed(running)[-1] == "org/new"
        rows = [row.split()[:2] for row in model(tmp_path, "list")[1]]
        assert rows[1:] == [[FIRST, "awake"], ["small", "asleep"], ["org/new", "asleep"]]
        assert model(tmp_path, "remove", "org/new")[0] == 0
        assert listed(running) == [FIRST, "small", "tiny"] and len(running.pids("scheduler")) == 2
