"""Where a library's cycles go, and what its processor can do at most."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.binding import abi
from tests.kernels.cpu.natives import BUILDS, load_build


@pytest.mark.parametrize("build", BUILDS)
def test_cycles_are_counted_inside_the_block_alone_and_by_what_was_done(build: str) -> None:
    native = load_build(build)
    weight = torch.randn(256, 512)
    packed = native.pack_linear(
        weight, torch.float32, torch.empty(native.packed_bytes(256, 512, torch.float32), dtype=torch.uint8)
    )
    rows = torch.randn(64, 512)
    for _ in range(20):  # a thread that loses its core meanwhile counts the cycles of others
        with native.counting() as cycles:
            native.linear(rows, packed)
        counted = dict(cycles)
        if counted["linears"] > 0.5 * (sum(counted.values()) - counted["waiting"]) > 0:  # for threads without a core
            break
    else:
        pytest.fail(f"most cycles went elsewhere: {counted}")
    assert counted["scores"] == counted["norms"] == 0
    native.linear(rows, packed)
    assert cycles == counted
    with native.counting() as nothing:
        pass
    assert set(nothing.values()) == {0} and tuple(nothing) == abi.PHASES


@pytest.mark.parametrize("build", BUILDS)
def test_peaks_name_operations_in_proportion_to_rounds_and_threads(build: str) -> None:
    native = load_build(build)
    for kind in range(5):
        native.set_threads(1, pin=False)
        alone = native.spin(kind, 100)
        native.set_threads(2, pin=False)
        assert native.spin(kind, 300) == 6 * alone
        native.set_threads(1, pin=False)
    assert native.spin(0, 1) > 0
