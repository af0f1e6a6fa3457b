"""A recorded mailbox gives the same plans, byte for byte, in another process that has no torch.

PAGEANT_WRITE_GOLDEN=1 pytest tests/unit/scheduler/recording/test_replay.py     records decisions.rec anew, after a
deliberate change of what is decided
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.invariants import check
from services.scheduler.recording import recorder, replay
from services.scheduler.recording.queued_recording import PAUSE_SECONDS, TOO_SLOW, QueuedRecording
from services.scheduler.recording.recorder import EVENTS, RecordedScheduler, Recording
from services.scheduler.recording.segments import NUM_SEGMENTS, Segments, segment
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.errors import FatalError, ProtocolError
from shared.losses import RECORDING, losses
from shared.messages import encode
from tests.unit.scheduler.fake_draft import FakeDraft
from tests.unit.scheduler.fake_worker import capacity
from tests.unit.scheduler.world import World

ROOT = Path(__file__).resolve().parents[4]
RECORDINGS = Path(__file__).parent / "recordings"
DECISIONS = RECORDINGS / "decisions.rec"
KEPT = sorted({DECISIONS, *RECORDINGS.glob("*.rec")})
POLICY = Policy(max_num_batched_tokens=32)
LARGE = 1 << 30


def never(reason: str) -> None:
    raise AssertionError(reason)


class RecordedWorld(World):
    def __init__(self, segments: Recording, policy: Policy = POLICY, **options: Any) -> None:
        self.segments = segments
        super().__init__(policy, **options)

    def make_core(self, policy: Policy) -> Scheduler:
        return RecordedScheduler(policy, self.segments)


def recorded_world(file: Path, max_bytes: int = LARGE, **options: Any) -> World:
    return RecordedWorld(Segments(file, max_bytes, never), **options)


def eventful(world: World, num_requests: int = 30, rounds: int = 1) -> None:
    """Requests of all kinds, workers and drafts that come and go."""
    world.join_draft("d", FakeDraft(skill=0.9))
    for index in range(num_requests):
        world.add(f"r{index}", [1 + index % 3] * (5 + index % 30), max_tokens=25, n=1 + index % 2, seed=index)
        for _ in range(rounds):
            world.step()
        if index == 12:
            world.abort("r12")
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


def record_decisions(file: Path) -> None:
    """Everything between which a scheduler has to choose, and no drafts: what they are worth is measured."""
    policy = Policy(
        max_num_batched_tokens=24, long_prefill_token_threshold=10, scheduling_policy="priority", fair_prefill_tokens=12
    )
    world = RecordedWorld(
        Segments(file, LARGE, never), policy, workers=2, num_blocks=14, max_num_seqs=5, max_model_len=96
    )
    for index in range(18):
        world.add(
            f"r{index}", [1 + index % 3] * (5 + 4 * (index % 9)), tenant="small" if index % 6 == 5 else "large",
            priority=index % 2, n=2 if index % 5 == 0 else 1, max_tokens=10, seed=index,
        )  # fmt: skip
        world.step()
        if index == 9:
            world.abort("r9")
        if index == 12:
            world.lose("w0")
            world.join("w2")
    world.run()
    world.assert_outputs()
    counters = world.scheduler.counters
    assert counters.num_preemptions and counters.num_prefix_cache_hits and counters.num_chunked_prefills
    assert counters.num_block_copies and counters.num_worker_losses and counters.num_aborted


def digest_of(world: World) -> str:
    digest = sha256()
    for plan in world.trace:
        digest.update(encode(plan))
    return digest.hexdigest()


def replayed(file: Path, **options: Any) -> replay.Replayed:
    with file.open("rb") as opened:
        return replay.replay(opened, **options)


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, World]:
    """The file of an eventful run, and the run itself."""
    file = tmp_path / "mailbox.rec"
    world = recorded_world(file, workers=2, num_blocks=20)
    eventful(world)
    return file, world


def test_a_recording_replays_byte_for_byte_without_torch(recording: tuple[Path, World]) -> None:
    file, world = recording
    command = [sys.executable, "-m", "services.cli", "replay", str(file), "--invariants"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{len(world.trace)} plans, digest {digest_of(world)}" in done.stdout
    assert "30 requests" in done.stdout and "equal" in done.stderr


def test_a_plan_that_differs_is_named(recording: tuple[Path, World], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of the code: here one step is given a token less."""
    file, _ = recording
    original, num_calls = Scheduler.schedule, iter(range(1, 1000))

    def changed(self: Scheduler, instance: str, now: float = 0.0) -> Any:
        if next(num_calls) == 60:
            object.__setattr__(self.policy, "max_num_batched_tokens", 16)
        return original(self, instance, now)

    monkeypatch.setattr(Scheduler, "schedule", changed)
    difference = replayed(file).difference
    assert difference is not None and difference.call.startswith("schedule('w")
    assert "num_scheduled_tokens was" in difference.what


