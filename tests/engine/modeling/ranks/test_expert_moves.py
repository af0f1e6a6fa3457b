"""Whole experts change their ranks while a group computes, and no bit of what it says changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from engine.description.ranks import Place, why_not_cut
from engine.description.reading import read_config
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from engine.modeling.native.decoder import NativeDecoder
from engine.modeling.ranks.expert_balancer import ExpertBalancer, held_by
from engine.modeling.ranks.expert_placement import moves_between
from engine.modeling.ranks.ranks import RankDecoder
from kernels.cpu.binding.ranks import ExpertMove
from shared.config import load_settings
from shared.errors import ConfigError, FatalError
from tests.engine.checkpoints import random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.modeling.ranks.test_expert_ranks import FORMATS, SIZES
from tests.engine.modeling.ranks.test_linked_ranks import streams
from tests.engine.modeling.ranks.test_ranks import say, settings_of
from tests.engine.ranks import linked, ranked, ranked_stages
from tests.engine.weights.quantised.encoders import change_config, change_tensors, gptq
from tests.engine.weights.quantised.test_gpt_oss import save_stacks


def decoder_of(runner: ModelRunner) -> NativeDecoder:
    assert isinstance(runner._model, RankDecoder)
    return runner._model._decoder


class Shuffler(ExpertBalancer):
    """Moves some layer's experts before each step, to anywhere."""

    def __init__(self, decoder: NativeDecoder, ranks: int) -> None:
        super().__init__(decoder.whole_experts, ranks, 1, decoder.move_experts)
        self.random, self.num_moves = Random(7), 0

    def step(self) -> None:
        layer = self.random.choice(self._layers)
        held = held_by(layer.mixture, self._ranks)
        experts = list(range(len(layer.loads)))
        self.random.shuffle(experts)
        target = [set(self.random.sample(experts, len(one))) for one in held]
        for missing in set(experts) - set().union(*target):
            double = [
                (rank, one) for rank, own in enumerate(target) for one in own if sum(one in each for each in target) > 1
            ]
            rank, one = self.random.choice(double)
            target[rank] = target[rank] - {one} | {missing}
        for order in list(moves_between(held, target))[:2]:
            self._move(layer.number, order)
            self.num_moves += len(order)


def shuffled(runner: ModelRunner, ranks: int) -> Shuffler:
    model = runner._model
    assert isinstance(model, RankDecoder)
    model._balancer = shuffler = Shuffler(model._decoder, ranks)
    return shuffler


