"""The same shape and load outside our runner: through our own gRPC, offline, and in transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from scripts.bench.gpu.ceilings import seconds
from scripts.bench.gpu.shapes import Shape

STREAMS, INPUT, OUTPUT = 256, 128, 128  # and tokens of each


def troupe_command(directory: Path, results: Path, *, offline: bool) -> list[str]:
    """`pageant bench offline` gives a private troupe everything at once; with a limit it is as many streams."""
    command = [
        sys.executable, "-m", "services.cli", "bench", "offline", "--model", str(directory), "--load-format", "dummy",
        "--device", "cuda", "--max-num-seqs", str(STREAMS), "--dataset-name", "random",
        "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--ignore-eos",
        "--num-prompts", str(4 * STREAMS), "--save-result", "--result-dir", str(results.parent),
        "--result-filename", results.name,
    ]  # fmt: skip
    return command if offline else [*command, "--max-concurrency", str(STREAMS)]


def troupe_throughput(directory: Path, *, offline: bool) -> float:
    """Output tokens per second through scheduler, sockets and gRPC."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        subprocess.run(troupe_command(directory, results, offline=offline), check=True, timeout=400)
        return float(json.loads(results.read_text(encoding="utf-8"))["output_throughput"])


def transformers_decode(shape: Shape, directory: Path, num_seqs: int, context: int) -> float | None:
    """Seconds of a decode step in transformers; None where it is not installed."""
    if find_spec("transformers") is None:
        return None
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(0, shape.vocab_size, (num_seqs, context), device="cuda")
    with torch.inference_mode():
        cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        token = prompt[:, :1]
        return seconds(lambda: model(token, past_key_values=cache, use_cache=True).logits.argmax(-1), rounds=10)
