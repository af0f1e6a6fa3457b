"""Families with layers of linear attention: what the engine computes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.description import delta_tensors
from engine.description.families import FAMILIES
from engine.description.names import Parts
from engine.description.reading import parse_config
from engine.execution.runner import ModelRunner
from engine.modeling.native import layers as native_layers
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.native.delta import NativeDelta
from engine.modeling.torch_decoder import linear_attention
from engine.modeling.torch_decoder.decoder import Decoder
from kernels.ops.states.delta_rule import delta_gates
from shared.errors import ModelError
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import (
    COMMON,
    HYBRID_VARIANTS,
    KERNELS,
    make_runner,
    oracle_logprobs,
    random_prompt,
    save_checkpoint,
)
from tests.engine.driver import Driver, Live
from tests.engine.modeling.test_logits import ALL_LOGPROBS, assert_oracle_agrees, dense

TOLERANCE = 1e-4
HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, logprobs=5, prompt_logprobs=0)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", HYBRID_VARIANTS)
def test_logprobs_are_those_of_transformers(variant: str, kernels: str, tmp_path: Path) -> None:
    assert_oracle_agrees(tmp_path, variant, kernels)


FORMATS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("formats", FORMATS)
def test_narrower_formats_are_near(formats: str, kernels: str, tmp_path: Path) -> None:
    oracle = save_checkpoint(tmp_path, "qwen3.5", kernels)
    driver = Driver(make_runner(tmp_path, kernels, **FORMATS[formats]))
    sequence = driver.add(0, random_prompt(30, seed=1), ALL_LOGPROBS)
    driver.generate(3, chunk=16)
    found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
    wanted = oracle_logprobs(oracle, sequence.token_ids[:-1])
    assert 1e-5 < (found - wanted).abs().mean() < 0.12  # random ones feel rounding three times as much as Llamas


# ---- bits


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_token_is_a_function_of_its_history(kernels: str, tmp_path: Path) -> None:
    """Among others, in chunks of any size, in any row, with two threads, recomputed after its row served another."""
    save_checkpoint(tmp_path, "qwen3.5-moe", kernels)
    alone = generate(make_runner(tmp_path, kernels, num_threads=1), 0, 1 << 30, others=0)
    runner = make_runner(tmp_path, kernels, num_threads=1 if kernels == "torch" else 2)
    for row, chunk, others in ((3, 1, 2), (0, 5, 12), (3, 16, 1), (3, 30, 0)):
        found = generate(runner, row, chunk, others)
        assert found.token_ids == alone.token_ids
        assert found.logprobs == alone.logprobs
        assert found.prompt_logprobs == alone.prompt_logprobs
        runner.reset()


def generate(runner: ModelRunner, row: int, chunk: int, others: int) -> Live:
    driver = Driver(runner, order=row)
    for other in range(others):
        driver.add(10 + other, random_prompt(3 + other, seed=other + 10))
    sequence = driver.add(row, random_prompt(37, seed=1), DRAWN, seed=99)
    driver.generate(8, chunk=chunk)
    return sequence


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_preempted_sequence_begins_again(kernels: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3.5", kernels)
    wanted = generate(make_runner(tmp_path, kernels), 0, 1 << 30, others=0)
    driver = Driver(make_runner(tmp_path, kernels))
    sequence = driver.add(9, random_prompt(37, seed=1), DRAWN, seed=99)
    driver.add(10, random_prompt(21, seed=2))
    driver.generate(5)
    driver.preempt(9)
    driver.step({10: 1})
    driver.generate(8)
    assert sequence.token_ids == wanted.token_ids
    assert sequence.logprobs == wanted.logprobs


# ---- what is refused


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_num_value_heads \\(5\\) is no multiple": ("qwen3-next", {"linear_num_value_heads": 5}),
    "linear_conv_kernel_dim must be at least 2": ("qwen3.5", {"linear_conv_kernel_dim": 1}),
    "layer_types without full_attention": ("qwen3.5", {"layer_types": ["linear_attention"] * 4}),
    "layer_types has unsupported kinds: sliding_attention": ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}),
}


@pytest.mark.parametrize("message", WRONG)
def test_values_that_are_not_served(message: str) -> None:
    variant, changes = WRONG[message]
    family, own = HYBRID_VARIANTS[variant]
    with pytest.raises(ModelError, match=message):
        parse_config({"architectures": [f"{family}ForCausalLM"], **COMMON, **own, **changes})


# ---- mutants: with one part wrong the comparison with transformers fails


def changed(struct: Callable[..., Any], **changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Makes the same with fields changed."""

    def make(*given: Any, **named: Any) -> Any:
        made = struct(*given, **named)
        return replace(made, **{name: change(getattr(made, name)) for name, change in changes.items()})

    return make


