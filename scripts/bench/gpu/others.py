"""The same shape and load outside our runner: through our own gRPC, and in vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from scripts.bench.gpu.steps import CHUNK

STREAMS, PROMPTS, INPUT, OUTPUT = 256, 1024, 128, 128  # at once, in all, and tokens of each


def load_options(num_prompts: int, num_input: int, num_output: int) -> list[str]:
    """Of `pageant bench`: random prompts, and outputs of one length."""
    return [
        "--dataset-name", "random", "--random-input-len", str(num_input), "--random-output-len", str(num_output),
        "--ignore-eos", "--num-prompts", str(num_prompts), "--num-warmups", "0",
    ]  # fmt: skip


def served_throughput(directory: Path) -> float | None:
    """Output tokens per second through scheduler, sockets and gRPC, with as many streams as the private deployment has
    rows; None where gRPC is not installed."""
    command = [
        "services.cli", "bench", "offline", "--model", str(directory), "--load-format", "dummy", "--device", "cuda",
        "--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", str(CHUNK), "--max-concurrency", str(STREAMS),
        *load_options(PROMPTS, INPUT, OUTPUT), "--save-result",
    ]  # fmt: skip
    found = _results("grpc", command, lambda path: ["--result-dir", str(path.parent), "--result-filename", path.name])
    return None if found is None else found["output_throughput"]


def vllm_throughput(directory: Path) -> float | None:
    """The same of the same load, given to vLLM's own bench at once; None where it is not installed."""
    command = [
        "vllm.entrypoints.cli.main", "bench", "throughput", "--model", str(directory), "--load-format", "dummy",
        "--dtype", "bfloat16", "--max-model-len", str(2 * (INPUT + OUTPUT)), "--max-num-seqs", str(STREAMS),
        "--max-num-batched-tokens", str(CHUNK), "--no-enable-prefix-caching", "--disable-detokenize",
        "--dataset-name", "random", "--input-len", str(INPUT), "--output-len", str(OUTPUT),
        "--num-prompts", str(PROMPTS), "--num-warmups", "8",
    ]  # fmt: skip
    found = _results("vllm", command, lambda path: ["--output-json", str(path)])
    return None if found is None else OUTPUT * found["requests_per_second"]


def _results(package: str, command: list[str], into: Callable[[Path], list[str]]) -> dict[str, float] | None:
    """What a module has written into a file of JSON; None where a package that it needs is not installed."""
    if find_spec(package) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        subprocess.run([sys.executable, "-m", *command, *into(path)], check=True, timeout=900)
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return found
