"""The memory plan, on sizes made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.loading.load import load_model, plan_pool
from engine.loading.memory import (
    GIB,
    MemoryPlan,
    StatesPlan,
    WindowBytes,
    available_memory,
    cpu_budget,
    gpu_budget,
    plan_memory,
)
from engine.loading.profile import most_positions, peak_activation
from engine.modeling.batch import StepBatch
from shared.config import MemorySettings, SchedulingSettings, Settings, SpeculationSettings
from shared.errors import ConfigError
from tests.engine.loading.test_ranks import spec_of

BLOCK = 1 << 20
ANY_LENGTH = SchedulingSettings()


def test_blocks_of_a_gpu() -> None:
    settings = MemorySettings(gpu_memory_utilization=0.5)
    budget = gpu_budget(settings, total=80 * GIB, weights=16 * GIB, peak_activation=4 * GIB)
    assert budget == 20 * GIB
    plan = plan_memory(settings, ANY_LENGTH, bytes_per_block=BLOCK, budget=budget, max_model_len=4096)
    assert (plan.num_blocks, plan.num_tokens, plan.max_model_len) == (20 << 10, 20 << 14, 4096)
    assert "20.00 GiB: 20480 blocks of 16 tokens" in str(plan)
    assert "80.0 sequences of max_model_len=4096" in str(plan)


def test_draft_tokens_are_sampled_too() -> None:
    few = SchedulingSettings(max_num_seqs=64)
    assert most_positions(few, SpeculationSettings()) == 64
    assert most_positions(few, SpeculationSettings(draft="ngram", max_num_draft_tokens=7)) == 512
    narrow = SchedulingSettings(max_num_seqs=64, max_num_batched_tokens=300)
    assert most_positions(narrow, SpeculationSettings(draft="ngram")) == 300


def count_no_memory(patch: pytest.MonkeyPatch) -> None:
    """What a GPU says of its memory, where there is none."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats"):
        patch.setattr(torch.cuda, name, lambda device: 0)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, GIB))