def of_weights(**changes: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            "engine.modeling.torch_decoder.assembly.DeltaWeights", changed(linear_attention.DeltaWeights, **changes)
        )
        patch.setattr("engine.modeling.native.layers.NativeDelta", changed(NativeDelta, **changes))

    return change


def without_beta(patch: pytest.MonkeyPatch) -> None:
    def gates(mixed: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        decay, beta = delta_gates(mixed, rate, bias)
        return decay, torch.ones_like(beta)

    def saturated(gates: Any) -> Any:
        return replace(gates, bias=torch.cat((torch.full((gates.n // 2,), 40.0), torch.zeros(gates.n // 2))))

    patch.setattr(linear_attention, "delta_gates", gates)
    patch.setattr("engine.modeling.native.layers.NativeDelta", changed(NativeDelta, gates=saturated))


def without_gate(patch: pytest.MonkeyPatch) -> None:
    described = native_layers.describe_layer

    def describe(*given: Any) -> Any:
        layer = described(*given)
        layer.attention_gate = 0
        return layer

    def build(*given: Any, **named: Any) -> Any:
        decoder = built(*given, **named)
        whole = decoder.kernels.gated_activation
        decoder.kernels = replace(
            decoder.kernels,
            gated_activation=lambda x, kind: x.chunk(2, dim=1)[1] if kind == "sigmoid" else whole(x, kind),
        )
        return decoder

    built = Decoder
    patch.setattr(native_layers, "describe_layer", describe)
    patch.setattr("engine.modeling.torch_decoder.assembly.Decoder", build)


def of_names(**fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        for architecture in HYBRIDS:
            family = FAMILIES[architecture]
            names = tuple(replace(table, **fields) for table in family.names)
            patch.setitem(FAMILIES, architecture, family._replace(names=names))

    return change


def gates_swapped(patch: pytest.MonkeyPatch) -> None:
    whole = delta_tensors.delta_parts

    def parts(*given: Any) -> Iterator[tuple[str, Parts]]:
        for slot, found in whole(*given):
            yield slot, found[::-1] if slot == "delta.gates" else found

    patch.setattr("engine.description.tensors.delta_parts", parts)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "decay of the other sign": of_weights(rate=lambda rate: -rate),
    "decay without its step": of_weights(step=torch.zeros_like),
    "beta left out": without_beta,
    "beta and decay swapped": gates_swapped,
    "convolution off by one": of_weights(taps=lambda taps: taps.roll(1, 0)),
    "gate of attention left out": without_gate,
    "norms stored as they are": of_names(norms_plus_one=False),
    "norm of the results stored as what is added to one": of_weights(norm=lambda norm: norm + 1),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", ["qwen3-next", "qwen3.5"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(
    name: str, variant: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = save_checkpoint(tmp_path, variant, kernels)
    MUTANTS[name](monkeypatch)
    assert not difference(make_runner(tmp_path, kernels), oracle) <= 10 * TOLERANCE  # a NaN too


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("place", [0, 1], ids=["inputs of the convolution", "states"])
def test_a_state_off_by_one_token_is_noticed(place: int, kernels: str, tmp_path: Path) -> None:
    """What a sequence left in its row is that of the token before."""
    oracle = save_checkpoint(tmp_path, "qwen3.5", kernels)
    runner = make_runner(tmp_path, kernels)
    held: list[Tensor] = []

    def late() -> None:
        states = states_of(runner, place)
        now = [state.clone() for state in states]
        for state, before in zip(states, held, strict=False):
            state.copy_(before)
        held[:] = now

    assert not difference(runner, oracle, before_step=late) <= 10 * TOLERANCE


def states_of(runner: ModelRunner, place: int) -> list[Tensor]:
    model: Any = runner._model
    if isinstance(model, NativeDecoder):
        return [both[place] for both in model._states]
    deltas = [memory for memory in model._memories if isinstance(memory, linear_attention.DeltaStates)]
    return [(memory.inputs, memory.states)[place] for memory in deltas]


def difference(runner: ModelRunner, oracle: Any, *, before_step: Callable[[], None] = lambda: None) -> float:
    """The largest of all log-probabilities."""
    driver = Driver(runner)
    sequence = driver.add(0, random_prompt(40, seed=1), ALL_LOGPROBS)
    while sequence.num_computed < 40:
        before_step()
        driver.step({0: 8})
    found = dense([*sequence.prompt_logprobs, *sequence.logprobs])
    return float((found - oracle_logprobs(oracle, sequence.token_ids[:-1])).abs().max())


@pytest.mark.parametrize("kernels", KERNELS)
def test_without_a_mutant_nothing_differs(kernels: str, tmp_path: Path) -> None:
    oracle = save_checkpoint(tmp_path, "qwen3.5", kernels)
    assert difference(make_runner(tmp_path, kernels), oracle) <= TOLERANCE
