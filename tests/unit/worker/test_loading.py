"""A worker while it loads: what its status file says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.worker.actor import WorkerActor
from shared.actor.status import read_status
from shared.config import Settings
from shared.errors import FatalError
from shared.transport import MemoryTransport

if TYPE_CHECKING:
    from engine.execution.runner import ModelRunner


def no_steps(*_: Any) -> Any:
    raise AssertionError("nothing was loaded")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_worker_that_loads_says_so_all_the_time(tmp_path: Path) -> None:
    """Also as a later life of its process, which has left a file there: no probe takes it for stuck, or for ready."""
    status, may_end = tmp_path / "status", threading.Event()
    status.write_text("READY")

    def load() -> ModelRunner:
        assert may_end.wait(30)
        raise FatalError("there is no model")

    settings = Settings.of(heartbeat_interval=0.02, heartbeat_timeout=0.2, status_file=str(status))
    running = asyncio.create_task(WorkerActor(MemoryTransport(), settings, load, no_steps).run())
    for _ in range(3):
        await until(lambda: read_status(status) == "STARTING")
        status.unlink()
    may_end.set()
    with pytest.raises(ExceptionGroup) as caught:
        await running
    assert [str(error) for error in caught.value.exceptions] == ["there is no model"]
