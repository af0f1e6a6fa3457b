"""The load generator against real services, over both interfaces; and from a recorded run to a simulated one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.commands.test_commands import pageant
from tests.system.harness import MODEL, Troupe, troupe

NUM_PROMPTS, INPUT, OUTPUT = 10, 40, 8


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with troupe(tmp_path_factory.mktemp("bench")) as served:
        yield served


def serve(directory: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """The printed block and the saved JSON."""
    load = ["--num-prompts", str(NUM_PROMPTS), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    kept = ["--save-detailed", "--result-dir", str(directory), "--result-filename", "r.json"]
    done = pageant("bench", "serve", *load, *kept, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((directory / "r.json").read_text())


@pytest.mark.parametrize("backend", ["pageant-grpc", "openai"])
def test_a_load_over_either_interface(running: Troupe, tmp_path: Path, backend: str) -> None:
    if backend == "openai":
        pytest.importorskip("httpx2", reason="the HTTP client is not installed")
    before = running.load().num_output_tokens
    where = ["--backend", backend, "--address", running.address,
             "--base-url", running.url]  # fmt: skip
    rate = ["--request-rate", "40", "--num-warmups", "0", "--goodput", "e2el:60000", "--max-concurrency", "4"]
    text, result = serve(tmp_path, *where, *rate, "--seed", str(len(backend)))
    assert "Successful requests:                     10" in text and "Request goodput (req/s):" in text
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["input_lens"] == [INPUT] * NUM_PROMPTS and result["output_lens"] == [OUTPUT] * NUM_PROMPTS
    assert result["max_concurrent_requests"] <= 4
    assert running.load().num_output_tokens - before == NUM_PROMPTS * OUTPUT
    for ttft, gaps, latency in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert 0 < ttft <= latency and ttft + sum(gaps) == pytest.approx(latency)


def test_a_recorded_run_makes_a_simulated_one(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    load = ["--num-prompts", "24", "--random-input-len", "40", "--random-output-len", "40"]
    done = pageant("bench", "offline", "-m", str(MODEL), "--num-blocks", "256", "--record-steps", str(steps), *load)
    assert done.returncode == 0, done.stderr
    assert "Successful requests:                     24" in done.stdout
    simulated = pageant("simulate", "--recorded", str(steps), "--num-blocks", "256", "--workers", "1,2",
                        "--max-model-len", "1024", "--request-rate", "20", *load)  # fmt: skip
    assert simulated.returncode == 0, simulated.stderr
    assert "step times fitted to" in simulated.stderr and "48 requests in" in simulated.stdout
