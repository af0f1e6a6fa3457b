"""A draft model guesses what it would generate itself, whatever was guessed, told, taken back or missing before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.runner import ModelRunner
from engine.loading.load import load_model, load_runner
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.model import Extends
from services.draft.load import draft_settings, load_proposer
from services.draft.model import MOST_TOKENS, NEAR, ModelProposer, share_out
from services.draft.session import DraftSession
from shared.config import Settings
from shared.errors import ModelError
from shared.messages import AdmittedSequence, DraftProposals, DraftUpdate
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import KERNELS, random_prompt
from tests.engine.driver import GREEDY, Driver
from tests.kernels.cpu.natives import load_build

MODEL = Path(__file__).resolve().parents[3] / "models" / "pageant-stories-draft"
VOCAB = 4096
LENGTH = 1024  # that the model can address
SETTINGS = Settings.of(
    model=str(MODEL), draft=str(MODEL), dtype="float32", max_num_seqs=16, num_blocks=256, num_threads=1
)
PARAMS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3),
    "constrained": SamplingParams(temperature=0.9, min_tokens=9, logit_bias={300: 4.0}, bad_words_token_ids=[[16]]),
    "asked": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=0),
}


@dataclass
class Told:
    """A sequence as the scheduler has it."""

    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    num_told: int = 0
    is_open: bool = False


@dataclass
class Link:
    """A draft and the one who tells it."""

    proposer: ModelProposer
    rejection: bool = False
    sequences: dict[int, Told] = field(default_factory=dict)
    epoch: int = 1
    num_updates: int = 0
    closed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = DraftSession(self.proposer)

    def add(self, row: int, prompt: list[int], params: SamplingParams = GREEDY, seed: int = 0) -> Told:
        self.sequences[row] = Told(list(prompt), len(prompt), params, seed)
        return self.sequences[row]

    def close(self, row: int) -> None:
        del self.sequences[row]
        self.closed.append(row)

    def tell(self, wanted: Mapping[int, int], num_ahead: int = 0) -> None:
        told = {row: self.sequences[row] for row in wanted}
        opened = [admitted(row, one) for row, one in told.items() if not one.is_open]
        new = {row: one.token_ids[one.num_told :] for row, one in told.items()}
        self.num_updates += 1
        self.session.apply(
            DraftUpdate(
                epoch=self.epoch,
                update_id=self.num_updates,
                closed_rows=self.closed,
                opened=opened,
                rows=list(wanted),
                num_tokens=[one.num_told for one in told.values()],
                num_new=[len(tokens) for tokens in new.values()],
                new_token_ids=[token for tokens in new.values() for token in tokens],
                num_wanted=list(wanted.values()),
                num_ahead=num_ahead,
                rejection=self.rejection,
            )
        )
        self.closed = []
        for one in told.values():
            one.num_told = len(one.token_ids)

    def answers(self) -> list[DraftProposals]:
        found: list[DraftProposals] = []
        while not self.session.is_idle:
            found += self.session.turn()
        return found

    def ask(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """The proposals that come back, by row."""
        self.tell(wanted)
        found: dict[int, list[int]] = {}
        for answer in self.answers():
            assert not answer.lost_rows
            for row, num_tokens in zip(answer.rows, answer.num_tokens, strict=True):
                assert num_tokens == len(self.sequences[row].token_ids)
            found |= by_row(answer)
        return found


def admitted(row: int, sequence: Told) -> AdmittedSequence:
    sequence.is_open, sequence.num_told = True, len(sequence.token_ids)
    tokens = pack_tokens(sequence.token_ids)
    return AdmittedSequence(row, tokens, sequence.num_prompt, sequence.params, sequence.seed, [0])


def by_row(answer: DraftProposals) -> dict[int, list[int]]:
    drafts = iter(answer.draft_token_ids)
    counts = zip(answer.rows, answer.num_draft_tokens, strict=True)
    return {row: [next(drafts) for _ in range(count)] for row, count in counts}


@dataclass(frozen=True)
class Pair:
    proposer: ModelProposer
    runner: ModelRunner

    def expected(self, sequence: Told, count: int) -> list[int]:
        """What the model itself generates, to its end, in a runner that knows nothing of drafts."""
        self.runner.reset()
        driver = Driver(self.runner)
        live = driver.add(0, sequence.token_ids, sequence.params, seed=sequence.seed, eos_token_ids=[0])
        live.num_prompt = sequence.num_prompt
        length, ends = len(sequence.token_ids), set() if sequence.params.ignore_eos else {0}
        while len(live.token_ids) < length + count and not ends.intersection(live.token_ids[length:]):
            driver.step({0: len(live.token_ids) - live.num_computed})
        return live.token_ids[length:]


@pytest.fixture(scope="module", params=KERNELS)
def both(request: pytest.FixtureRequest) -> Pair:
    if request.param == "native":
        load_build("native")
    settings = SETTINGS.replace(kernels=request.param)
    return Pair(load_proposer(settings), load_runner(settings))


@pytest.fixture
def pair(both: Pair) -> Iterator[Pair]:
    both.proposer.reset()
    yield both


@pytest.mark.parametrize("name", PARAMS)
def test_the_guess_is_what_the_model_generates(pair: Pair, name: str) -> None:
    link = Link(pair.proposer)
    sequence = link.add(3, random_prompt(21, seed=1, vocab_size=VOCAB), PARAMS[name], seed=5)
    assert link.ask({3: 8}) == {3: pair.expected(sequence, 8)}


@pytest.mark.parametrize("name", PARAMS)
def test_wrong_guesses_leave_nothing_behind(pair: Pair, name: str) -> None:
    """Committed: a part of the guess or all of it, then tokens that were not guessed, over and over."""
    generator = random.Random(name)
    link = Link(pair.proposer)
    sequence = link.add(0, random_prompt(7, seed=2, vocab_size=VOCAB), PARAMS[name], seed=9)
    guess: list[int] = []
    kept = 0
    for _ in range(12):
        agreed = generator.randint(0, len(guess))
        sequence.token_ids += guess[:agreed]
        sequence.token_ids += random_prompt(generator.randint(0, 3), seed=generator.randrange(99), vocab_size=VOCAB)
        kept += agreed
        guess = link.ask({0: generator.randint(1, 6)})[0]
        assert guess == pair.expected(sequence, len(guess))
    assert kept > 5


def test_many_rows_and_one(pair: Pair) -> None:
    """Each of many gets what it would get alone; rows come, are told different lengths, and go."""
    generator = random.Random(4)
    link = Link(pair.proposer)
    for row, name in enumerate([*PARAMS, *PARAMS]):
        link.add(row, random_prompt(3 + 11 * row, seed=row, vocab_size=VOCAB), PARAMS[name], seed=row)
    for turn in range(4):
        wanted = {row: generator.randint(1, 5) for row in link.sequences}
        found = link.ask(wanted)
        for row, sequence in link.sequences.items():
            assert found[row] == pair.expected(sequence, wanted[row]), (turn, row)
            sequence.token_ids += found[row][: generator.randint(0, wanted[row])]
            sequence.token_ids.append(generator.randrange(3, VOCAB))
        link.close(turn)


def test_runs_ahead_with_the_same_tokens(pair: Pair) -> None:
    link = Link(pair.proposer)
    sequence = link.add(1, random_prompt(30, seed=3, vocab_size=VOCAB), PARAMS["seeded"], seed=2)
    expected = pair.expected(sequence, 12)
    link.tell({1: 3}, num_ahead=5)
    assert [by_row(answer)[1] for answer in link.answers()] == [expected[:3], expected[:8]]
    sequence.token_ids += expected[:4]
    link.tell({1: 3}, num_ahead=5)
    assert [by_row(answer)[1] for answer in link.answers()] == [expected[4:8], expected[4:12]]


def forwards(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward pass of the draft from now on."""
    seen: list[int] = []
    model = pair.proposer._model
    honest = model.forward

    def forward(batch: StepBatch) -> Tensor:
        seen.append(int(batch.scheduled.sum()))
        return honest(batch)

    monkeypatch.setattr(model, "forward", forward)
    if isinstance(model, Extends):
        extend = model.extend

        def several(batch: StepBatch, count: int, temperature: NDArray[np.float64], seeds: Ints) -> Ints:
            seen.extend([int(batch.scheduled.sum()), *[len(batch.rows)] * (count - 1)])
            return extend(batch, count, temperature, seeds)

        monkeypatch.setattr(model, "extend", several)
    return seen


