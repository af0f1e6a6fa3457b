"""The gated delta rule: a program per sequence, head and some columns of its state, which stay in registers.

Columns of a state do not depend on each other, nor does a program on what else is in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.states.delta_rule import EPS
from kernels.ops.states.state_plan import StatePlan
from kernels.triton.launch import power_of_2

COLUMNS = 32  # of a program
LENGTH_EPS = tl.constexpr(EPS)


def gated_delta_rule(
    query: Tensor,  # [num_tokens, num_key_heads, key_dim], heads behind each other
    key: Tensor,  # [num_tokens, num_key_heads, key_dim], heads behind each other
    value: Tensor,  # [num_tokens, num_value_heads, value_dim], heads behind each other
    decay: Tensor,  # [num_tokens, num_value_heads] float32
    beta: Tensor,  # [num_tokens, num_value_heads] float32
    states: Tensor,  # [num_slots, num_value_heads, key_dim, value_dim] float32, written
    plan: StatePlan,
) -> Tensor:  # [num_tokens, num_value_heads, value_dim]
    num_heads, value_dim = value.shape[1:]
    key_heads, key_dim = key.shape[1:]
    out = value.new_zeros(value.shape)
    columns = min(COLUMNS, power_of_2(value_dim))
    pass_tokens[(len(plan.slots), num_heads, triton.cdiv(value_dim, columns))](
        query, key, value, decay, beta, states, plan.slots, plan.starts, plan.computed, out,
        key_dim**-0.5, query.stride(0), key.stride(0), value.stride(0), decay.stride(0), beta.stride(0),
        SHARE=num_heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEYS=power_of_2(key_dim), COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def pass_tokens(
    query: tl.tensor,  # [num_tokens, num_key_heads, KEY_DIM]
    key: tl.tensor,  # [num_tokens, num_key_heads, KEY_DIM]
    value: tl.tensor,  # [num_tokens, num_value_heads, VALUE_DIM]
    decay: tl.tensor,  # [num_tokens, num_value_heads]
    beta: tl.tensor,  # [num_tokens, num_value_heads]
    states: tl.tensor,  # [num_slots, num_value_heads, KEY_DIM, VALUE_DIM]
    slots: tl.tensor,  # [num_seqs] int64
    starts: tl.tensor,  # [num_seqs + 1] int64
    computed: tl.tensor,  # [num_seqs] int64
    out: tl.tensor,  # [num_tokens, num_value_heads, VALUE_DIM], contiguous
    scale: float,
    query_stride: int,
    key_stride: int,
    value_stride: int,
    decay_stride: int,
    beta_stride: int,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real_keys, real_columns = keys < KEY_DIM, columns < VALUE_DIM
    inside = real_keys[:, None] & real_columns[None, :]
    place = (tl.load(slots + sequence) * num_heads + head) * KEY_DIM + keys[:, None]
    place = states + place * VALUE_DIM + columns[None, :]
    begun = (tl.zeros_like(keys) + tl.load(computed + sequence)) > 0
    state = tl.load(place, mask=inside & begun[:, None], other=0.0)
    key_place = head // SHARE * KEY_DIM + keys
    value_place = head * VALUE_DIM + columns
    for token in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
        k = normalised(tl.load(key + token * key_stride + key_place, mask=real_keys, other=0.0))
        q = normalised(tl.load(query + token * query_stride + key_place, mask=real_keys, other=0.0)) * scale
        v = tl.load(value + token * value_stride + value_place, mask=real_columns, other=0.0).to(tl.float32)
        state = state * tl.load(decay + token * decay_stride + head)
        change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + token * beta_stride + head)
        state = state + k[:, None] * change[None, :]
        result = tl.sum(state * q[:, None], 0).to(out.dtype.element_ty)
        tl.store(out + token * num_heads * VALUE_DIM + value_place, result, mask=real_columns)
    tl.store(place, state, mask=inside)


@triton.jit
def normalised(
    x: tl.tensor,  # [KEYS]
) -> tl.tensor:  # [KEYS] float32, of length one
    wide = x.to(tl.float32)
    return wide / tl.sqrt(tl.sum(wide * wide, 0) + LENGTH_EPS)