def test_a_recording_with_a_gap_is_found_out(recording: tuple[Path, World], tmp_path: Path) -> None:
    file, _ = recording
    frames = split(file.read_bytes())
    gap = next(index for index, frame in enumerate(frames) if b"StepResult" in frame)
    cut = tmp_path / "cut.rec"
    cut.write_bytes(b"".join(frames[:gap] + frames[gap + 1 :]))
    difference = replayed(cut).difference
    assert difference is not None and "no plan is made where there was one" in difference.what


@pytest.mark.parametrize("sliding", [(), ((12, 9),)], ids=["", "windows"])
def test_the_newest_part_of_a_long_run_is_kept_and_good_for_itself(
    tmp_path: Path, sliding: tuple[tuple[int, int], ...]
) -> None:
    """Also in the middle of everything: each part begins with the whole state, prefix cache and drafts included."""
    file, limit = tmp_path / "mailbox.rec", 60_000
    world = recorded_world(file, limit, workers=2, num_blocks=14, sliding=sliding)
    eventful(world, 120, rounds=5)
    parts = [segment(file, age) for age in range(NUM_SEGMENTS)]
    assert sorted(tmp_path.iterdir()) == sorted(parts)
    assert b"start" not in parts[-1].read_bytes()[:20]  # its beginning is gone
    newest = sha256()
    for part in reversed(parts):
        result = replayed(part, check=check)
        assert result.difference is None and result.num_plans > 10
        newest.update(bytes.fromhex(result.digest))
    last = replayed(file)
    tail = sha256()
    for plan in world.trace[-last.num_plans :]:
        tail.update(encode(plan))
    assert last.digest == tail.hexdigest()


def test_what_a_dying_scheduler_was_asked_last_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay raises what the scheduler died of, or says that it does so no more."""
    file = tmp_path / "mailbox.rec"
    world = recorded_world(file, num_blocks=20)
    world.add("r", [1, 2, 3], max_tokens=9)
    for _ in range(3):
        world.step()

    def broken(self: Scheduler, request_id: str, gateway: str = "") -> bool:
        raise FatalError("a block is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "abort", broken)
        dying = recorded_world(tmp_path / "other.rec", num_blocks=20)
        with pytest.raises(FatalError):
            dying.abort("r")
        assert replayed(tmp_path / "other.rec").difference is None
    mended = replayed(tmp_path / "other.rec").difference
    assert mended is not None and "a block is lost, now nothing" in mended.what
    cut = file.read_bytes()[:-3]  # killed while it wrote
    file.write_bytes(cut)
    assert replayed(file).difference is None


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "no.rec"
    for content in (b"", b"{}\n" * 20, b"\x05\0\0\0abcde", b"\xff" * 40):
        file.write_bytes(content)
        with pytest.raises(ProtocolError):
            replayed(file)


def test_a_state_of_foreign_classes_is_refused(tmp_path: Path) -> None:
    rows = [["dict", ["x"], [[1]]], ["object", "subprocess", "Popen", [], []]]
    file = tmp_path / "bad.rec"
    file.write_bytes(recorder.framed(recorder.STATE, recorder.FORMAT, "0", "0", rows))
    with pytest.raises(ProtocolError, match="not of the scheduler's own modules"):
        replayed(file)


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    reasons: list[str] = []
    missing = tmp_path / "missing" / "mailbox.rec"
    world = RecordedWorld(Segments(missing, LARGE, reasons.append))
    world.add("r", [1, 2, 3], max_tokens=5)
    world.run()
    world.assert_outputs("r")
    assert len(reasons) == 1 and "No such file" in reasons[0]


class Recorder:
    """A queued recording with a clock of the test's, and what it said."""

    def __init__(self, file: Path, **options: Any) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.recording = QueuedRecording(
            file, 1 << 22, on_lost=self.said.append, on_resumed=lambda: self.said.append("resumed"),
            clock=lambda: self.now, **options,
        )  # fmt: skip
        self.world = RecordedWorld(self.recording)
        self.num_added = 0

    def work(self) -> None:
        """A few requests, to their ends."""
        for _ in range(5):
            self.num_added += 1
            self.world.add(f"r{self.num_added}", [1 + self.num_added % 3] * 9, max_tokens=20, seed=self.num_added)
            self.world.step()
        self.world.run()
        self.recording.close(30)


def test_a_queued_recording_replays_as_any_other(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "mailbox.rec")
    recorder.work()
    result = replayed(tmp_path / "mailbox.rec", check=check)
    assert (result.difference, result.num_requests, result.digest) == (None, 5, digest_of(recorder.world))
    assert recorder.said == []