def test_what_was_guessed_right_is_not_computed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = forwards(pair, monkeypatch)
    link = Link(pair.proposer)
    sequence = link.add(0, random_prompt(40, seed=3, vocab_size=VOCAB))
    guess = link.ask({0: 4})[0]
    assert seen == [40, 1, 1, 1]
    sequence.token_ids += guess[:2]
    assert link.ask({0: 2})[0] == guess[2:]
    assert seen == [40, 1, 1, 1], "two were left"
    sequence.token_ids += [guess[2], (guess[3] + 1) % VOCAB]
    link.ask({0: 2})
    assert seen == [40, 1, 1, 1, 1, 1], "only what was not guessed"


def test_prompts_are_read_in_chunks_that_others_do_not_wait_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(pair.proposer)
    long = link.add(0, random_prompt(900, seed=5, vocab_size=VOCAB))
    short = link.add(1, random_prompt(9, seed=6, vocab_size=VOCAB))
    expected = {0: pair.expected(long, 3), 1: pair.expected(short, 2)}
    seen = forwards(pair, monkeypatch)
    link.tell({0: 3, 1: 2})
    first, second = link.answers()
    assert by_row(first) == {1: expected[1]} and by_row(second) == {0: expected[0]}
    assert seen == [9, 1, MOST_TOKENS, 900 - MOST_TOKENS, 1, 1]


