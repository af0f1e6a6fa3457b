"""How a model is divided into stages, and which settings cannot be."""

from __future__ import annotations

import pytest

from engine.description.ranks import Place
from engine.description.stages import Stage, divide_layers, why_not_staged
from shared.config import load_settings
from shared.errors import ConfigError
from tests.engine.loading.test_ranks import spec_of


@pytest.mark.parametrize(
    ("num_layers", "head", "stages", "bounds"),
    [
        (4, 0, 2, [0, 2, 4]),
        (30, 80, 2, [0, 19, 30]),  # the last stage has the head, of eight layers' weights
        (7, 0, 3, [0, 2, 5, 7]),
        (3, 1000, 3, [0, 1, 2, 3]),  # a head that is more than all layers
        (2, 1000, 2, [0, 1, 2]),
    ],
)
def test_stages_have_about_as_many_weights_and_a_layer_each(
    num_layers: int, head: int, stages: int, bounds: list[int]
) -> None:
    assert divide_layers([10] * num_layers, head, stages) == bounds


def test_ranks_are_stages_one_behind_the_other_and_the_leader_is_the_last() -> None:
    spec = spec_of(num_hidden_layers=6)
    stages = [Stage.of(Place(rank, 3), spec) for rank in (1, 2, 0)]
    assert [(one.begins, one.ends) for one in stages] == [(True, False), (False, False), (False, True)]
    assert sum((one.cut_spec(spec).layers for one in stages), ()) == spec.layers


@pytest.mark.parametrize(
    ("changes", "stages", "reason"),
    [
        ({}, 2, ""),
        ({}, 3, "pipeline_parallel_size is 3, but the model has 2 layers: a stage needs one"),
        ({"architectures": ["Olmo2ForCausalLM"]}, 2, ""),
    ],
)
def test_what_cannot_be_divided_is_said_in_a_line(changes: dict[str, object], stages: int, reason: str) -> None:
    assert why_not_staged(spec_of(**changes), stages) == reason


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kernels": "torch"}, r"^pipeline_parallel_size needs native kernels on a CPU, but kernels is 'torch'$"),
        ({"device": "cuda"}, r"^pipeline_parallel_size needs native kernels on a CPU, but device is 'cuda'$"),
        ({"lora_modules": "a=/a"}, "^lora_modules must be empty where pipeline_parallel_size is above 1"),
        ({"draft": "mtp"}, r"^draft is 'mtp', but a group of ranks \(pipeline_parallel_size above 1\)"),
        (
            {"tensor_parallel_size": 2, "executor": "ray"},
            "^executor is 'ray', which places no stages that are groups of ranks: use local or hosts$",
        ),
        ({"tensor_parallel_size": 33}, "^tensor_parallel_size times pipeline_parallel_size must be at most 64$"),
        ({"pipeline_parallel_size": 0}, "^pipeline_parallel_size must be at least 1, got 0$"),
        ({"pipeline_parallel_size": 65}, "^pipeline_parallel_size must be at most 64$"),
    ],
)
def test_settings_that_a_pipeline_cannot_have(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings({"pipeline_parallel_size": 2, **wrong}, environ={})
