"""A recorded mailbox gives the same plans, byte for byte, in another process that has no torch."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.policy import Policy
from services.scheduler.scheduler import Scheduler
from shared.errors import ProtocolError
from shared.messages import AbortRequest, Hello, ServiceName, encode
from tests.unit.scheduler.fake_draft import FakeDraft
from tests.unit.scheduler.replay import record, replay
from tests.unit.scheduler.world import World

ROOT = Path(__file__).resolve().parents[3]
POLICY = Policy(max_num_batched_tokens=32)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """The lines of an eventful run, and the digest of the plans that it had."""
    lines: list[str] = []

    def spy(name: str, line: Any) -> None:
        original = getattr(Scheduler, name)

        def recorded(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
            lines.append(line(*args, **kwargs))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Scheduler, name, recorded)

    spy("add", lambda message, now: record("add", message=message))
    spy("abort", lambda request_id: record("abort", message=AbortRequest(request_id)))
    spy("apply", lambda worker, result, now: record("result", worker, result, now))
    spy("schedule", lambda worker, now: record("plan", worker, now=now))
    spy("propose", lambda message: record("propose", message=message))
    spy("lose_draft", lambda draft: record("lose_draft", draft))
    spy("add_draft", lambda d, epoch, size: record("join", d, Hello(ServiceName.DRAFT, d, "", epoch, "", draft=size)))
    spy("lose_worker", lambda worker: record("lose", worker))
    spy("add_worker", lambda w, epoch, size: record("join", w, Hello(ServiceName.WORKER, w, "", epoch, "", size)))
    world = World(POLICY, workers=2, num_blocks=20)
    world.join_draft("d", FakeDraft(skill=0.9))
    for index in range(30):
        world.add(f"r{index}", [1 + index % 3] * (5 + index), max_tokens=25, n=1 + index % 2, seed=index)
        world.step()
        if index == 12:
            world.abort("r11")
        if index == 20:
            world.lose("w0")
            world.join("w2")
        if index == 25:
            world.lose_draft("d")
            world.join_draft("e", FakeDraft(skill=0.7))
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_preemptions > 0
    assert world.scheduler.counters.num_accepted_tokens > 0
    digest = sha256()
    for plan in world.trace:
        digest.update(encode(plan))
    return lines, f"{len(world.trace)} {digest.hexdigest()}"


def test_a_recording_replays_byte_for_byte(recording: tuple[list[str], str], tmp_path: Path) -> None:
    lines, expected = recording
    file = tmp_path / "mailbox.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "tests.unit.scheduler.replay", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_a_recording_with_a_gap_is_found_out(recording: tuple[list[str], str]) -> None:
    lines, _ = recording
    first = next(index for index, line in enumerate(lines) if line.startswith('["result"'))
    with pytest.raises(ProtocolError, match="not the oldest in flight"):
        replay(lines[:first] + lines[first + 1 :], POLICY)
