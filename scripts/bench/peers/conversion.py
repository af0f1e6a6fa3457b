"""Checkpoints in llama.cpp's own format, made by its converter where they are missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from scripts.bench.peers.catalog import PeerEngine

SUFFIX = ".gguf"
PARTIAL = ".partial"


class ConversionFailed(Exception):
    """The converter does not take a model; its last words."""


def convert_missing(peers: Path, engine: PeerEngine) -> Path | None:
    """Make the file that llama.cpp reads for this engine; None where it is there or is not this engine's affair.

    Raises ConversionFailed.  An absent converter is nothing to raise for: then the file stays missing.
    """
    target = Path(engine.options.get("model", ""))
    python, converter = peers / "v-torch" / "bin" / "python", peers / "llama.cpp" / "convert_hf_to_gguf.py"
    if target.suffix != SUFFIX or target.exists() or not (python.exists() and converter.exists()):
        return None
    kind = target.stem.rpartition("-")[2]  # bf16, f16, q8_0
    partial = target.with_name(target.name + PARTIAL)
    command = [str(python), str(converter), str(target.parent), "--outtype", kind, "--outfile", str(partial)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, cwd=converter.parent)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConversionFailed(f"{engine.name}: no {target.name}: {said[-1] if said else done.returncode}")
    partial.rename(target)
    return target
