"""Steps in the library's queue: as if each were called for, and none is lost between threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.cpu.binding.native import Native, StepColumns
from kernels.cpu.binding.queued import QueuedStep
from kernels.ops.sampling.sampled_columns import SampledColumns
from tests.kernels.cpu.native.native_models import MLP, Decoder, Layer, Linear, Norm, normal
from tests.kernels.cpu.native.native_running import Running, rope
from tests.kernels.cpu.natives import BUILDS, load_build

HIDDEN, VOCAB, PROMPT, STEPS = 80, 150, 9, 40


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


def running(native: Native, seed: int = 0) -> Running:
    norms = {"input_norm": Norm.random(HIDDEN, 20), "mlp_norm": Norm.random(HIDDEN, 22)}
    layer = Layer.random(HIDDEN, (6, 2, 32), MLP.random(HIDDEN, 112, 1), 9, rotation=rope(32, 1e4), **norms)
    head, norm = Linear.random(VOCAB, HIDDEN, 90), Norm.random(HIDDEN, 92)
    decoder = Decoder(layers=[layer] * 3, embedding=normal(VOCAB, HIDDEN, seed=91), head=head, norm=norm)
    generator = torch.Generator().manual_seed(seed)
    return Running(
        native, decoder, [torch.randint(VOCAB, (PROMPT,), generator=generator) for _ in range(2)], room=STEPS
    )


class Queueing:
    """Puts the steps of two sequences into the queue: prompts first, then token by token."""

    def __init__(self, native: Native, one: Running, sampled: SampledColumns | None = None) -> None:
        self._native, self._running, self._sampled = native, one, sampled
        self._computed = 0

    def put(self) -> QueuedStep:
        columns = StepColumns(self._running.tokens, self._running.tables)
        first, count = self._computed, 1 if self._computed else PROMPT
        self._computed += count
        each = [np.full(2, value, np.int64) for value in (first, count, 1)]
        step = columns.fill(np.arange(2), *each)
        return self._native.queue(self._running.model, step, 2, self._sampled, columns, self._running)


def test_a_step_reads_the_tokens_of_the_one_before(native: Native) -> None:
    expected = running(native).extend({0: (0, PROMPT), 1: (0, PROMPT)}, STEPS)
    one = running(native)
    queueing = Queueing(native, one)
    steps = [queueing.put() for _ in range(STEPS)]
    assert [step.number for step in steps] == list(range(steps[0].number, steps[0].number + STEPS))
    steps[-1].wait()
    assert np.array_equal(torch.stack([step.token_ids for step in steps]), expected)
    assert all(0 < step.seconds() < 10 for step in steps)
    assert np.array_equal(one.tokens[:, PROMPT:], expected.T)


def test_a_call_waits_for_what_is_queued_before_it(native: Native) -> None:
    one, other = running(native), running(native, seed=1)
    hidden = other.forward({0: (0, PROMPT)})[0]
    expected, queueing = other.logits(hidden), Queueing(native, one)
    for _ in range(STEPS):
        step = queueing.put()
        assert torch.equal(other.logits(hidden), expected)
        row = one.tokens[:, queueing._computed]
        assert torch.equal(row, step.token_ids), "the step has ended"


def test_threads_that_queue_and_threads_that_call(native: Native) -> None:
    """Each sees what it would see alone."""
    expected = running(native).extend({0: (0, PROMPT), 1: (0, PROMPT)}, STEPS)
    hidden = running(native).forward({0: (0, PROMPT)})[0]
    logits = running(native).logits(hidden)
    wrong: list[str] = []

    def queue() -> None:
        queueing = Queueing(native, running(native))
        found = [queueing.put() for _ in range(STEPS)]
        found[-1].wait()
        if not np.array_equal(torch.stack([step.token_ids for step in found]), expected):
            wrong.append("tokens")

    def call() -> None:
        other = running(native)
        if not all(torch.equal(other.logits(hidden), logits) for _ in range(STEPS)):
            wrong.append("logits")

    threads = [threading.Thread(target=target) for target in (queue, call, queue, call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_a_step_that_is_dropped_is_computed_before_its_memory_is_freed(native: Native) -> None:
    one = running(native)
    queueing = Queueing(native, one)
    for _ in range(3):
        queueing.put()
    assert one.tokens[:, PROMPT : PROMPT + 3].bool().any(0).all()


def test_tokens_are_drawn_as_each_sequence_asks(native: Native) -> None:
    likeliest = running(native).extend({0: (0, PROMPT), 1: (0, PROMPT)}, STEPS)
    zeros, ones = np.zeros(2), np.ones(2)
    drawn = SampledColumns(
        temperature=np.array([0.0, 3.0], np.float32),
        seeds=np.array([5, 6]),
        top_k=zeros.astype(np.int64),
        depth=zeros - np.inf,
        top_p=ones,
    )
    narrow = SampledColumns(drawn.temperature, drawn.seeds, np.ones(2, np.int64), drawn.depth, ones)
    found = []
    for sampled in (drawn, narrow):
        queueing = Queueing(native, running(native), sampled)
        steps = [queueing.put() for _ in range(STEPS)]
        steps[-1].wait()
        found.append(np.array([step.token_ids.numpy() for step in steps]))
    assert np.array_equal(found[0][:, 0], likeliest[:, 0])
    assert (found[0][:, 1] != likeliest[:, 1]).mean() > 0.5
    assert np.array_equal(found[1], likeliest), "of one token there is no choice"
