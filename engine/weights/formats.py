"""Which device a deployment computes on, and in which numbers it computes and holds what it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ops.linears.codes import INT4
from shared.config import EngineSettings, MemorySettings
from shared.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


QUANTISED = {"int8": torch.int8, "int4": INT4, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Formats:
    compute: torch.dtype  # of the arithmetic; bfloat16 on a CPU: products of bfloat16, summed in float32
    weights: torch.dtype  # of the matrices, as they are held: bfloat16 loses nothing of a checkpoint that is in it
    kv: torch.dtype  # of the KV pool
    head: torch.dtype | None = None  # of the head, where it is not that of the other matrices
    group: int = 0  # input features that share a scale of int4
    keeps_codes: bool = False  # the checkpoint's integer codes, which meet activations in 8 bits

    @property
    def quantised(self) -> bool:
        return self.weights in QUANTISED.values()

    @property
    def held_head(self) -> torch.dtype:
        return self.head or self.weights

    @property
    def quantised_head(self) -> bool:
        return self.held_head == torch.int8

    @property
    def rounds(self) -> bool:
        """Whether a CPU rounds the inputs of linears to bfloat16; in int8 they are rounded otherwise."""
        return self.compute == torch.bfloat16 and not self.quantised_head

    @property
    def rounds_attention(self) -> bool:
        """Whether a CPU with tiles rounds queries and probabilities to bfloat16, which keys and values are in."""
        return self.compute == self.kv == torch.bfloat16

    @property
    def quantization(self) -> str:
        """All of it that a bit of the results can depend on."""
        if not self.quantised:
            return "as stored" if self.keeps_codes else "none"
        groups = f", groups of {self.group}" if self.group else ""
        head = f", head {name_of(self.held_head)}" if self.held_head != torch.int8 else ""
        stored = ", codes as stored" if self.keeps_codes else ""
        return f"{name_of(self.weights)}{groups}{head}{stored}"

    def __str__(self) -> str:
        names = (name_of(dtype) for dtype in (self.compute, self.weights, self.kv))
        plain = "{}, weights {}, KV cache {}".format(*names)
        groups = f" in groups of {self.group}" if self.group else ""
        head = f", head {name_of(self.head)}" if self.head else ""
        stored = " beside the checkpoint's codes" if self.keeps_codes else ""
        return plain.replace(", KV", f"{groups}{head}{stored}, KV")


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU where torch sees one.  Raises ConfigError where a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU; use device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_formats(
    engine: EngineSettings,
    memory: MemorySettings,
    stored: torch.dtype,  # of the checkpoint's matrices
    device: torch.device,
    *,
    fast_bfloat16: bool = False,  # the processor multiplies bfloat16 faster than float32
    quantised: bool = False,  # the checkpoint; matrices made from codes and scales may be rounded by 16 bits
    codes: bool = False,  # it has integer codes that kernels multiply as they are
    native: bool = False,  # fast ones
) -> Formats:
    """`auto` computes as the checkpoint is stored on a GPU; on a CPU in float32, or in bfloat16 where that is faster
    and the checkpoint is in it.  Raises ConfigError for what a device does not hold.

    Dequantised matrices are rounded as the rest of the checkpoint is stored; float32, asked for by name, keeps them.
    Integer codes stay beside int4, and where nothing is asked for but native kernels are there, which then hold other
    matrices of float16 in bfloat16.
    """
    dtype, quantization = engine.dtype, engine.quantization
    exact = DTYPES.get(dtype) == torch.float32
    keeps = codes and quantization == "int4"
    if quantization == "auto":
        keeps = codes and native and not exact
        stored = torch.bfloat16 if keeps and stored == torch.float16 else stored
        quantization = "none"
    if memory.kv_cache_dtype == "fp8_e5m2" and device.type != "cpu":
        raise ConfigError("kv_cache_dtype is 'fp8_e5m2', which is for CPUs; on a GPU use fp8_e4m3")
    if device.type != "cpu":
        compute = stored if dtype == "auto" else DTYPES[dtype]
        weights, kv = compute, compute
    else:
        compute = DTYPES.get(dtype) or (stored if fast_bfloat16 and stored == torch.bfloat16 else torch.float32)
        weights = torch.float32 if quantised and exact else _held(compute, stored)
        kv = weights if quantization == "none" else torch.bfloat16
    kv = kv if memory.kv_cache_dtype == "auto" else DTYPES[memory.kv_cache_dtype]
    if quantization == "none":
        return Formats(compute, weights, kv, keeps_codes=keeps)
    narrow, head = QUANTISED[quantization], torch.int8 if engine.quantization_head == "int8" else weights
    group = engine.quantization_group if narrow == INT4 else 0
    return Formats(compute, narrow, kv, None if head == narrow else head, group, keeps)


def _held(compute: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """How a CPU holds weights: never wider than they came, and in a format that its kernels read."""
    if compute == torch.float16:
        return compute
    return torch.bfloat16 if torch.bfloat16 in (compute, stored) else torch.float32


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
