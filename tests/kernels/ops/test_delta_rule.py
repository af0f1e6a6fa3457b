"""The references of linear attention against transformers' own functions, and against themselves in other chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from kernels.ops.states.causal_conv import causal_conv
from kernels.ops.states.delta_rule import delta_gates, gated_delta_rule
from tests.kernels.state_cases import DeltaInputs, Heads, make_plan, normal

HEADS = {
    "shared keys": Heads(2, 6, 16, 24),
    "a key of each": Heads(3, 3, 32, 16),
    "one head": Heads(1, 1, 8, 40),
}
FORMS = {"recurrent": oracle.torch_recurrent_gated_delta_rule, "chunked": oracle.torch_chunk_gated_delta_rule}


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=3e-5)


def of_transformers(form: Callable[..., Any], given: DeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    query, key, value, decay, beta = (tensor[None] for tensor in given.tensors)
    found, last = form(
        query, key, value, g=decay.log(), beta=beta, initial_state=None if state is None else state[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return found[0], last[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_delta_rule_is_that_of_transformers(heads: str, form: str) -> None:
    shape, counts = HEADS[heads], (70, 1, 5)
    given = DeltaInputs.random(shape, sum(counts))
    states = normal(9, shape.value_heads, shape.key_dim, shape.value_dim, seed=5)
    before = states.clone()
    plan = make_plan((4, 0, 7), counts, (0, 12, 3))
    found = gated_delta_rule(*given.tensors, states, plan)
    for slot, tokens, is_new in plan.sequences():
        wanted, last = of_transformers(FORMS[form], given.part(tokens), None if is_new else before[slot])
        assert_near(found[tokens], wanted)
        assert_near(states[slot], last)
    others = [slot for slot in range(9) if slot not in (4, 0, 7)]
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("width", [2, 4])
def test_the_convolution_is_that_of_transformers(width: int) -> None:
    """From nothing, and one token at a time from a state of the last inputs."""
    channels, count = 20, 11
    x, weight, states = normal(count, channels), normal(width, channels, seed=1), normal(3, width - 1, channels, seed=2)
    found = causal_conv(x, weight, states, make_plan((1,), (count,), (0,)))
    taps = weight.t().contiguous()
    wanted = oracle.causal_conv1d_fn(x.t()[None], taps, None, "silu")[0].t()
    assert_near(found, wanted)
    held = x[-width:].t()[None].clone()  # transformers keeps one more than is needed
    for step in range(4):
        token = normal(1, channels, seed=20 + step)
        found = causal_conv(token, weight, states, make_plan((1,), (1,), (count + step,)))
        wanted = oracle.causal_conv1d_update(token.t()[None], held, taps, None, "silu")[0].t()
        assert_near(found, wanted)
        assert torch.equal(states[1], held[0, :, 1:].t())


def test_the_gates_are_those_of_transformers() -> None:
    """As a layer of transformers has them: beta and the logarithm of the decay."""
    mixed, a_log, bias = normal(5, 12) * 6, normal(6, seed=1), normal(6, seed=2)
    decay, beta = delta_gates(mixed, a_log.exp(), bias)
    logarithm = -a_log.exp() * torch.nn.functional.softplus(mixed[:, 6:] + bias)
    assert_near(beta, mixed[:, :6].sigmoid())
    assert_near(decay, logarithm.exp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(1,) * 37, (5, 16, 16), (36, 1), (2, 3, 32)])
def test_no_bit_depends_on_chunks_or_neighbours(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    shape, slots = HEADS["shared keys"], 5
    given, x = DeltaInputs.random(shape, 37, dtype=dtype), normal(37, shape.channels, dtype=dtype)
    weight = normal(4, shape.channels, seed=3, dtype=dtype)
    results = []
    for parts in ((37,), cuts):
        states = normal(slots, shape.value_heads, shape.key_dim, shape.value_dim, seed=5)
        inputs = normal(slots, 3, shape.channels, seed=6, dtype=dtype)
        outs, mixed, done = [], [], 0
        for index, count in enumerate(parts):
            beside = index % 3  # tokens of another sequence, before these
            other = DeltaInputs.random(shape, beside, dtype=dtype, seed=40)
            both = other.before(given.part(slice(done, done + count)))
            plan = make_plan((2, 3), (beside, count), (0, done)) if beside else make_plan((3,), (count,), (done,))
            outs.append(gated_delta_rule(*both.tensors, states, plan)[beside:])
            rows = torch.cat((normal(beside, shape.channels, dtype=dtype, seed=41), x[done : done + count]))
            mixed.append(causal_conv(rows, weight, inputs, plan)[beside:])
            done += count
        results.append((torch.cat(outs), torch.cat(mixed), states[3], inputs[3]))
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_padding_behind_the_tokens_changes_nothing() -> None:
    shape = HEADS["one head"]
    given, plan = DeltaInputs.random(shape, 8), make_plan((0,), (5,), (0,))
    states, inputs = torch.zeros(1, 1, 8, 40), torch.zeros(1, 3, 20)
    found = gated_delta_rule(*given.tensors, states, plan)
    again = torch.zeros_like(states)
    wanted = gated_delta_rule(*given.part(slice(5)).tensors, again, plan)
    assert torch.equal(found[:5], wanted)
    assert torch.equal(states, again)
    assert not found[5:].any()
    x, weight = normal(8, 20), normal(4, 20, seed=1)
    found = causal_conv(x, weight, inputs, plan)
    assert torch.equal(inputs[0], x[2:5])
    assert not found[5:].any()
