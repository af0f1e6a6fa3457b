"""The Triton kernels as a provider.  Importing this needs triton."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kernels.interface import AttentionShape, Kernels, SamplingKernels, reference_kernels
from kernels.ops.experts import experts_decoded
from kernels.ops.linears import linear_decoded as ops_decoded
from kernels.triton.attention import attention, kv_store, rotary, rotary_store
from kernels.triton.attention.attention_tiles import split_size
from kernels.triton.experts import experts, routing
from kernels.triton.layers import activation, layer_norm, rms_norm
from kernels.triton.linears import linear, linear_fp8, linear_int8, lora
from kernels.triton.sampling import (
    argmax,
    bad_words,
    draft_verification,
    gumbel_argmax,
    penalties,
    rejection,
    truncation,
)
from kernels.triton.states import causal_conv, delta_rule
from kernels.triton.steps import row_writes, step_inputs  # fmt: skip


def triton_kernels(shape: AttentionShape, *, early: bool = False) -> Kernels:
    """`early`: those of a step of one row may begin before the ones before them have ended (`launch.when`)."""
    split = split_size(shape.max_model_len)
    return replace(
        reference_kernels(),
        name="triton",
        plan_attention=partial(attention.plan_attention, heads=shape.heads, split=split),
        static_attention=partial(attention.static_attention, heads=shape.heads, split=split),
        split=split,
        paged_attention=partial(attention.paged_attention, early=early),
        store_kv=kv_store.store_kv,
        rms_norm=partial(rms_norm.rms_norm, early=early),
        add_rms_norm=partial(rms_norm.add_rms_norm, early=early),
        rotary=rotary.rotary,
        rotary_store=partial(rotary_store.rotary_store, early=early),
        layer_norm=layer_norm.layer_norm,
        activation=partial(activation.activation, early=early),
        gated_activation=partial(activation.gated_activation, early=early),
        step_inputs=step_inputs.step_inputs,
        linear=partial(linear.linear, early=early),
        linear_int8=linear_int8.linear,
        linear_fp8=linear_fp8.linear,
        pack_decoded=ops_decoded.pack_decoded,
        lora=lora.lora,
        write_rows=row_writes.write_rows,
        route=routing.route,
        pack_experts=experts.pack_experts,
        pack_experts_int8=experts.pack_experts_int8,
        pack_experts_decoded=experts_decoded.pack_experts_decoded,
        experts=experts.experts,
        causal_conv=causal_conv.causal_conv,
        gated_delta_rule=delta_rule.gated_delta_rule,
        sampling=SamplingKernels(
            argmax.argmax,
            gumbel_argmax.gumbel_argmax,
            accepts=rejection.accepts,
            log_residual=rejection.log_residual,
            truncation=truncation.truncation,
            penalise=penalties.penalise,
            forbid_words=bad_words.forbid_words,
            verify_drafts=draft_verification.verify_drafts,
        ),
    )
