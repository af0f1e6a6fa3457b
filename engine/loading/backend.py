"""What computes the model: the native kernels, or torch on a CPU or GPU; in which formats, with how many threads."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from engine.description.spec import ModelSpec
from engine.modeling.kv_pool import KVLayout
from engine.modeling.native.decoder import why_unsupported
from engine.modeling.native.layout import NativeLayout, native_layout
from engine.modeling.torch_decoder.assembly import torch_layout
from engine.weights.formats import Formats, resolve_device, resolve_formats
from kernels.cpu.binding.loading import load as load_native
from kernels.cpu.binding.native import Native, NativeUnavailable
from kernels.flash.attention import HeadShape
from kernels.interface import AttentionShape, Kernels, SamplingKernels
from kernels.ops.linears.linear_fp8 import FP8
from kernels.provider import FLASH_LIBRARIES, has_triton, native_sampling, select_kernels, with_flash
from shared.config import EngineSettings, Settings
from shared.errors import ConfigError

LEAST_CAPABILITY = (8, 9)  # of a GPU that multiplies E4M3

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Backend:
    device: torch.device
    formats: Formats
    kernels: Kernels  # torch's
    native: Native | None  # serves the model instead, where it is there
    num_threads: int  # of the kernels on a CPU
    no_native: str  # why a CPU does without native kernels; empty where it has them, or none were asked for

    @property
    def sampling(self) -> SamplingKernels:
        return self.kernels.sampling if self.native is None else native_sampling(self.native)

    @property
    def name(self) -> str:
        return f"torch {self.kernels.name}" if self.native is None else f"native {self.native.target}"

    @property
    def description(self) -> dict[str, object]:
        """For logs."""
        return {
            "device": str(self.device),
            "kernels": self.name,
            "formats": str(self.formats),
            "num_threads": self.num_threads,
        }

    def state_bytes(self, spec: ModelSpec) -> int:
        """Of one sequence's states."""
        return spec.state_bytes(4 if self.native is not None else self.formats.compute.itemsize)

    def layout(self, spec: ModelSpec) -> KVLayout | NativeLayout:
        if self.native is not None:
            return native_layout(spec, self.native, self.formats)
        return torch_layout(spec, self.formats, self.device)


def choose_backend(
    settings: Settings, spec: ModelSpec, stored: torch.dtype, *, quantised: bool = False, codes: bool = False
) -> Backend:
    """For a checkpoint whose matrices are stored in `stored`, where `quantised` some otherwise, where `codes` as some
    that kernels multiply as they are.

    Raises ConfigError where a kernel is not available.

    Sets the number of threads, of torch and of the native kernels, which are the process's.
    """
    device, native, no_native = resolve_device(settings.engine.device), None, ""
    max_model_len = settings.scheduling.max_model_len or spec.max_position_embeddings
    if device.type == "cpu" and settings.engine.kernels != "torch":
        native, no_native = _find_native(settings.engine)
    resolve = partial(
        resolve_formats, settings.engine, settings.memory, stored, device, quantised=quantised, codes=codes
    )
    formats = resolve(native=native is not None, fast_bfloat16=native is not None and native.fast_bfloat16)
    if native is not None and (reason := why_unsupported(spec, native, formats, settings.memory.block_size)):
        native, no_native = None, f"this model is not served: {reason}"
        formats = resolve()
    if no_native and settings.engine.kernels == "native":
        raise ConfigError(f"kernels is 'native', but {no_native}; use kernels=auto or torch")
    if no_native:
        log.warning("native_kernels_unavailable", reason=no_native, instead="torch, several times slower")
    if formats.weights == FP8:
        _check_fp8(device)
    kernels = select_kernels(
        device,
        formats.compute,
        quantised=formats.weights if formats.quantised else None,
        group=formats.group,
        quantised_head=formats.quantised_head,
        batch_invariant=settings.engine.batch_invariant,
        shape=AttentionShape(spec.head_shapes, max_model_len),
        early=settings.engine.programmatic_launch,
    )
    if device.type == "cuda" and not has_triton():
        log.warning("triton_unavailable", reason="triton is not installed", instead="torch, many times slower")
    if settings.engine.attention_backend in FLASH_LIBRARIES:
        kernels = _with_flash(settings.engine, spec, formats, device, kernels)
    return Backend(device, formats, kernels, native, _set_threads(settings.engine, native), no_native)


def _check_fp8(device: torch.device) -> None:
    """Raises ConfigError for a GPU that does not multiply E4M3."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ConfigError("quantization is 'fp8', which needs a GPU of NVIDIA; use int8 or int4")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise ConfigError(
            f"quantization is 'fp8', which needs a GPU of compute capability {least} or more, but this one has "
            f"{major}.{minor}; use int8 or int4"
        )


def _with_flash(
    settings: EngineSettings, spec: ModelSpec, formats: Formats, device: torch.device, kernels: Kernels
) -> Kernels:
    backend = settings.attention_backend
    if device.type == "cpu":
        raise ConfigError(f"attention_backend is {backend!r}, which is for GPUs")
    if formats.kv != formats.compute:
        raise ConfigError(f"attention_backend {backend!r} needs a KV cache of the format of the arithmetic; use triton")
    if any(one.latent for one in spec.attentions):
        raise ConfigError(f"attention_backend {backend!r} does not serve this model's latent attention; use triton")
    shapes = {
        HeadShape(one.num_heads, one.num_kv_heads, one.head_dim, formats.compute, one.scale, one.softcap)
        for one in spec.attentions
    }
    if len(shapes) > 1:
        raise ConfigError(f"attention_backend {backend!r} needs the same heads and scales in all layers; use triton")
    try:
        kernels = with_flash(kernels, backend, shapes.pop(), device)
    except ModuleNotFoundError as error:
        raise ConfigError(f"attention_backend is {backend!r}, but {error}; use auto or triton") from error
    if not kernels.attention_sinks and any(one.sinks for one in spec.attentions):
        raise ConfigError(f"attention_backend {backend!r} does not serve this model's attention sinks; use triton")
    return kernels


def _find_native(settings: EngineSettings) -> tuple[Native | None, str]:
    """The native kernels, or why there are none."""
    try:
        return load_native(settings.cpu_target, announce=_say_compiling), ""
    except NativeUnavailable as error:
        return None, str(error)


def _say_compiling(compiler: str) -> None:
    log.info("native_kernels_compiling", compiler=compiler, seconds="about 35")


def _set_threads(settings: EngineSettings, native: Native | None) -> int:
    """Pinned only where they take all cores: two workers with one thread each would share the first core."""
    cores = usable_cores()
    count = settings.num_threads or max(1, cores // settings.ranks_here)
    if native is None:
        if settings.num_threads or settings.ranks_here > 1:
            torch.set_num_threads(count)
        return torch.get_num_threads()
    alone = settings.ranks_here == 1
    native.set_threads(count, pin=alone and count == cores == len(os.sched_getaffinity(0)))
    torch.set_num_threads(1)  # its threads would compete with the native ones
    return count


def usable_cores() -> int:
    """Cores that this process may run on, less where its control group's share of time is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores
