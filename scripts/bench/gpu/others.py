"""The same shape and load outside our runner: through our own gRPC, and in vLLM.

vLLM runs in a process of its own, which gives the card back when it ends:

    python -m scripts.bench.gpu.others MODEL RESULTS
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.bench.gpu.steps import CHUNK

STREAMS, PROMPTS, INPUT, OUTPUT = 256, 1024, 128, 128  # at once, in all, and tokens of each


def load_options(num_prompts: int, num_input: int, num_output: int) -> list[str]:
    """Of `pageant bench`: random prompts, and outputs of one length."""
    return [
        "--dataset-name", "random", "--random-input-len", str(num_input), "--random-output-len", str(num_output),
        "--ignore-eos", "--num-prompts", str(num_prompts), "--num-warmups", "0",
    ]  # fmt: skip


def served_command(directory: Path, results: Path) -> list[str]:
    """A private deployment behind gRPC, with as many streams as it has rows."""
    return [
        sys.executable, "-m", "services.cli", "bench", "offline", "--model", str(directory), "--load-format", "dummy",
        "--device", "cuda", "--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", str(CHUNK),
        *load_options(PROMPTS, INPUT, OUTPUT), "--max-concurrency", str(STREAMS),
        "--save-result", "--result-dir", str(results.parent), "--result-filename", results.name,
    ]  # fmt: skip


def served_throughput(directory: Path) -> float | None:
    """Output tokens per second through scheduler, sockets and gRPC; None where gRPC is not installed."""
    if find_spec("grpc") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        subprocess.run(served_command(directory, results), check=True, timeout=500)
        return float(json.loads(results.read_text(encoding="utf-8"))["output_throughput"])


def vllm_throughput(directory: Path) -> float | None:
    """Output tokens per second of the same load, given to vLLM at once; None where it is not installed."""
    if find_spec("vllm") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "scripts.bench.gpu.others", str(directory), str(results)]
        subprocess.run(command, check=True, timeout=900)
        return float(json.loads(results.read_text(encoding="utf-8"))["output_throughput"])


def run_vllm(directory: Path, vocab_size: int) -> float:
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        str(directory), load_format="dummy", dtype="bfloat16", max_model_len=2 * (INPUT + OUTPUT),
        max_num_seqs=STREAMS, max_num_batched_tokens=CHUNK, skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    rng = random.Random(1)
    prompts = [{"prompt_token_ids": rng.choices(range(vocab_size), k=INPUT)} for _ in range(PROMPTS)]
    params = vllm.SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    engine.generate(prompts[:8], params, use_tqdm=False)
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return sum(len(one.outputs[0].token_ids) for one in outputs) / (time.perf_counter() - begin)


def main() -> None:
    directory, results = map(Path, sys.argv[1:])
    vocab_size = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    figures = {"output_throughput": run_vllm(directory, vocab_size)}
    results.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
