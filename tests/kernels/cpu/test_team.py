"""The native team where other processes take its cores: members come late, lose their core, stay away and come back."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.binding.native import Native
from tests.kernels.cpu.native.native_models import MLP, Decoder, Layer, Linear, Norm, normal
from tests.kernels.cpu.native.native_running import Running, rope
from tests.kernels.cpu.natives import BUILDS, load_build

HIDDEN, HEADS, LAYERS, STEPS = 80, (6, 2, 32), 12, 60
BUSY = "while True: pass"


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    yield library
    library.set_threads(1, pin=False)


@pytest.fixture(scope="module")
def busy_cores() -> Iterator[None]:
    """A process for each core computes all the time, with as much right to it as the team has."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in os.sched_getaffinity(0)]
    yield
    for other in others:
        other.kill()
        other.wait()


def decoder() -> Decoder:
    norms = {"input_norm": Norm.random(HIDDEN, 20), "mlp_norm": Norm.random(HIDDEN, 22)}
    layer = Layer.random(HIDDEN, HEADS, MLP.random(HIDDEN, 112, 1), 9, rotation=rope(32, 1e4), **norms)
    given = {"head": Linear.random(150, HIDDEN, 90), "norm": Norm.random(HIDDEN, 92)}
    return Decoder(layers=[layer] * LAYERS, embedding=normal(150, HIDDEN, seed=91), **given)  # type: ignore[arg-type]


def num_interruptions() -> int:
    """How often another process took the core of a thread of ours."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@pytest.mark.parametrize(("threads", "rows"), [(2, 2), (3, 2), (7, 2), (3, 20)])
def test_who_takes_part_changes_no_bit(native: Native, busy_cores: None, threads: int, rows: int) -> None:
    tokens = [torch.randint(150, (STEPS,), generator=torch.Generator().manual_seed(seed)) for seed in range(rows)]
    running = Running(native, decoder(), tokens)

    def decode() -> list[torch.Tensor]:
        return [torch.cat(running.forward(dict.fromkeys(range(rows), (at, at + 1)))) for at in range(STEPS)]

    native.set_threads(1, pin=False)
    alone = decode()
    native.set_threads(threads, pin=False)
    before, num_rounds = num_interruptions(), 0
    while num_rounds < 3 or (num_interruptions() < before + 5 and num_rounds < 40):
        assert all(map(torch.equal, decode(), alone))
        num_rounds += 1
    assert num_interruptions() >= before + 5  # or the test has shown nothing


def test_teams_of_other_sizes_follow_each_other(native: Native, busy_cores: None) -> None:
    """No call to a job is lost between two teams: this ends."""
    tokens = [torch.arange(8)]
    running = Running(native, decoder(), tokens)
    (expected,) = running.forward({0: (0, 8)})
    for threads in (2, 5, 1, 3, 2, 4) * 5:
        native.set_threads(threads, pin=threads == 2)
        assert torch.equal(running.forward({0: (0, 8)})[0], expected)
        assert torch.equal(running.greedy(expected), running.logits(expected).argmax(1))