def assert_same(directory: Path, ranks: int, redundant: int = 0, *, over_tcp: bool = False, **formats: Any) -> None:
    settings = settings_of(directory, **formats)
    alone = say(load_runner(settings, has_windows=False))
    spread = settings.replace(enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=redundant)
    with (linked if over_tcp else ranked)(spread, ranks, has_windows=False) as (runner, *_):
        shuffler = shuffled(runner, ranks)
        assert say(runner) == alone
        assert shuffler.num_moves > 10


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_in_every_format(formats: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    assert_same(tmp_path, 2, **formats)


@pytest.mark.parametrize("redundant", [1, 4])
def test_experts_of_which_there_are_several(redundant: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    assert_same(tmp_path, 3, redundant, dtype="bfloat16")


@pytest.mark.parametrize("variant", ["mixtral", "gpt-oss", "qwen2-moe"])
def test_every_kind_of_mixture(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, "native", SIZES)
    assert_same(tmp_path, 2, 2, dtype="float32")


@pytest.mark.parametrize("redundant", [0, 3])
def test_over_tcp(redundant: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    assert_same(tmp_path, 3, redundant, over_tcp=True, dtype="float32")


def test_stacks_of_codes_with_biases(tmp_path: Path) -> None:
    save_stacks(tmp_path, "native", {"num_key_value_heads": 4})
    assert_same(tmp_path, 2, 1, dtype="bfloat16")


def test_many_streams(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES | {"max_position_embeddings": 256})
    settings = settings_of(tmp_path, max_num_seqs=16).replace(num_blocks=256)
    wanted = streams(load_runner(settings, has_windows=False))
    spread = settings.replace(enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=2)
    with ranked(spread, 2, has_windows=False) as (runner, _):
        shuffled(runner, 2)
        assert streams(runner) == wanted


def test_pieces_larger_than_the_room_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for three moves of a few vectors each."""
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    settings = settings_of(tmp_path, dtype="float32")
    wanted = say(load_runner(settings, has_windows=False))
    with ranked(settings.replace(enable_expert_parallel=True, enable_eplb=True), 2, has_windows=False) as (runner, _):
        decoder, ranks = decoder_of(runner), 2
        shuffler = Shuffler(decoder, ranks)
        for _ in range(12):
            layer = shuffler.random.choice(shuffler._layers)
            first, second = (sorted(one) for one in held_by(layer.mixture, ranks))
            pairs = list(zip(first, second, strict=False))  # all of a layer change their ranks at once
            moves = [move for a, b in pairs for move in (ExpertMove(a, 0, b, 1), ExpertMove(b, 1, a, 0))]
            decoder.move_experts(layer.number, moves)
        assert say(runner) == wanted


def imbalance(runner: ModelRunner, ranks: int) -> list[list[int]]:
    return [[len(one) for one in held_by(mixture, ranks)] for _, mixture in decoder_of(runner).whole_experts]


def one_of_two(tensors: dict[str, Tensor]) -> None:
    """Every token takes expert 0 or 1, which the first rank has both."""
    for name, router in tensors.items():
        if name.endswith("mlp.gate.weight"):
            router[0] = 8 * router[0]
            router[1] = -router[0]


def test_experts_move_by_what_is_counted(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    change_tensors(tmp_path, one_of_two)
    settings = settings_of(tmp_path, dtype="float32")
    spread = settings.replace(
        enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=1, eplb_step_interval=4
    )
    alone = load_runner(settings)
    wanted = said(alone)
    with ranked(spread, 2) as (runner, _):
        mixtures = decoder_of(runner).whole_experts
        before = [one.holders.tolist() for _, one in mixtures if one.holders is not None]
        rooms = imbalance(runner, 2)
        assert said(runner) == wanted
        assert all(one.loads.sum() > 0 for _, one in mixtures)
        after = [one.holders.tolist() for _, one in mixtures if one.holders is not None]
        assert [bits[:2] for bits in before] == [[1, 1]] * len(before)
        assert all(bits[0] | bits[1] == 3 for bits in after), "experts 0 and 1 are with both ranks"
        assert imbalance(runner, 2) == rooms, "no rank has more than it had"


def said(runner: ModelRunner) -> list[list[int]]:
    driver = Driver(runner)
    driver.add(0, random_prompt(24, seed=3))
    driver.add(1, [5, 6, 7])
    driver.generate(40)
    return [driver.live[row].output for row in (0, 1)]


def test_stages_of_ranks_move_experts_each_for_itself(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    change_tensors(tmp_path, one_of_two)
    settings = settings_of(tmp_path, dtype="float32")
    wanted = said(load_runner(settings, has_windows=False))
    spread = settings.replace(enable_expert_parallel=True, enable_eplb=True, eplb_step_interval=4)
    with ranked_stages(spread, 2, has_windows=False) as (runner, group):
        assert said(runner) == wanted
        assert isinstance(group.within.model, RankDecoder)
        assert min(group.within.model.expert_balances) > 0.6, "experts 0 and 1 are with one rank no more"


@pytest.mark.parametrize(
    "wrong",
    [
        [ExpertMove(0, 1, 4, 1)],  # from a rank that does not have it
        [ExpertMove(4, 1, 5, 0)],  # over one that the rank does not have
        [ExpertMove(0, 0, 1, 0)],  # to a rank that has it
        [ExpertMove(99, 1, 0, 0)],
        [ExpertMove(4, 7, 0, 0)],
        [],
    ],
    ids=str,
)
def test_an_order_that_cannot_be_ends_the_group(wrong: list[ExpertMove], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    spread = settings_of(tmp_path, dtype="float32").replace(enable_expert_parallel=True, enable_eplb=True)
    with ranked(spread, 2, has_windows=False) as (runner, _):
        decoder_of(runner).move_experts(decoder_of(runner).whole_experts[0][0], wrong)
        with pytest.raises(FatalError, match="its ranks read different steps"):
            said(runner)


def gptq_by_content(directory: Path) -> None:
    """Codes of which some experts' fit into fewer bytes of zeros than others'."""

    def encode(tensors: dict[str, Tensor]) -> None:
        for name in [name for name, one in tensors.items() if "layers" in name and one.ndim == 2 and not len(one) % 8]:
            stored, _ = gptq(tensors.pop(name), symmetric="experts.1" not in name)
            tensors.update({name.removesuffix(".weight") + suffix: one for suffix, one in stored.items()})

    change_tensors(directory, encode)
    change_config(directory, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False})


def test_experts_packed_by_what_is_in_them_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    gptq_by_content(tmp_path)
    spread = settings_of(tmp_path, quantization="none").replace(enable_expert_parallel=True, enable_eplb=True)
    why = r"enable_eplb is set, but layer \d has experts that are packed in several"
    with pytest.raises(ConfigError, match=why), ranked(spread, 2):
        raise AssertionError("it starts")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"enable_eplb": True}, "enable_eplb needs enable_expert_parallel"),
        ({"num_redundant_experts": 2}, "num_redundant_experts needs enable_expert_parallel"),
        (
            {"num_redundant_experts": 2, "enable_expert_parallel": True, "tensor_parallel_size": 2},
            "num_redundant_experts needs enable_eplb",
        ),
        ({"num_redundant_experts": -1}, "num_redundant_experts must not be negative"),
        ({"eplb_step_interval": 0}, "eplb_step_interval must be at least 1"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_settings(given, environ={})


def test_more_copies_than_ranks_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", "native", SIZES)
    why_not: Callable[..., str] = why_not_cut
    reason = why_not(read_config(tmp_path), 2, whole_experts=True, redundant=8)
    assert reason == "num_redundant_experts is 8, but 2 ranks of 7 experts have room for 7"
    assert Place(0, 2, whole_experts=True, redundant=7).leads and not why_not(
        read_config(tmp_path), 2, whole_experts=True, redundant=7
    )
