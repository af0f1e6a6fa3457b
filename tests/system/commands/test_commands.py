"""The commands a newcomer types, and a model directory that means harm."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.pageant.v1 import inference_pb2
from tests.system.harness import MODEL, ROOT, ask, collect, troupe


def pageant(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_quickstart_streams_counts_and_leaves_nothing_behind() -> None:
    done = pageant("quickstart", "Once upon a time", "-m", str(MODEL), "--max-tokens", "12", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "there was a" in done.stdout
    for word in ("prompt tokens: 5", "completion tokens: 12", "time to first token", "time per output token"):
        assert word in done.stderr
    assert "%|" not in done.stderr, "no progress bar where there is no terminal"


def test_doctor_says_what_was_found() -> None:
    done = pageant("doctor", "-m", str(MODEL), "--num-blocks", "128", "--port", "0")
    assert done.returncode == 0, done.stdout
    assert "128 blocks of 16 tokens hold 2048 tokens, 2.0 requests of max_model_len=1024" in done.stdout


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 100), "model.safetensors"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer"),
        (lambda d: rewrite(d / "config.json", architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (lambda d: rewrite(d / "config.json", num_hidden_layers=6), "layers.5"),
    ],
    ids=["no config", "corrupt weights", "no tokenizer", "unknown architecture", "missing tensor"],
)
def test_a_model_that_cannot_be_served_is_named(tmp_path: Path, damage: Any, words: str) -> None:
    directory = Path(shutil.copytree(MODEL, tmp_path / "model"))
    damage(directory)
    options = ["--runtime-dir", str(tmp_path / "run"), "--port", "0", "--log-dir", str(tmp_path / "logs")]
    done = pageant("serve", "-m", str(directory), *options)
    assert done.returncode == 78
    assert words in done.stderr


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_chat_template_that_loops_for_ever_costs_one_status(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(MODEL, tmp_path / "model"))
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    rewrite(directory / "tokenizer_config.json", chat_template=loop)
    chat = inference_pb2.GenerateRequest()
    chat.chat.messages.add(role="user", content="Hello")

    async def both() -> tuple[Any, Any]:
        async with started.channel() as channel:
            healthy = asyncio.create_task(collect(channel, ask("One day", max_tokens=40, seed=1)))
            (error,) = await asyncio.gather(collect(channel, chat), return_exceptions=True)
            return error, await healthy

    with troupe(tmp_path, "-m", str(directory), "--num-threads", "1") as started:
        error, (answer,) = asyncio.run(both())
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat" in (error.details() or "")
    assert answer.completion_tokens > 0
