"""What the host took, from the kernel's counters; and measuring while it takes little."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from scripts.bench.common import host
from scripts.bench.common.host import Host, awake, in_quiet

POLLING = [
    state.parent
    for state in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpuidle/state*/name")
    if state.read_text().strip() == "POLL"
]


def write(stat: Path, *ticks: int) -> None:
    stat.write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")


def test_the_share_is_of_what_was_wanted(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    write(stat, 100, 0, 50, 1000, 10, 0, 5, 20, 0, 0)
    looked = Host(stat)
    write(stat, 160, 0, 80, 9000, 90, 0, 5, 30, 0, 0)  # 90 busy and 10 taken, whatever was idle
    assert looked.taken() == pytest.approx(0.1)
    assert looked.taken() == 0.0  # nothing since
    write(stat, 160, 0, 80, 9000, 90, 0, 5, 55, 0, 0)
    assert looked.seconds() == pytest.approx(25 / os.sysconf("SC_CLK_TCK"))


def test_a_kernel_that_does_not_say_has_taken_nothing(tmp_path: Path) -> None:
    assert Host(tmp_path / "none").taken() == 0.0


@pytest.mark.parametrize(
    ("shares", "tries", "number"),
    [([0.5, 0.01, 0.0], 3, 2), ([0.5, 0.2, 0.3], 3, 2), ([0.0], 1, 1), ([0.3, 0.1], 1, 1)],
)
async def test_the_first_quiet_try_or_the_quietest(
    shares: list[float], tries: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter([share for pair in zip([0.9] * len(shares), shares, strict=True) for share in pair])
    monkeypatch.setattr(host.Host, "taken", lambda self: next(told))  # the first of each pair is from before the try
    made = 0

    async def measure() -> int:
        nonlocal made
        made += 1
        return made

    found = await in_quiet(measure, tries)
    assert (found.number, found.result, found.taken) == (number, number, shares[number - 1])
    assert f"try {number}" in found.note


async def test_a_burst_is_no_quiet_however_little_it_is_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = iter([0.0, 0.3, 0.0, 0.05, 0.0])  # half seconds: two tries of two, and more than enough
    monkeypatch.setattr(host.Host, "taken", lambda self: 0.001)
    monkeypatch.setattr(host.Host, "seconds", lambda self: next(bursts))
    monkeypatch.setattr(host, "LOOK", 0.02)
    found = await in_quiet(lambda: asyncio.sleep(0.05), 3)
    assert (found.number, found.burst) == (2, 0.05)
    assert "50 ms at once" in found.note


async def test_no_try_is_an_error() -> None:
    with pytest.raises(ValueError, match="tries"):
        await in_quiet(lambda: pytest.fail("not asked for"), 0)


@pytest.mark.parametrize("may_ask", [True, False])
def test_awake_keeps_every_processor_from_halting_and_ends(may_ask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not may_ask:
        monkeypatch.setattr(host, "MAX_LATENCY", Path("/nowhere/at/all"))
    elif not os.access(host.MAX_LATENCY, os.W_OK) or not POLLING:
        pytest.skip("this kernel cannot be asked to poll")
    looked = Host()
    with awake():
        time.sleep(1.0)  # for processes to come up
        before = halted()
        time.sleep(1.0)
        after = halted()
    assert after - before < 0.3
    assert 0.0 <= looked.taken() < 1.0


def halted() -> float:
    """Seconds of all processors so far: idle, and not in a loop that waits."""
    idle = ticks(Path("/proc/stat").read_text(encoding="ascii"))[host.IDLE[0]] / os.sysconf("SC_CLK_TCK")
    return idle - sum(int((state / "time").read_text()) for state in POLLING) / 1e6


def ticks(stat: str) -> list[int]:
    return [int(field) for field in stat.splitlines()[0].split()[1:]]