def test_a_disk_that_is_full_for_a_while_costs_a_part_and_no_part_has_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before, really = tmp_path / "mailbox.rec", losses(), os.write
    recorder = Recorder(file)
    recorder.work()

    def full(number: int, data: Any) -> int:
        if threading.current_thread().name != "recording":
            return really(number, data)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        recorder.work()
        assert recorder.said == ["[Errno 28] No space left on device"]
        recorder.now += PAUSE_SECONDS
        recorder.work()  # a new part is begun, in vain
        assert len(recorder.said) == 3 and "No space" in recorder.said[-1]
    recorder.work()
    assert losses()[RECORDING] > before[RECORDING] + 50
    recorder.now += PAUSE_SECONDS
    recorder.work()
    assert recorder.said[-1] == "resumed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mailbox.rec", "mailbox.rec.1"], "none was driven out"
    newest, oldest = (replayed(segment(file, age), check=check) for age in (0, 1))
    assert oldest.difference is None and oldest.num_requests >= 5
    assert newest.difference is None and newest.num_requests == 5
    assert b"state" in file.read_bytes()[:20]


def test_a_disk_that_is_too_slow_holds_nobody_up_and_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, freed, really = tmp_path / "mailbox.rec", threading.Event(), os.write

    def slow(number: int, data: Any) -> int:
        if threading.current_thread().name == "recording":
            freed.wait(30)
        return really(number, data)

    monkeypatch.setattr(os, "write", slow)
    recorder = Recorder(file, max_waiting=200_000)
    for index in range(100):
        recorder.world.add(f"slow{index}", [1, 2, 3], max_tokens=60)
        recorder.world.run()
        recorder.world.assert_outputs(f"slow{index}")
        if recorder.said:
            break
    assert recorder.said == [TOO_SLOW]
    freed.set()
    recorder.recording.close(30)
    assert replayed(file).difference is None
    recorder.now += PAUSE_SECONDS
    recorder.work()
    assert recorder.said == [TOO_SLOW, "resumed"]
    result = replayed(file, check=check)
    assert result.difference is None and result.num_requests == 5


def test_everything_that_the_shell_asks_of_the_core_is_recorded() -> None:
    tree = ast.parse((ROOT / "services" / "scheduler" / "actor.py").read_text(encoding="utf-8"))
    asked = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.core"
    }
    methods = {name for name in asked if callable(getattr(Scheduler, name, None))}
    assert methods > {"add", "apply", "schedule"}
    assert methods <= set(EVENTS)


def test_what_is_decided_is_what_was_decided() -> None:
    """A change that is to change no decision has changed none."""
    if os.environ.get("PAGEANT_WRITE_GOLDEN"):
        DECISIONS.unlink(missing_ok=True)
        record_decisions(DECISIONS)
    result = replayed(DECISIONS, check=check)
    assert result.difference is None, result.difference
    assert result.num_requests == 18 and result.num_plans > 50


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.stem)
def test_what_went_wrong_once_does_not_go_wrong_again(file: Path) -> None:
    """Kept by `pageant replay --keep`.  Plans may differ after a change; nothing may break before they do.  And every
    version reads what earlier ones have written."""
    with file.open("rb") as opened:
        num_calls = sum(frame[0] == recorder.CALL for frame in replay.read_frames(opened))
    difference = replayed(file, check=check).difference
    assert difference is None or ("raises" not in difference.what and "invariant" not in difference.what), difference
    assert num_calls > 0


def test_five_thousand_requests_replay_to_one_digest(tmp_path: Path) -> None:
    """No invariants here: what is measured is that nothing in a long run depends on anything but the recording."""
    file = tmp_path / "long.rec"
    world = recorded_world(file, num_blocks=512, max_num_seqs=64)
    world.after = world.gather  # type: ignore[method-assign]
    world.limits["max_model_len"] = 128
    for index in range(5000):
        world.add(f"r{index}", [1 + index % 7] * (4 + index % 40), max_tokens=2 + index % 9, seed=index)
        world.step()
    world.run()
    result = replayed(file)
    assert (result.num_requests, result.difference) == (5000, None)
    assert result.digest == digest_of(world) and result.num_plans == len(world.trace)


def split(data: bytes) -> list[bytes]:
    frames, place = [], 0
    while place < len(data):
        size = recorder.LENGTH_BYTES + int.from_bytes(data[place : place + recorder.LENGTH_BYTES], "little")
        frames.append(data[place : place + size])
        place += size
    return frames


def test_capacity_is_an_argument_that_can_be_recorded(tmp_path: Path) -> None:
    file = tmp_path / "join.rec"
    core = RecordedScheduler(POLICY, Segments(file, LARGE, never))
    core.set_detokenizers(name for name in ("a", "b"))  # read once, by the recording and the core alike
    core.add_worker("w", 1, capacity())
    assert core.replicas.keys() == {"w"} and core._detokenizers == ["a", "b"]
    assert replayed(file).num_events == 2
