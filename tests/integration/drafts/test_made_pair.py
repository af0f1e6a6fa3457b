"""scripts/bench/speculation/checkpoint.py: the made models compute the maps that they were made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.bench.common.specs import llama
from scripts.bench.speculation.checkpoint import MadePair, ensure_pair, one_cycle, partly_exchanged
from tests.integration.engine import Engine, ask, token_ids

VOCAB, RATE = 512, 0.75
SMALL = llama(128, 256, 2, (4, 2), VOCAB, head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> MadePair:
    return ensure_pair(tmp_path_factory.mktemp("pair"), rate=RATE, target=SMALL, draft=SMALL)


def walk(start: int, successors: Tensor, length: int) -> list[int]:
    visited = [start]
    for _ in range(length):
        visited.append(int(successors[visited[-1]]))
    return visited[1:]


def continuations(directory: Path, starts: list[int], length: int) -> list[list[int]]:
    engine = Engine(model=str(directory), kernels="torch")
    asks = [ask([5, 9, start], temperature=0.0, max_tokens=length) for start in starts]
    return [request[0] for request in token_ids(engine.generate(asks))]


def test_the_target_walks_its_cycle(pair: MadePair) -> None:
    starts = [3, 77, 400]
    assert continuations(pair.target, starts, 60) == [walk(start, pair.successors(), 60) for start in starts]


def test_the_draft_follows_its_own_map_from_every_token(pair: MadePair) -> None:
    guessed = continuations(pair.draft, list(range(VOCAB)), 1)
    assert guessed == [[int(guess)] for guess in pair.guesses()]


def test_the_draft_agrees_at_the_chosen_rate(pair: MadePair) -> None:
    agrees = pair.guesses() == pair.successors()
    assert int(agrees.sum()) == RATE * VOCAB
    cycle = torch.tensor(walk(0, pair.successors(), VOCAB))
    both = (agrees[cycle] & agrees[cycle.roll(-1)]).float().mean()
    assert float(both) == pytest.approx(RATE**2, abs=0.05), "whether one guess is right says nothing of the next"


def test_the_map_is_one_cycle_and_the_draft_s_a_permutation_too() -> None:
    successors = one_cycle(1000)
    assert sorted(walk(0, successors, 1000)) == list(range(1000))
    for rate in (0.0, 0.3, 1.0):
        guesses = partly_exchanged(successors, rate)
        assert sorted(guesses.tolist()) == list(range(1000))
        assert int((guesses == successors).sum()) == rate * 1000


def test_a_pair_is_made_once_for_the_same_wishes(pair: MadePair) -> None:
    weights = pair.target / "model.safetensors"
    made = weights.stat().st_mtime_ns
    ensure_pair(pair.directory, rate=RATE, target=SMALL, draft=SMALL)
    assert weights.stat().st_mtime_ns == made
