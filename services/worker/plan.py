"""What a worker with these settings would run on, as one JSON object: `python -m services.worker.plan`.

Loads no weights.  On a GPU the sizes of the weight files stand for those of the weights in memory, and a step's
activations are left out, so the plan is a little larger there than the worker's own.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.description.reading import read_config
from engine.loading.backend import Backend, choose_backend, usable_cores
from engine.loading.fingerprint import make_fingerprint, remembered_digest
from engine.loading.memory import block_bytes, cpu_budget, gpu_budget, plan_memory
from engine.weights.digest import user_memory
from engine.weights.formats import resolve_device
from engine.weights.source import WeightSource, has_codes, open_weights
from shared.config import EngineSettings, MemorySettings, Settings, load_settings
from shared.errors import PageantError
from shared.processes.logging import setup_logging
from shared.text.model_source import resolve_model_dir


def describe(settings: Settings) -> dict[str, Any]:
    """Kernels, formats, memory.  Raises ModelError or ConfigError as the worker would."""
    directory = resolve_model_dir(settings.engine.model)
    spec = read_config(directory)
    source = open_weights(settings.engine.load_format, directory, spec)
    codes = has_codes(spec, source)
    backend = choose_backend(settings, spec, source.dtype, quantised=source.quantisation is not None, codes=codes)
    weights = remembered_digest(source, user_memory())
    fingerprint = make_fingerprint(settings, directory, spec, source.quantisation, backend, weights)
    max_model_len = settings.scheduling.max_model_len or spec.max_position_embeddings
    layer_bytes = backend.layout(spec).layer_bytes(settings.memory.block_size)
    first, sliding = block_bytes(spec, layer_bytes, spec.windows(max_model_len))
    plan = plan_memory(
        settings.memory,
        settings.scheduling,
        bytes_per_block=first,
        budget=_budget(settings.memory, _weight_bytes(directory, source, backend), backend.device),
        max_model_len=max_model_len,
        sliding=sliding,
        bytes_per_state=backend.state_bytes(spec),
    )
    return {
        "kernels": backend.name,
        "no_native": backend.no_native,
        "num_threads": backend.num_threads,
        "formats": str(backend.formats),
        "num_blocks": plan.num_blocks,
        "block_size": plan.block_size,
        "num_tokens": plan.num_tokens,
        "max_model_len": plan.max_model_len,
        "system_fingerprint": fingerprint.name if weights else "",
        "fingerprint": msgspec.structs.asdict(fingerprint),
        "windows": plan.windows,
        "max_num_seqs": plan.states.num_rows,
        "num_snapshots": plan.states.num_snapshots,
        "state_bytes": plan.states.num_bytes,
        "bytes": plan.num_bytes,
    }


def describe_device(settings: EngineSettings) -> dict[str, Any]:
    device = resolve_device(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{usable_cores()} cores"
    return {"torch": torch.__version__, "device": device.type, "device_name": name}


def _weight_bytes(directory: Path, source: WeightSource, backend: Backend) -> int:
    """About what weights take in memory: as much as their files, but where they are dequantised."""
    if source.quantisation is None or backend.formats.keeps_codes:
        return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return sum(math.prod(shape) for shape in source.tensors.shapes().values()) * backend.formats.weights.itemsize


def _budget(settings: MemorySettings, weights: int, device: torch.device) -> int:
    if device.type == "cpu":
        return cpu_budget(settings)
    total = torch.cuda.get_device_properties(device).total_memory
    return gpu_budget(settings, total=total, weights=weights, peak_activation=0)


def main() -> int:
    """Print the plan; `error` names what is wrong, if anything is."""
    setup_logging("worker", "plan")  # to standard error
    found: dict[str, Any] = {"torch": torch.__version__}
    try:
        settings = load_settings()
        found |= describe_device(settings.engine)
        found |= describe(settings)
    except PageantError as error:
        found["error"] = str(error)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
