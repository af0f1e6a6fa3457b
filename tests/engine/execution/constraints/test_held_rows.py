"""Rows that are held to a grammar, and rows whose states go back, from step to step of a whole runner."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.execution.constraints.row_automata import RowAutomata
from shared.automata.vocabulary import Vocabulary
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.execution.constraints.test_row_automata import EOS, TOKENIZER, choice, load

PROMPT = 12


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_row_s_grammar_goes_on_with_the_tokens_that_it_takes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-tied", further={"vocab_size": TOKENIZER.vocab_size})
    driver = Driver(make_runner(tmp_path))
    automata = RowAutomata(load, patience=20.0)
    driver.runner._automata = automata
    held = driver.add(0, [5, 6, 7], SamplingParams(temperature=0.0, grammar=choice("yes")), eos_token_ids=EOS)
    driver.generate(6)
    automata.reset()
    text = TOKENIZER.decode([token for token in held.output if token not in EOS])
    assert text == "yes" and held.output[-1] in EOS


def test_a_row_whose_grammar_is_late_keeps_no_other_from_its_token(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-tied", further={"vocab_size": TOKENIZER.vocab_size})
    alone = Driver(make_runner(tmp_path))
    expected = alone.add(1, [8, 9, 10])
    alone.generate(4)
    free = threading.Event()

    def late(eos_token_ids: Sequence[int]) -> Vocabulary:
        assert free.wait(20)
        return load(eos_token_ids)

    driver = Driver(make_runner(tmp_path))
    automata = driver.runner._automata = RowAutomata(late, patience=20.0)
    held = driver.add(0, [5, 6, 7], SamplingParams(temperature=0.0, grammar=choice("yes")), eos_token_ids=EOS)
    other = driver.add(1, [8, 9, 10])
    assert driver.step({0: 3, 1: 3}).num_sampled == [0, 1]
    held.num_computed -= 1  # as the scheduler has it
    free.set()
    row = automata.of(0)
    assert row is not None
    automata.wait([row], others=False)
    driver.generate(4)
    automata.reset()
    assert other.output[:4] == expected.output[:4]
    assert TOKENIZER.decode([token for token in held.output if token not in EOS]) == "yes"


def test_a_state_that_went_back_sees_the_tokens_that_it_has_not_seen(tmp_path: Path) -> None:
    """Wrong drafts were verified: the next step computes again what was kept of them, and the row goes on as alone."""
    save_checkpoint(tmp_path, "qwen3.5")
    prompt = random_prompt(PROMPT, seed=1)
    alone = Driver(make_runner(tmp_path))
    expected = alone.add(0, prompt)
    alone.generate(8)
    driver = Driver(make_runner(tmp_path))
    row = driver.add(0, prompt)
    driver.step({0: PROMPT})
    while (place := len(row.output)) < 6:  # one draft is right, the next is wrong
        driver.step({0: 3}, {0: [expected.output[place], (expected.output[place + 1] + 1) % 100]})
    driver.generate(8)
    assert row.output[:8] == expected.output[:8]


def test_a_row_begins_behind_a_prefix_with_the_state_that_was_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3.5")
    driver = Driver(make_runner(tmp_path))
    size = driver.runner.capacity.block_size
    prompt = random_prompt(2 * size + 3, seed=1)
    first = driver.add(0, prompt)
    driver.step({0: 2 * size}, state_saves=[(0, 0, 1)])
    driver.generate(4)
    again = driver.add(1, prompt)
    again.blocks, again.num_computed = first.blocks[:2], 2 * size
    result = driver.step({1: 3}, state_loads=[(1, 0, 1)])
    assert result.refused_rows == []
    driver.generate(4)
    assert again.output == first.output[:4]
