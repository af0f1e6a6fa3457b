"""Blocks pass from process to process through other systems, and come back bit for bit, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.store.arena import BlockArena
from services.store.backends.addresses import backend_at
from services.store.backends.blocks import BackendBlocks
from services.store.backends.interface import BackendAddress
from tests.integration.moves.backend_peer import PATIENCE, SPACE, block, store_at
from tests.integration.moves.test_stores import ASKS, PREFIX, MovingEngine, alone, said
from tests.store_systems import SYSTEMS
from tests.unit.store.copied import copied
from tests.unit.store.fake_backend import FakeSystem

ROOT = Path(__file__).resolve().parents[3]
COUNT, SIZE = 40, 256 << 10


@pytest.mark.parametrize("system", SYSTEMS)
def test_blocks_of_another_process_are_found_and_taken(system: str, tmp_path: Path) -> None:
    with SYSTEMS[system](tmp_path) as (url, server):
        command = [sys.executable, "-m", "tests.integration.moves.backend_peer", url, str(COUNT), str(SIZE)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
            assert peer.stdin is not None and peer.stdout is not None
            lines = (line for line in peer.stdout if line.startswith(b"{"))
            assert json.loads(next(lines))["put"] == COUNT
            store = store_at(url)
            take(store)
            if server is not None:
                server.kill()
                server.wait()
            peer.stdin.close()
        if server is not None:
            leave_alone(store, url)
        store.close()


def take(store: BlockArena) -> None:
    """What the other process has put there, and nothing else."""
    blocks = [block(index, SIZE) for index in range(COUNT + 2)]
    names = [name for name, _ in blocks]
    said_of = looked_up(store, [SPACE + name for name in names])
    assert [said_of[SPACE + name] for name in names] == [True] * COUNT + [False] * 2
    found = copied(store, SPACE, names, SIZE)
    assert [(wanted, bytes(data)) for wanted, data in found] == [
        (wanted, bytes(data)) for _, (wanted, data) in blocks[:COUNT]
    ]
    assert store.num_served_from_backend == COUNT


def leave_alone(store: BlockArena, url: str) -> None:
    """The server is gone: what memory has is there, the rest is not, and nothing waits for it for long."""
    name, one = block(COUNT, SIZE)
    begun = time.monotonic()
    fresh = BlockArena(1 << 30, backend=BackendBlocks(backend_at(url), 1 << 30, 0.5))
    assert fresh.keep(SPACE, name, one) and len(copied(fresh, SPACE, [name], SIZE)) == 1
    assert copied(fresh, SPACE, [block(0, SIZE)[0]], SIZE) == []
    assert len(copied(store, SPACE, [block(0, SIZE)[0]], SIZE)) == 1
    assert time.monotonic() - begun < 10
    fresh.close()


def looked_up(store: BlockArena, keys: list[bytes]) -> dict[bytes, bool]:
    """What a store says of keys."""
    answers: dict[bytes, bool] = {}
    store.look_up(keys)
    deadline = time.monotonic() + PATIENCE
    while not answers.keys() >= set(keys):
        assert time.monotonic() < deadline
        kept, dropped, _ = store.take_changes()
        answers.update(dict.fromkeys(kept, True) | dict.fromkeys(dropped, False))
        time.sleep(0.001)
    return answers


def until_put(store: BlockArena) -> None:
    """All that the store keeps is in its backend."""
    deadline = time.monotonic() + PATIENCE
    while store.backend is None or len(store.backend) < len(store):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def address(system: str, directory: Path) -> Iterator[BackendAddress]:
    if system == "memory":
        yield FakeSystem().address
        return
    with SYSTEMS[system](directory) as (url, _):
        yield backend_at(url)


@pytest.mark.parametrize("system", ["memory", *SYSTEMS])
def test_a_deployment_fetches_what_another_has_computed(system: str, tmp_path: Path) -> None:
    """The second one has a store of its own, which was told of nothing, and finds the blocks in the backend."""
    wanted = alone({})
    with address(system, tmp_path) as behind:
        engines = []
        for name in ("one", "other"):
            (directory := tmp_path / name).mkdir()
            engines.append(MovingEngine(directory, backend=BackendBlocks(behind, 64 << 20, PATIENCE)))
        one, other = engines
        assert said(one.generate(ASKS)) == wanted
        one.catch_up()
        until_put(one.store)
        assert said(other.generate(ASKS)) == wanted
        assert other.core.moves.num_fetched_blocks * 16 >= 0.9 * (len(PREFIX) // 16 * 16), "fetched, not computed"
        assert other.store.num_served_from_backend >= 0.9 * (len(PREFIX) // 16)
        for engine in engines:
            engine.close()
            engine.store.close()