def test_nothing_follows_an_end(pair: Pair) -> None:
    prompt = random_prompt(12, seed=8, vocab_size=VOCAB)
    tokens = pair.expected(Told(prompt, 12, GREEDY, 0), 6)
    end = tokens[3]
    place = tokens.index(end)
    link = Link(pair.proposer)
    link.add(0, prompt, msgspec.structs.replace(GREEDY, stop_token_ids=[end]))
    link.add(1, prompt, msgspec.structs.replace(GREEDY, max_tokens=2))
    assert link.ask({0: 6, 1: 6}) == {0: tokens[: place + 1], 1: tokens[:2]}
    link.sequences[1].token_ids += tokens[:2]
    assert link.ask({1: 4}) == {1: []}


def test_nothing_is_guessed_beyond_its_length(pair: Pair) -> None:
    link = Link(pair.proposer)
    assert pair.proposer.capacity.max_model_len == LENGTH
    near = link.add(0, random_prompt(LENGTH - 2, seed=1, vocab_size=VOCAB))
    link.add(1, random_prompt(LENGTH + 30, seed=2, vocab_size=VOCAB))
    found = link.ask({0: 5, 1: 5})
    assert found == {0: pair.expected(near, 2), 1: []}
    near.token_ids += [7, 8, 9, 10]
    link.sequences[1].token_ids += [5]
    assert link.ask({0: 5, 1: 5}) == {0: [], 1: []}
    link.close(0)
    link.close(1)
    link.tell({})
    assert len(pair.proposer._free) == pair.proposer._num_blocks


def small(pair: Pair, num_blocks: int) -> ModelProposer:
    """The draft with a pool of its own of so few blocks."""
    settings = draft_settings(SETTINGS).replace(num_blocks=num_blocks)
    kernels = "native" if "Native" in type(pair.proposer._model).__name__ else "torch"
    return ModelProposer(load_model(settings.replace(kernels=kernels)), name="small")


def test_a_pool_that_is_too_small_leaves_some_without(pair: Pair) -> None:
    """Three of about five blocks each in a pool of twelve: one that lacks them gets nothing, and later its own."""
    proposer = small(pair, num_blocks=12)
    link = Link(proposer)
    for row in range(3):
        params = msgspec.structs.replace(PARAMS["seeded"], ignore_eos=True)
        link.add(row, random_prompt(66 + row, seed=row, vocab_size=VOCAB), params, seed=row)
    starved = served = 0
    for turn in range(36):
        if turn == 24:
            link.close(min(link.sequences))
        wanted = dict.fromkeys(link.sequences, 4)
        found = link.ask(wanted)
        for row, sequence in link.sequences.items():
            starved, served = starved + (not found[row]), served + (turn > 24 and bool(found[row]))
            expected = pair.expected(sequence, 4)
            assert found[row] == expected[: len(found[row])], "all of it, or what was left of the last one, or nothing"
            sequence.token_ids += expected[:1] if turn % 2 else [3]
        held = [block for one in proposer._followed.values() for block in one.block_ids]
        assert sorted(held + proposer._free) == list(range(12))
        if turn < 24:
            assert any(found.values())
    assert starved > 10 and served > 10


