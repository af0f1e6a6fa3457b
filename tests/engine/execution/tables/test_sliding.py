"""Layers that see a window in blocks of their own, which go to other rows once the window has left them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.loading.load import load_runner
from shared.config import Settings
from shared.messages.steps import SlidingPlan, StepPlan
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver

SIZE, PROMPT, COUNT = 8, 30, 24  # tokens of a block, of a prompt, of an output


class Windows(Driver):
    """Gives each row's layers with windows so many blocks as the tokens that they see need."""

    def __init__(self, directory: Path) -> None:
        settings = Settings.of(model=str(directory), kernels="torch", num_blocks=64, block_size=SIZE, max_num_seqs=4)
        super().__init__(load_runner(settings, has_windows=True))
        (self.sliding,) = self.runner.capacity.sliding
        self.tables: dict[int, list[int | None]] = {}  # None: it has left that place
        self.unused = list(range(self.sliding.num_blocks))
        random.Random(1).shuffle(self.unused)
        self.given: list[int] = []

    def plan(self, schedule: Mapping[int, int], *more: Any, **others: Any) -> StepPlan:
        plan = super().plan(schedule, *more, **others)
        left, counts, blocks = [], list[int](), list[int]()
        for row, computed, scheduled in zip(
            plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            table = self.tables.setdefault(row, [])
            first = max(0, computed - self.sliding.window + 1) // SIZE
            gone = [block for block in table[:first] if block is not None]
            self.unused += gone  # the next one to be given away
            table[:first] = [None] * first
            left.append(len(gone))
            new = [self.unused.pop() for _ in range(-(-(computed + scheduled) // SIZE) - len(table))]
            table += new
            counts.append(len(new))
            blocks += new
        self.given += blocks
        return msgspec.structs.replace(plan, sliding=[SlidingPlan(left, counts, blocks, [])])


def test_rows_say_the_same_whatever_was_in_their_windows_blocks_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gemma3", further={"layer_types": ["sliding_attention", "full_attention"] * 2,
                                                 "num_hidden_layers": 4})  # fmt: skip
    alone, driver = Driver(make_runner(tmp_path)), Windows(tmp_path)
    for one in (alone, driver):
        for row in range(3):
            one.add(row, random_prompt(PROMPT + row, seed=row))
        one.generate(COUNT, chunk=13)
    assert [row.output for row in driver.live.values()] == [row.output for row in alone.live.values()]
    assert len(driver.given) > len(set(driver.given)), "blocks were given again"
