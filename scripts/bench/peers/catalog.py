"""Which engines there are: how each is started, and whether it is installed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common.proc import has_bf16

ENGINES = Path(__file__).with_name("engines")
NUM_SEQS = 64
NUM_BATCHED_TOKENS = 2048
MODEL_LEN = 2560  # tokens
KV_CACHE_GIB = 3
FULL, INT8 = "none", "int8"  # quantizations
RUNNER, CHAIN = "pageant-runner", "pageant"


@dataclass(frozen=True)
class PeerEngine:
    """One column of the comparison."""

    name: str
    quantization: str
    file: Path
    python: Path
    options: dict[str, Any]
    needs: tuple[Path, ...] = ()  # beside the interpreter
    by_default: bool = True
    avoids: frozenset[str] = frozenset()  # workloads that it needs minutes for and cannot win

    @property
    def is_ours(self) -> bool:
        return self.name in (RUNNER, CHAIN)

    @property
    def missing(self) -> list[Path]:
        """What is not installed."""
        return [path for path in (self.python, *self.needs) if not path.exists()]


def engines(peers: Path, model: str, quantization: str) -> list[PeerEngine]:
    """All engines that know this quantization; ours first, then peers as they are laid out in their folder."""
    everything = [*ours(peers, model, quantization), *_peers(peers, model)]
    return [engine for engine in everything if engine.quantization == quantization]


def ours(peers: Path, model: str, quantization: str) -> list[PeerEngine]:
    settings: dict[str, Any] = {
        "model": str(peers / "models" / model),
        "max_num_seqs": NUM_SEQS,
        "max_num_batched_tokens": NUM_BATCHED_TOKENS,
        "max_model_len": MODEL_LEN,
        "kv_cache_memory": KV_CACHE_GIB << 30,
    }
    if quantization != FULL:
        settings["quantization"] = quantization
    files = {RUNNER: "pageant_runner.py", CHAIN: "pageant_chain.py"}
    here = Path(sys.executable)
    return [
        PeerEngine(name, quantization, ENGINES / file, here, {"settings": settings}) for name, file in files.items()
    ]


def _peers(peers: Path, model: str) -> list[PeerEngine]:
    limits = {
        "num_threads": len(os.sched_getaffinity(0)),
        "max_num_seqs": NUM_SEQS,
        "max_model_len": MODEL_LEN,
        "kv_cache_gib": KV_CACHE_GIB,
    }
    weights = peers / "models" / model
    return [
        *(_openvino(peers, weights, limits, *kind) for kind in (("fp16", FULL), ("int8", INT8))),
        *(_vllm(peers, weights, limits, dtype) for dtype in ("bfloat16", "float32")),
        *(_llamacpp(peers, weights, limits, *kind) for kind in (("bf16", FULL), ("f16", FULL), ("q8_0", INT8))),
        _transformers(peers, weights, limits),
    ]


def _openvino(peers: Path, weights: Path, limits: dict[str, Any], kind: str, quantization: str) -> PeerEngine:
    exported = weights.with_name(f"{weights.name}-ov-{kind}")
    options = limits | {"model": str(exported), "max_num_batched_tokens": 512}
    python = peers / "v-ov" / "bin" / "python"
    return PeerEngine(f"openvino-{kind}", quantization, ENGINES / "openvino.py", python, options, (exported,))


def _vllm(peers: Path, weights: Path, limits: dict[str, Any], dtype: str) -> PeerEngine:
    options = limits | {"model": str(weights), "dtype": dtype, "max_num_batched_tokens": 0}
    name = {"bfloat16": "vllm-bf16", "float32": "vllm-f32"}[dtype]
    python = peers / "v-vllm" / "bin" / "python"
    by_default = (dtype == "bfloat16") == has_bf16()  # without the instruction float32 is the faster in batches
    return PeerEngine(name, FULL, ENGINES / "vllm.py", python, options, by_default=by_default)


def _llamacpp(peers: Path, weights: Path, limits: dict[str, Any], kind: str, quantization: str) -> PeerEngine:
    server = peers / "llama.cpp" / "build" / "bin" / "llama-server"
    converted = weights / f"{weights.name}-{kind}.gguf"
    options = limits | {"model": str(converted), "server": str(server)}
    by_default = quantization == INT8 or (kind == "bf16") == has_bf16()
    return PeerEngine(
        f"llamacpp-{kind}",
        quantization,
        ENGINES / "llamacpp.py",
        Path(sys.executable),
        options,
        (server, converted),
        by_default,
        frozenset({"b2"}),
    )


def _transformers(peers: Path, weights: Path, limits: dict[str, Any]) -> PeerEngine:
    python = peers / "v-torch" / "bin" / "python"
    options = limits | {"model": str(weights), "dtype": "bfloat16"}
    return PeerEngine("transformers", FULL, ENGINES / "transformers.py", python, options, by_default=False)
