"""Which implementation serves each op: decided once at load from device and formats, then bound.

Triton's are imported only where they serve: a machine without triton, or without a GPU, never sees them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.cpu import activation as cpu_activation
from kernels.cpu import attention as cpu_attention
from kernels.cpu import gumbel_argmax as cpu_gumbel_argmax
from kernels.cpu import layer_norm as cpu_layer_norm
from kernels.cpu import linear as cpu_linear
from kernels.cpu import rms_norm as cpu_rms_norm
from kernels.cpu.binding.native import Native
from kernels.flash.attention import FlashAttention3, FlashInferAttention, HeadShape
from kernels.interface import AttentionShape, Kernels, SamplingKernels, reference_kernels
from kernels.ops.attention import rotary_store
from kernels.ops.experts import experts
from kernels.ops.experts.experts import Linear
from kernels.ops.linears import head_linear, linear, linear_codes, linear_fp8, linear_int8
from kernels.ops.linears.codes import INT4, quantise_to_codes
from kernels.ops.linears.linear import LinearWeight
from kernels.ops.sampling import argmax


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantised: torch.dtype | None = None,
    group: int = 0,
    quantised_head: bool = True,
    batch_invariant: bool = True,
    shape: AttentionShape | None = None,
    early: bool = False,
) -> Kernels:
    """The best provider that this tree has in torch for arithmetic in `dtype`: the CPU's own, Triton on a GPU where it
    is installed, else the reference.

    On a CPU bfloat16 means that the inputs of every linear are rounded to it; sums and all else are float32.
    Weights are quantised to int8, INT4 in groups, or E4M3, of which experts are not; a quantised head is in int8.
    `early` is Triton's (`kernels.gpu`).
    """
    if device.type == "cpu":
        kernels = _cpu_kernels(dtype, batch_invariant)
    else:
        kernels = triton_kernels(shape or AttentionShape(), early=early) if has_triton() else reference_kernels()
    return quantising(kernels, quantised, group, quantised_head=quantised_head)


def quantising(kernels: Kernels, weights: torch.dtype | None, group: int, *, quantised_head: bool) -> Kernels:
    """The same where weights are quantised at load, unless `weights` is None; `group` is of INT4."""
    exact = kernels.pack_linear
    kernels = replace(kernels, pack_exact=exact, exact_linear=kernels.linear, pack_output=exact)
    if weights is None:
        return kernels
    if quantised_head:
        kernels = replace(kernels, pack_output=linear_int8.pack_linear)
    if weights == INT4:
        return _with_codes(kernels, group)
    if weights == linear_fp8.FP8:
        return replace(kernels, pack_linear=linear_fp8.pack_linear, linear=by_weight(kernels))
    return replace(
        kernels,
        pack_linear=linear_int8.pack_linear,
        linear=kernels.linear_int8 if quantised_head else by_weight(kernels),
        pack_experts=kernels.pack_experts_int8,
    )


def _with_codes(kernels: Kernels, group: int) -> Kernels:
    """4 bits: a GPU decodes them; a CPU has the reference, whose rows are alone."""
    product, pack_decoded, pack_stack = by_weight(kernels), kernels.pack_decoded, kernels.pack_experts_decoded
    if pack_decoded is not None and pack_stack is not None:
        return replace(
            kernels,
            pack_linear=lambda weight: pack_decoded(quantise_to_codes(weight, group)),
            linear=product,
            pack_experts=lambda weights, bias: pack_stack((quantise_to_codes(one, group) for one in weights), bias),
        )
    pack = partial(linear_codes.pack_linear, group=group)
    return replace(
        kernels,
        pack_linear=pack,
        linear=product,
        pack_experts=partial(experts.pack_experts, pack=pack),
        experts=partial(
            experts.experts,
            linear=product,
            activation=kernels.activation,
            gated_activation=kernels.gated_activation,
        ),
    )


def by_weight(kernels: Kernels) -> Linear:
    """A product with weights of any format."""

    def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        if weight.codes is not None:
            return linear_codes.linear(x, weight, bias)
        if weight.scales is None:
            return kernels.exact_linear(x, weight, bias)
        return (kernels.linear_int8 if weight.weight.dtype == torch.int8 else kernels.linear_fp8)(x, weight, bias)

    return linear


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
        layer_norm=cpu_layer_norm.layer_norm,
        activation=cpu_activation.activation,
        gated_activation=cpu_activation.gated_activation,
        sampling=SamplingKernels(argmax.argmax, cpu_gumbel_argmax.gumbel_argmax),
    )
    if dtype == torch.float16 or not batch_invariant:
        rounded = linear.linear_rounded if dtype == torch.bfloat16 else linear.linear
        return _with_experts(replace(kernels, linear=rounded))
    invariant = replace(
        kernels,
        row_multiple=cpu_linear.ROW_MULTIPLE,
        pack_linear=cpu_linear.LinearPacker().pack,
        linear=cpu_linear.linear_rounded if dtype == torch.bfloat16 else cpu_linear.linear,
    )
    return _with_experts(invariant)


def _with_experts(kernels: Kernels) -> Kernels:
    """The same with experts, and linears of single heads, made of its own ops, whose rows are as alone as theirs."""
    return replace(
        kernels,
        pack_experts=partial(experts.pack_experts, pack=kernels.pack_linear),
        experts=partial(
            experts.experts,
            linear=kernels.linear,
            linear_int8=kernels.linear_int8,
            activation=kernels.activation,
            gated_activation=kernels.gated_activation,
        ),
        pack_heads=partial(head_linear.pack_heads_alone, pack=kernels.pack_linear),
        head_linear=partial(head_linear.head_linear_alone, linear=kernels.linear),
    )


def has_triton() -> bool:
    return find_spec("triton") is not None


def triton_kernels(shape: AttentionShape, *, early: bool = False) -> Kernels:
    """Raises ModuleNotFoundError where triton is not installed."""
    from kernels import gpu

    return gpu.triton_kernels(shape, early=early)


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
        attention_sinks=False,
    )


def native_sampling(native: Native) -> SamplingKernels:
    return SamplingKernels(native.argmax, native.gumbel_argmax, truncation=native.truncation)
