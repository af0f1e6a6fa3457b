"""What every implementation of the ops provides: the signatures, and the references as one such set.

It knows no device and no library but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.ops.attention import attention, kv_store, rotary, rotary_store
from kernels.ops.attention.attention import AttentionMetadata, StaticPlan
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.ops.experts import experts
from kernels.ops.experts.experts import ExpertWeights, Routing
from kernels.ops.layers import activation, layer_norm, rms_norm
from kernels.ops.linears import head_linear, linear, linear_fp8, linear_int8, lora
from kernels.ops.linears import linear as plain
from kernels.ops.linears.codes import Codes
from kernels.ops.linears.head_linear import HeadWeights
from kernels.ops.linears.linear import LinearWeight
from kernels.ops.linears.lora import LoraWeights
from kernels.ops.sampling import argmax, draft_verification, gumbel_argmax, rejection
from kernels.ops.states import causal_conv, delta_rule
from kernels.ops.states.state_plan import StatePlan
from kernels.ops.steps import row_writes, step_inputs  # fmt: skip

Accepts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]
LogResidual = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ForbidWords = Callable[[Tensor, Tensor, Tensor, Tensor], None]
Penalise = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]], None]
VerifyDrafts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
PackExperts = Callable[[Sequence[Tensor], Tensor | None], ExpertWeights]
PackExpertCodes = Callable[[Iterable[Codes], Tensor | None], ExpertWeights]
Route = Callable[[Tensor, Routing, Tensor | None], tuple[Tensor, Tensor]]
Experts = Callable[[Tensor, Tensor, Tensor, ExpertWeights, ExpertWeights, str, bool], Tensor]
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StatePlan], Tensor]
PlanStatic = Callable[[Tensor, Sequence[int], int, int, int], StaticPlan]
PlanAttention = Callable[[Sequence[int], Sequence[int], Tensor, int, Sequence[int]], AttentionMetadata]


class PagedAttention(Protocol):
    def __call__(
        self,
        query: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


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
    paged_attention: PagedAttention
    store_kv: Callable[[Tensor, Tensor | None, KVCache, Tensor], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotary_store: Callable[[Tensor, Tensor, Tensor, HeadNorm | None, KVCache, Tensor], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    activation: Callable[[Tensor, str], Tensor]
    gated_activation: Callable[[Tensor, str], Tensor]
    step_inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    sampling: SamplingKernels
    attention_sinks: bool = True  # False: its attention knows no sinks, so that a model that has them is refused
    split: int = 0  # keys: a context that is no longer is attended to in one piece
    static_attention: PlanStatic | None = None  # None: steps cannot be captured as graphs
    linear_int8: Callable[[Tensor, LinearWeight, Tensor | None], Tensor] = linear_int8.linear
    linear_fp8: Callable[[Tensor, LinearWeight, Tensor | None], Tensor] = linear_fp8.linear
    pack_exact: Callable[[Tensor], LinearWeight] = plain.pack_linear  # never quantised: of routers and gates
    pack_output: Callable[[Tensor], LinearWeight] = plain.pack_linear  # of the head, which `linear` multiplies too
    exact_linear: Callable[[Tensor, LinearWeight, Tensor | None], Tensor] = plain.linear
    pack_decoded: Callable[[Codes], LinearWeight] | None = None  # for `linear`; raises ValueError
    write_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = row_writes.write_rows
    route: Route = experts.route
    pack_experts: PackExperts = experts.pack_experts
    pack_experts_int8: PackExperts = experts.pack_experts_int8
    pack_experts_decoded: PackExpertCodes | None = None  # for `experts`; raises ValueError
    experts: Experts = experts.experts
    pack_heads: Callable[[Sequence[Tensor]], HeadWeights] = head_linear.pack_heads  # never quantised
    head_linear: Callable[[Tensor, HeadWeights], Tensor] = head_linear.head_linear
    lora: Callable[[Tensor, Tensor, LoraWeights, Tensor], Tensor] = lora.lora
    causal_conv: Callable[[Tensor, Tensor, Tensor, StatePlan], Tensor] = causal_conv.causal_conv
    gated_delta_rule: DeltaRule = delta_rule.gated_delta_rule


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a provider may want to know of a model before it plans attention."""

    heads: tuple[tuple[int, int], ...] = ((1, 64),)  # of its layers: query heads that share a KV head, and dimensions
    max_model_len: int = 0  # tokens; 0: not known


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
        layer_norm=layer_norm.layer_norm,
        activation=activation.activation,
        gated_activation=activation.gated_activation,
        step_inputs=step_inputs.step_inputs,
        sampling=SamplingKernels(argmax.argmax, gumbel_argmax.gumbel_argmax),
    )