def test_another_epoch_begins_from_nothing(pair: Pair) -> None:
    link = Link(pair.proposer)
    link.add(0, random_prompt(30, seed=1, vocab_size=VOCAB))
    link.ask({0: 3})
    link.sequences.clear()
    link.epoch, link.num_updates = 2, 0
    other = link.add(0, random_prompt(25, seed=2, vocab_size=VOCAB))
    assert link.ask({0: 3}) == {0: pair.expected(other, 3)}


def test_what_cannot_be_read_is_lost_and_opened_again(pair: Pair) -> None:
    link = Link(pair.proposer)
    link.add(0, [1, 2, VOCAB])
    sequence = link.add(1, [1, 2, 3])
    link.tell({0: 1, 1: 2})
    (answer,) = link.answers()
    assert answer.lost_rows == [0] and by_row(answer) == {1: pair.expected(sequence, 2)}
    sequence.token_ids.append(-1)
    link.tell({1: 2})
    (answer,) = link.answers()
    assert (answer.lost_rows, answer.rows) == ([1], [])
    assert len(pair.proposer._free) == pair.proposer._num_blocks
    sequence.token_ids[-1], sequence.is_open = 4, False
    assert link.ask({1: 2}) == {1: pair.expected(sequence, 2)}


def test_rejection_sends_what_each_token_was_drawn_from(pair: Pair) -> None:
    link = Link(pair.proposer, rejection=True)
    prompt = random_prompt(20, seed=1, vocab_size=VOCAB)
    greedy = link.add(0, prompt, GREEDY)
    link.add(1, prompt, PARAMS["truncated"], seed=3)
    link.tell({0: 3, 1: 4})
    (answer,) = link.answers()
    assert by_row(answer)[0] == pair.expected(greedy, 3)
    assert len(answer.distributions) == len(answer.draft_token_ids) == 7
    sizes = []
    for token, distribution in zip(answer.draft_token_ids, answer.distributions, strict=True):
        token_ids, probs = unpack_tokens(distribution.token_ids), np.frombuffer(distribution.probs, "<f4")
        assert token in token_ids and len(token_ids) == len(probs)
        assert probs.sum() == pytest.approx(1.0, abs=1e-4) and (probs > 0).all()
        sizes.append(len(token_ids))
    assert sizes[:3] == [1, 1, 1] and 1 < max(sizes[3:]) <= 40


def test_rejection_draws_from_a_stream_of_its_own(pair: Pair) -> None:
    prompt = random_prompt(20, seed=1, vocab_size=VOCAB)
    found = []
    for rejection in (False, True):
        pair.proposer.reset()
        link = Link(pair.proposer, rejection=rejection)
        for row in range(4):
            link.add(row, prompt, SamplingParams(temperature=1.0), seed=row)
        found.append(link.ask(dict.fromkeys(range(4), 4)))
    assert found[0] != found[1]


def test_a_second_model_is_loaded_beside_the_first() -> None:
    given = {"draft_num_threads": 3, "draft_kv_cache_memory": 5 << 20, "num_blocks": 7, "num_threads": 2}
    settings = Settings.of(draft="here", **given)
    changed = draft_settings(settings)
    assert (changed.engine.model, changed.engine.num_threads) == ("here", 3)
    assert (changed.memory.kv_cache_memory, changed.memory.num_blocks) == (5 << 20, 0)
    with pytest.raises(ModelError, match="does not exist"):
        load_proposer(Settings.of(draft="/no/such/draft"))


@pytest.mark.parametrize(("asked", "served"), [(0, LENGTH), (100, 100), (50_000, LENGTH)])
def test_a_draft_may_be_shorter_than_its_target(asked: int, served: int) -> None:
    capacity = load_proposer(SETTINGS.replace(kernels="torch", max_model_len=asked)).capacity
    assert (capacity.max_model_len, capacity.num_rows, capacity.vocab_size) == (served, 16, VOCAB)
    assert capacity.model == "pageant-stories-draft"


def test_the_tokens_of_a_forward_are_shared_out() -> None:
    def shared(*behind: int) -> list[int]:
        return [int(count) for count in share_out(np.array(behind))]

    assert shared(1, NEAR, 5) == [1, NEAR, 5]
    assert shared(1, 300, 2) == [1, 0, 2], "those behind wait for those that are near"
    assert shared(300, 100) == [300, 100]
    assert shared(900) == [MOST_TOKENS]
    assert shared(900, 100, 900) == [MOST_TOKENS - 100, 100, 0]
    assert sum(shared(*[NEAR] * 100)) == MOST_TOKENS
