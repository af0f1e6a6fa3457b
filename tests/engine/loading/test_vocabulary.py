"""The vocabulary is read while the model loads, once, for the ends that the checkpoint names."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.loading import vocabulary
from engine.loading.load import load_runner
from engine.loading.vocabulary import GrammarVocabulary
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary, load_vocabulary
from shared.config import Settings
from shared.text.tokenization import load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "models" / "pageant-stories"
SIZE = 4096
ENDS = load_tokenizer(MODEL).defaults.eos_token_ids


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ends of each vocabulary that was read."""
    made: list[list[int]] = []

    def load(directory: Path, size: int, eos_token_ids: Sequence[int], *tokenizer: Any) -> Vocabulary:
        made.append(list(eos_token_ids))
        return load_vocabulary(directory, size, eos_token_ids, *tokenizer)

    monkeypatch.setattr(vocabulary, "load_vocabulary", load)
    return made


def until_read() -> None:
    for thread in threading.enumerate():
        if thread.name == "vocabulary":
            thread.join(20)


def test_it_is_read_once_and_then_there(loads: list[list[int]]) -> None:
    made = GrammarVocabulary(MODEL, SIZE)
    made.prepare()
    until_read()
    assert loads == [ENDS]
    assert made(ENDS) is made(ENDS) and loads == [ENDS]
    other = made([*ENDS, 5])
    assert other.eos_token_ids == (*ENDS, 5) and len(loads) == 2


def test_a_request_that_comes_meanwhile_reads_it_no_second_time(loads: list[list[int]]) -> None:
    made = GrammarVocabulary(MODEL, SIZE)
    made.prepare()
    found = made(ENDS)
    until_read()
    assert made(ENDS) is found and loads == [ENDS], "it was not read again"


def test_a_checkpoint_without_a_tokenizer_refuses_grammars_alone(tmp_path: Path) -> None:
    made = GrammarVocabulary(tmp_path, SIZE)
    made.prepare()
    until_read()
    with pytest.raises(GrammarError):
        made([1])


def test_a_worker_reads_it_before_the_first_request(loads: list[list[int]]) -> None:
    load_runner(Settings.of(model=str(MODEL), num_blocks=64), prepares=True)
    until_read()
    assert loads == [ENDS]
