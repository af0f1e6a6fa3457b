"""Collectives before they are connected, and once their group has ended; what passes is in test_torch_ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.description.ranks import Place
from engine.modeling.ranks.collectives import Collectives
from kernels.cpu.binding import abi
from shared.errors import FatalError


class Waiting:
    """Work of a backend whose other ranks are frozen."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class Frozen:
    """A backend whose other ranks do not answer."""

    def __init__(self, name: str = "gloo") -> None:
        self.named = name
        self.num_aborts = 0

    def name(self) -> str:
        return self.named

    def allreduce(self, tensors: Any) -> Waiting:
        return Waiting()

    def abort(self) -> None:
        self.num_aborts += 1


def test_before_they_are_connected_what_others_have_is_zero() -> None:
    own, ranks = torch.ones(2, 3), Collectives(Place(0, 2))
    assert ranks.gather(own, (3, 5)).shape == (2, 8)
    gathered = ranks.to_leader(own, (3, 5))
    assert gathered is not None and gathered.shape == (2, 8)
    assert Collectives(Place(1, 2)).to_leader(own, (5, 3)) is None
    assert torch.equal(ranks.add(own.clone()), own) and torch.equal(ranks.from_leader(own.clone()), own)


def test_a_call_that_waits_fails_when_the_group_ends() -> None:
    ranks = Collectives(Place(0, 2))
    backend: Any = Frozen()
    ranks.connect(backend)
    threading.Timer(0.2, ranks.end, (abi.RANK_SILENT,)).start()
    with pytest.raises(FatalError, match="the group of ranks has ended: a rank is silent"):
        ranks.add(torch.ones(1, 1))
    ranks.end(abi.LEFT)
    with pytest.raises(FatalError, match="a rank is silent"):
        ranks.add(torch.ones(1, 1))
    assert backend.num_aborts == 0


def test_what_is_in_flight_on_a_gpu_is_aborted_once() -> None:
    ranks = Collectives(Place(0, 2))
    backend: Any = Frozen("nccl")
    ranks.connect(backend)
    for reason in (abi.RANK_DIED, abi.LEFT):
        ranks.end(reason)
    assert backend.num_aborts == 1 and ranks.why_ended == "a rank has ended"


FROZEN_PEER = """
import os, signal, threading, time, torch
from torch.distributed import TCPStore
from engine.description.ranks import Place
from engine.loading.torch_ranks import make_backend
from engine.modeling.ranks.collectives import Collectives
from kernels.cpu.binding import abi
from shared.errors import FatalError

torch.set_num_threads(1)
here, there = os.pipe()
child = os.fork()
place = Place(0 if child else 1, 2)
if child:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(there, str(store.port).encode())
else:
    store = TCPStore("127.0.0.1", int(os.read(here, 8)), None, False)
ranks = Collectives(place)
ranks.connect(make_backend(store, place, torch.device("cpu"), "127.0.0.1"))
assert ranks.gather(torch.full((1, 1 + place.rank), 1.0 + place.rank), (1, 2)).tolist() == [[1, 2, 2]]
if not child:
    time.sleep(600)
print(child, flush=True)
os.kill(child, signal.SIGSTOP)
threading.Timer(0.3, ranks.end, (abi.RANK_SILENT,)).start()
try:
    ranks.add(torch.ones(1, 1))
except FatalError as error:
    print(error, flush=True)
"""


def test_a_process_ends_although_a_rank_is_frozen() -> None:
    root = Path(__file__).resolve().parents[4]
    ended = subprocess.Popen([sys.executable, "-c", FROZEN_PEER], cwd=root, stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    child = int(ended.stdout.readline())
    try:
        assert "a rank is silent" in ended.stdout.readline()
        assert ended.wait(30) == 0
    finally:
        os.kill(child, signal.SIGKILL)
        ended.kill()
        ended.stdout.close()
