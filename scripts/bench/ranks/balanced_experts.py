"""What moving whole experts between ranks is worth where tokens take one rank's (`bench_ranks --balanced`)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import load_file, save_file

from engine.execution.runner import ModelRunner
from engine.modeling.ranks.ranks import RankDecoder
from scripts.bench.common.report import Result
from scripts.bench.kernels.decoded_rows import DecodedRows, beside
from shared.config import Settings

ROWS, WARM, ROUNDS, INTERVAL = 32, 200, 9, 32
FASTER = 1.1  # target: moved experts against those that stay

Grouped = Callable[[Settings], AbstractContextManager[tuple[ModelRunner, Any]]]


def skew(source: Path, to: Path) -> None:
    """A mixture whose tokens take experts of the first half alone: the others' logits are 0, where some of the first
    half's are above."""
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("*.gguf"))
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name, router in tensors.items():
            if name.endswith(("mlp.gate.weight", "router.weight")):
                router[len(router) // 2 :] = 0
        save_file(tensors, file, {"format": "pt"})


def measure_balanced(settings: Settings, grouped: Grouped, steps: int) -> list[Result]:
    """Two groups decode 32 rows in turns: one leaves experts where they are, the other moves them.

    Raises RuntimeError where the two groups sample different tokens.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = Path(directory) / "skewed"
        skew(Path(settings.engine.model), model)
        num_steps = WARM + ROUNDS * steps
        settings = settings.replace(model=str(model), max_model_len=0, num_blocks=ROWS * (num_steps // 16 + 16))
        moved = settings.replace(enable_eplb=True, eplb_step_interval=INTERVAL)
        groups = [stack.enter_context(grouped(one))[0] for one in (settings, moved)]
        stays, moves = (DecodedRows(runner, ROWS, num_steps) for runner in groups)
        for _ in range(WARM // 8):  # the second group moves its experts meanwhile
            _in_turns(stays, moves, 8)
        pairs = [_in_turns(stays, moves, steps) for _ in range(ROUNDS)]
        what, ratio = (
            f"step of experts that stay over moved ones, {ROWS} rows",
            median(first / second for first, second in pairs),
        )
        return [
            Result("balance of ranks (mean over largest), experts that stay", _balance(groups[0]), ""),
            Result("balance of ranks, moved experts", _balance(groups[1]), ""),
            Result(what, ratio, "x", at_least=FASTER, note=beside(pairs)),
        ]


def _in_turns(stays: DecodedRows, moves: DecodedRows, steps: int) -> tuple[float, float]:
    """Seconds of a step of each group."""
    seconds, wanted = stays.steps(steps)
    moved, tokens = moves.steps(steps)
    if tokens != wanted:
        raise RuntimeError("the group that moves experts sampled other tokens than the group that does not")
    return seconds, moved


def _balance(runner: ModelRunner) -> float:
    """The mean of layers."""
    assert isinstance(runner._model, RankDecoder)
    found = runner._model.expert_balances
    return sum(found) / len(found)
