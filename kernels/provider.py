"""Which implementation serves each op: decided once at load from device and formats, then bound.

Triton's are imported only where they serve: a machine without triton, or without a GPU, never sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.cpu import attention as cpu_attention
from kernels.cpu import gumbel_argmax as cpu_gumbel_argmax
from kernels.cpu import linear as cpu_linear
from kernels.cpu import rms_norm as cpu_rms_norm
from kernels.cpu import silu_mul as cpu_silu_mul
from kernels.cpu.native import Native
from kernels.flash.attention import FlashAttention3, FlashInferAttention, HeadShape
from kernels.ops import (
    argmax,
    attention,
    draft_verification,
    gumbel_argmax,
    kv_store,
    linear,
    linear_int8,
    rejection,
    rms_norm,
    rotary,
    rotary_store,
    row_writes,
    silu_mul,
    step_inputs,
)  # fmt: skip
from kernels.ops.attention import AttentionMetadata, StaticPlan
from kernels.ops.kv_cache import KVCache
from kernels.ops.linear import LinearWeight
from kernels.ops.rotary_store import HeadNorm

Accepts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]
LogResidual = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ForbidWords = Callable[[Tensor, Tensor, Tensor, Tensor], None]
Penalise = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]], None]
VerifyDrafts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
PlanStatic = Callable[[Tensor, Sequence[int], int, int, int], StaticPlan]
PlanAttention = Callable[[Sequence[int], Sequence[int], Tensor, int, Sequence[int]], AttentionMetadata]


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """What picks tokens out of logits; signatures are those of the reference of the same name in `kernels.ops`."""

    argmax: Callable[[Tensor], Tensor]
    gumbel_argmax: Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]
    accepts: Accepts = rejection.accepts
    log_residual: LogResidual = rejection.log_residual
    # None: the caller has its own way in torch, which on a GPU would wait for it
    truncation: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    penalise: Penalise | None = None
    forbid_words: ForbidWords | None = None
    verify_drafts: VerifyDrafts = draft_verification.verify_drafts


@dataclass(frozen=True, slots=True)
class Kernels:
    """The bound ops; signatures are those of the reference of the same name in `kernels.ops`."""

    name: str  # of the provider, for logs
    row_multiple: int  # a step's tokens are padded to a multiple of this, so that no op pads again
    pack_linear: Callable[[Tensor], LinearWeight]
    linear: Callable[[Tensor, LinearWeight, Tensor | None], Tensor]
    plan_attention: PlanAttention
    paged_attention: Callable[[Tensor, KVCache, AttentionMetadata, float, int], Tensor]
    store_kv: Callable[[Tensor, Tensor, KVCache, Tensor], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotary_store: Callable[[Tensor, Tensor, Tensor, HeadNorm | None, KVCache, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    step_inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    sampling: SamplingKernels
    split: int = 0  # keys: a context that is no longer is attended to in one piece
    static_attention: PlanStatic | None = None  # None: steps cannot be captured as graphs
    linear_int8: Callable[[Tensor, LinearWeight, Tensor | None], Tensor] = linear_int8.linear
    write_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = row_writes.write_rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a provider may want to know of a model before it plans attention."""

    group: int = 1  # query heads that share a KV head
    head_dim: int = 64
    max_model_len: int = 0  # tokens; 0: not known


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantised: bool = False,
    batch_invariant: bool = True,
    shape: AttentionShape | None = None,
) -> Kernels:
    """The best provider that this tree has in torch for arithmetic in `dtype`: the CPU's own, Triton on a GPU where it
    is installed, else the reference.

    On a CPU bfloat16 means that the inputs of every linear are rounded to it; sums and all else are float32.
    """
    if device.type == "cpu":
        kernels = _cpu_kernels(dtype, batch_invariant)
    else:
        kernels = triton_kernels(shape or AttentionShape()) if has_triton() else reference_kernels()
    if not quantised:
        return kernels
    return replace(kernels, pack_linear=linear_int8.pack_linear, linear=kernels.linear_int8)


def _cpu_kernels(dtype: torch.dtype, batch_invariant: bool) -> Kernels:
    attend = partial(cpu_attention.paged_attention, compute=torch.float64 if batch_invariant else torch.float32)
    kernels = replace(
        reference_kernels(),
        name="cpu",
        plan_attention=cpu_attention.plan_attention,
        paged_attention=attend,
        rms_norm=cpu_rms_norm.rms_norm,
        add_rms_norm=cpu_rms_norm.add_rms_norm,
        rotary_store=partial(rotary_store.rotary_store, normalise=cpu_rms_norm.rms_norm),
        silu_mul=cpu_silu_mul.silu_mul,
        sampling=SamplingKernels(argmax.argmax, cpu_gumbel_argmax.gumbel_argmax),
    )
    if dtype == torch.float16 or not batch_invariant:
        rounded = linear.linear_rounded if dtype == torch.bfloat16 else linear.linear
        return replace(kernels, linear=rounded)
    return replace(
        kernels,
        row_multiple=cpu_linear.ROW_MULTIPLE,
        pack_linear=cpu_linear.LinearPacker().pack,
        linear=cpu_linear.linear_rounded if dtype == torch.bfloat16 else cpu_linear.linear,
    )


def has_triton() -> bool:
    return find_spec("triton") is not None


def triton_kernels(shape: AttentionShape) -> Kernels:
    """Raises ModuleNotFoundError where triton is not installed."""
    from kernels import gpu

    return gpu.triton_kernels(shape)


FLASH_LIBRARIES = {"flashinfer": "flashinfer", "flashattention": "flash_attn_interface"}


def with_flash(kernels: Kernels, backend: str, shape: HeadShape, device: torch.device) -> Kernels:
    """The same with attention by one of FLASH_LIBRARIES.  Raises ModuleNotFoundError where it is not installed."""
    library = import_module(FLASH_LIBRARIES[backend])
    served = FlashInferAttention(library, shape, device) if backend == "flashinfer" else FlashAttention3(library)
    return replace(
        kernels,
        name=f"{kernels.name}, attention by {backend}",
        plan_attention=served.plan_attention,
        paged_attention=served.paged_attention,
        static_attention=None,
    )


def native_sampling(native: Native) -> SamplingKernels:
    return SamplingKernels(native.argmax, native.gumbel_argmax, truncation=native.truncation)


def reference_kernels() -> Kernels:
    return Kernels(
        name="reference",
        row_multiple=1,
        pack_linear=linear.pack_linear,
        linear=linear.linear,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        store_kv=kv_store.store_kv,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        rotary=rotary.rotary,
        rotary_store=rotary_store.rotary_store,
        silu_mul=silu_mul.silu_mul,
        step_inputs=step_inputs.step_inputs,
        sampling=SamplingKernels(argmax.argmax, gumbel_argmax.gumbel_argmax),
    )
