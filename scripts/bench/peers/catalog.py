"""Which engines there are: how each is started, and whether it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common.proc import has_bf16

ENGINES = Path(__file__).with_name("engines")
NUM_SEQS = 64
NUM_BATCHED_TOKENS = 2048
MODEL_LEN = 2560  # tokens
KV_CACHE_GIB = 3
FULL, INT8, INT4 = "none", "int8", "int4"  # quantizations
RUNNER, CHAIN = "pageant-runner", "pageant"
RUNNER_INT8 = "pageant-runner-int8"  # beside int4, which is to lose nothing to it in batches
RUNNER_OTHER, CHAIN_OTHER = "pageant-runner-other", "pageant-other"  # of another checkout: two versions in turns
OTHERS = {RUNNER: RUNNER_OTHER, CHAIN: CHAIN_OTHER}
OURS = (RUNNER, CHAIN, RUNNER_INT8, *OTHERS.values())
ROOT = Path(__file__).resolve().parents[3]


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
    root: Path = ROOT  # the checkout whose code it is, where it is ours

    @property
    def is_ours(self) -> bool:
        return self.name in OURS

    @property
    def missing(self) -> list[Path]:
        """What is not installed."""
        return [path for path in (self.python, *self.needs) if not path.exists()]


def engines(peers: Path, model: str, quantization: str, against: Path | None = None) -> list[PeerEngine]:
    """All engines that know this quantization; ours first, then peers as they are laid out in their folder.

    `against`: another checkout, which takes part too.
    """
    everything = [*ours(peers, model, quantization, against), *_peers(peers, peers / "models" / model)]
    return [engine for engine in everything if engine.quantization == quantization]


def ours(peers: Path, model: str, quantization: str, against: Path | None = None) -> list[PeerEngine]:
    settings: dict[str, Any] = {
        "model": str(peers / "models" / model), "max_num_seqs": NUM_SEQS, "max_model_len": MODEL_LEN,
        "max_num_batched_tokens": NUM_BATCHED_TOKENS, "kv_cache_memory": KV_CACHE_GIB << 30,
    }  # fmt: skip
    if quantization != FULL:
        settings["quantization"] = quantization
    here, options = Path(sys.executable), {"settings": settings}
    files = {RUNNER: "pageant_runner.py", CHAIN: "pageant_chain.py"}
    found = [PeerEngine(name, quantization, ENGINES / file, here, options) for name, file in files.items()]
    if against is not None:
        for own, other in OTHERS.items():
            file = against / ENGINES.relative_to(ROOT) / files[own]
            found.append(PeerEngine(other, quantization, file, here, options, needs=(file,), root=against))
    if quantization == INT4:
        wider = {"settings": settings | {"quantization": INT8}}
        found.append(PeerEngine(RUNNER_INT8, quantization, ENGINES / files[RUNNER], here, wider))
    return found


def _peers(peers: Path, weights: Path) -> Iterator[PeerEngine]:
    limits = {
        "num_threads": len(os.sched_getaffinity(0)), "max_num_seqs": NUM_SEQS, "max_model_len": MODEL_LEN,
        "kv_cache_gib": KV_CACHE_GIB,
    }  # fmt: skip

    def engine(name: str, quantization: str, file: str, python: Path, model: Path, **more: Any) -> PeerEngine:
        """`more`: fields of a PeerEngine, and options of its file."""
        fields = {key: more.pop(key) for key in ("needs", "by_default", "avoids") if key in more}
        options = limits | {"model": str(model)} | more
        return PeerEngine(name, quantization, ENGINES / f"{file}.py", python, options, **fields)

    python = {name: peers / f"v-{name}" / "bin" / "python" for name in ("ov", "vllm", "misc")}
    for kind, quantization in (("fp16", FULL), ("int8", INT8), ("int4", INT4)):
        exported = weights.with_name(f"{weights.name}-ov-{kind}")
        yield engine(
            f"openvino-{kind}", quantization, "openvino", python["ov"], exported,
            needs=(exported,), max_num_batched_tokens=512,
        )  # fmt: skip
    for kind, dtype in (("bf16", "bfloat16"), ("f32", "float32")):
        by_default = (kind == "bf16") == has_bf16()  # without the instruction float32 is the faster in batches
        yield engine(
            f"vllm-{kind}", FULL, "vllm", python["vllm"], weights,
            by_default=by_default, dtype=dtype, max_num_batched_tokens=0,
        )  # fmt: skip
    exported = weights.with_name(f"{weights.name}-ort-int4")
    yield engine(
        "onnxruntime-int4", INT4, "onnxruntime", python["misc"], exported,
        needs=(exported,), avoids=frozenset({"b2"}),
    )  # fmt: skip
    server = peers / "llama.cpp" / "build" / "bin" / "llama-server"
    for kind, quantization in (("bf16", FULL), ("f16", FULL), ("q8_0", INT8), ("q4_0", INT4), ("q4_k_m", INT4)):
        converted = weights / f"{weights.name}-{kind}.gguf"
        yield engine(
            f"llamacpp-{kind}", quantization, "llamacpp", Path(sys.executable), converted,
            needs=(server, converted), by_default=quantization != FULL or (kind == "bf16") == has_bf16(),
            avoids=frozenset({"b2"}), server=str(server),
        )  # fmt: skip
