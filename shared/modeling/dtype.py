"""Which device and number format a deployment computes in."""

from __future__ import annotations

import torch

from shared.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU where torch sees one.  Raises ConfigError where a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU; use device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's format on a GPU, and always float32 on a CPU.

    On a CPU only float32 gives every token bit for bit whatever its batch, and most processors compute it faster
    than an emulated bfloat16; whoever wants bfloat16 there asks for it by name.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return DTYPES.get(checkpoint, torch.bfloat16)