def test_a_step_is_profiled_within_the_positions_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft has as many as the target serves, which may be fewer than a step has tokens."""
    settings: Any = {"model": "models/pageant-stories-draft", "device": "cpu", "kernels": "torch", "num_blocks": 4}
    given = Settings.of(max_num_batched_tokens=100, **settings)
    model = load_model(given, longest=24).model
    count_no_memory(monkeypatch)
    steps: list[list[int]] = []
    forward = model.forward

    def recorded(batch: StepBatch) -> torch.Tensor:
        steps.append(batch.scheduled.tolist())
        return forward(batch)

    monkeypatch.setattr(model, "forward", recorded)
    assert peak_activation(model, given, 24) == 0
    assert steps == [[24, 24, 24, 24, 4]]


def test_a_plan_is_profiled_for_the_longest_sequence_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    count_no_memory(monkeypatch)
    asked: list[int] = []

    def peak(_model: object, _settings: Settings, longest: int) -> int:
        asked.append(longest)
        return 0

    monkeypatch.setattr("engine.loading.load.peak_activation", peak)
    model: Any = SimpleNamespace(device=torch.device("cuda"), spec=spec_of())
    assert plan_pool(Settings.of(), model, 24, layer_bytes=[BLOCK, BLOCK]).max_model_len == 24
    assert asked == [24]


def test_weights_larger_than_the_share() -> None:
    settings = MemorySettings(gpu_memory_utilization=0.1)
    budget = gpu_budget(settings, total=80 * GIB, weights=16 * GIB, peak_activation=0)
    with pytest.raises(ConfigError, match="raise num_blocks, kv_cache_memory or gpu_memory_utilization"):
        plan_memory(settings, ANY_LENGTH, bytes_per_block=BLOCK, budget=budget, max_model_len=4096)


def test_what_is_asked_for_wins() -> None:
    assert cpu_budget(MemorySettings(kv_cache_memory=5)) == 5
    assert gpu_budget(MemorySettings(kv_cache_memory=5), total=1, weights=1, peak_activation=1) == 5
    plan = plan_memory(MemorySettings(num_blocks=7), ANY_LENGTH, bytes_per_block=BLOCK, budget=0, max_model_len=20)
    assert plan.num_blocks == 7


def test_a_cpu_takes_no_more_than_its_share() -> None:
    assert 0 < cpu_budget(MemorySettings()) <= min(GIB, available_memory())


def test_shrinks_only_where_the_length_is_open() -> None:
    settings = MemorySettings(num_blocks=4)
    assert plan_memory(settings, ANY_LENGTH, bytes_per_block=BLOCK, budget=0, max_model_len=1000).max_model_len == 64
    with pytest.raises(ConfigError, match="4 blocks, but one sequence of 1000 tokens needs 63"):
        plan_memory(
            settings, SchedulingSettings(max_model_len=1000), bytes_per_block=BLOCK, budget=0, max_model_len=1000
        )


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_cache_that_was_asked_for_and_cannot_be_had_is_the_settings_fault(kernels: str) -> None:
    """Another life of the worker would not get it either: exit status 78, not 70."""
    settings: Any = {"model": "models/pageant-stories-draft", "kernels": kernels, "kv_cache_memory": 1 << 50}
    with pytest.raises(ConfigError, match=r"cannot be allocated.*lower kv_cache_memory"):
        load_model(Settings.of(**settings))


STATE = 4 << 20


def with_states(memory: MemorySettings, budget: int = 0, *, rows: int = 256) -> MemoryPlan:
    scheduling = SchedulingSettings(max_num_seqs=rows, max_num_batched_tokens=2048)
    return plan_memory(
        memory, scheduling, bytes_per_block=BLOCK, budget=budget, max_model_len=4096, bytes_per_state=STATE
    )


def test_states_take_half_and_leave_as_many_rows_as_fit() -> None:
    plan = with_states(MemorySettings(), 6000 << 20)
    assert plan.states == StatesPlan(num_rows=250, num_snapshots=250, bytes_per_state=STATE)
    assert plan.num_blocks == 3000 and plan.num_bytes == 6000 << 20
    assert "states of 250 rows and 250 snapshots, 48000 tokens in all" in str(plan)


def test_what_few_rows_leave_goes_to_snapshots_and_then_to_blocks() -> None:
    assert with_states(MemorySettings(), 6000 << 20, rows=100).states == StatesPlan(100, 550, STATE)
    plan = with_states(MemorySettings(), 6000 << 20, rows=10)
    assert plan.states == StatesPlan(10, 80, STATE)
    assert plan.num_blocks == 6000 - 4 * (2 * 10 + 80)


def test_blocks_that_are_asked_for_by_number_come_with_all_rows() -> None:
    plan = with_states(MemorySettings(num_blocks=300), rows=10)
    assert (plan.num_blocks, plan.states) == (300, StatesPlan(10, 10, STATE))


def test_half_of_the_memory_must_hold_three_states() -> None:
    assert with_states(MemorySettings(num_blocks=0), 600 << 20, rows=1).states == StatesPlan(1, 8, STATE)
    with pytest.raises(ConfigError, match="raise kv_cache_memory"):
        with_states(MemorySettings(), 6 * STATE - 1)


def test_without_states_rows_are_those_of_the_settings() -> None:
    plan = plan_memory(MemorySettings(), ANY_LENGTH, bytes_per_block=BLOCK, budget=6000 << 20, max_model_len=4096)
    assert plan.states == StatesPlan(ANY_LENGTH.max_num_seqs) and plan.num_blocks == 6000
    assert "states" not in str(plan)


KIB = 1 << 10
WINDOW = (WindowBytes(512, 5 * KIB),)  # five of six layers see 512 tokens


def divided(memory: MemorySettings, budget: int = 0, *, rows: int = 256, full: int = KIB, longest: int = 8192) -> Any:
    scheduling = SchedulingSettings(max_model_len=longest, max_num_seqs=rows, max_num_batched_tokens=2048)
    return plan_memory(memory, scheduling, bytes_per_block=full, budget=budget, max_model_len=longest, sliding=WINDOW)


def test_layers_with_a_window_leave_half_of_their_blocks_to_the_others() -> None:
    plan = divided(MemorySettings(), 6000 * KIB)
    assert plan.windows == [(512, 500)]
    assert plan.num_blocks == 3500 and plan.num_bytes == 6000 * KIB
    assert "3500 blocks of 16 tokens, 500 for windows of 512, 56000 tokens in all" in str(plan)


def test_a_window_has_no_more_blocks_than_all_rows_hold() -> None:
    plan = divided(MemorySettings(), 60_000 * KIB, rows=4)
    assert plan.windows == [(512, 4 * 34 + 2 * 128)]
    assert plan.num_blocks == 60_000 - 5 * 392


def test_a_window_has_the_blocks_of_one_sequence_at_least() -> None:
    plan = divided(MemorySettings(), 260 * KIB, longest=1024)
    assert plan.windows == [(512, 34)] and plan.num_blocks == 90
    with pytest.raises(ConfigError, match=r"has 60 blocks, but one sequence of 1024 tokens needs 64"):
        divided(MemorySettings(), 230 * KIB, longest=1024)


def test_blocks_by_number_are_those_of_the_layers_without_a_window() -> None:
    assert divided(MemorySettings(num_blocks=600)).windows == [(512, 600)]
    plan = divided(MemorySettings(num_blocks=600), rows=2)
    assert (plan.num_blocks, plan.windows) == (600, [(512, 2 * 34 + 256)])


def test_where_all_layers_have_a_window_the_others_take_no_memory() -> None:
    plan = divided(MemorySettings(), 5000 * KIB, full=0)
    assert plan.windows == [(512, 1000)] and plan.num_blocks == 256 * 512 and plan.num_bytes == 5000 * KIB
    with pytest.raises(ConfigError, match="the KV cache has 0 blocks"):
        divided(MemorySettings(), 100 * KIB, full=0)
