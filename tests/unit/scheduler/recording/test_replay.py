"""A recorded mailbox gives the same plans, byte for byte, in another process that has no torch.

PAGEANT_WRITE_GOLDEN=1 pytest tests/unit/scheduler/recording/test_replay.py     records decisions.rec anew, after a
deliberate change of what is decided
"""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.invariants import check
from services.scheduler.recording import recorder, replay
from services.scheduler.recording.queued_recording import NUM_LIVES, TOO_SLOW, QueuedRecording, of_life
from services.scheduler.recording.recorder import EVENTS, RecordedScheduler
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.errors import FatalError, ProtocolError
from shared.messages import encode
from shared.processes.losses import RECORDING, losses
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.world import World

ROOT = Path(__file__).resolve().parents[4]
RECORDINGS = Path(__file__).parent / "recordings"
DECISIONS = RECORDINGS / "decisions.rec"
KEPT = sorted({DECISIONS, *RECORDINGS.glob("*.rec")})
POLICY = Policy(max_num_batched_tokens=32)
LARGE = 1 << 30


class PlainFile:
    """A recording that is not compressed, as earlier versions wrote them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, frame: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(frame)


class RecordedWorld(World):
    def __init__(self, recording: Any, policy: Policy = POLICY, **options: Any) -> None:
        self.recording = recording
        super().__init__(policy, **options)

    def make_core(self, policy: Policy) -> Scheduler:
        return RecordedScheduler(policy, self.recording)


def recorded_world(file: Path, **options: Any) -> World:
    return RecordedWorld(PlainFile(file), **options)


def queued(file: Path, max_bytes: int = LARGE, **options: Any) -> tuple[RecordedWorld, list[str]]:
    """A world with a recording as in service, and why that has ended."""
    ends: list[str] = []
    return RecordedWorld(QueuedRecording(file, max_bytes, on_end=ends.append, **options)), ends


def work(world: RecordedWorld) -> None:
    """Five requests, to their ends, and all of them written."""
    for _ in range(5):
        number = len(world.outputs)
        world.add(f"r{number}", [1 + number % 3] * 9, max_tokens=20, seed=number)
        world.step()
    world.run()
    world.recording.close(30)


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
    world = RecordedWorld(PlainFile(file), policy, workers=2, num_blocks=14, max_num_seqs=5, max_model_len=96)
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
    with replay.opened(file) as recording:
        return replay.replay(recording, **options)


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


def test_sliding_pools_replay_too(tmp_path: Path) -> None:
    file = tmp_path / "mailbox.rec"
    world = recorded_world(file, workers=2, num_blocks=14, sliding=((12, 9),))
    eventful(world)
    result = replayed(file, check=check)
    assert result.difference is None and result.digest == digest_of(world)
    assert any(plan.sliding for plan in world.trace)


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
    for content in (b"", b"{}\n" * 20, b"\x05\0\0\0abcde", b"\xff" * 40, b"\x1f\x8b" + bytes(40)):
        file.write_bytes(content)
        with pytest.raises(ProtocolError):
            replayed(file)


def test_a_compressed_recording_replays_as_any_other(tmp_path: Path) -> None:
    world, ends = queued(tmp_path / "mailbox.rec")
    work(world)
    result = replayed(tmp_path / "mailbox.rec", check=check)
    assert (result.difference, result.num_requests, result.digest) == (None, 5, digest_of(world))
    assert ends == [] and stat.S_IMODE((tmp_path / "mailbox.rec").stat().st_mode) == 0o600


def test_a_recording_ends_at_its_bound(tmp_path: Path) -> None:
    file, before = tmp_path / "mailbox.rec", losses()
    world, ends = queued(file, 3000)
    for _ in range(20):
        work(world)
    assert ends == ["it has reached record_bytes"] and file.stat().st_size < 40_000
    assert losses()[RECORDING] > before[RECORDING]
    result = replayed(file, check=check)
    assert result.difference is None and 0 < result.num_plans < len(world.trace)


def test_what_earlier_lives_left_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "mailbox.rec"
    for number in range(NUM_LIVES + 1):
        world, _ = queued(file)
        for _ in range(number + 1):
            work(world)
    kept = [replayed(of_life(file, age)).num_requests for age in range(NUM_LIVES)]
    assert kept == [25, 20, 15, 10] and len(list(tmp_path.iterdir())) == NUM_LIVES


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before, really = tmp_path / "mailbox.rec", losses(), os.write
    world, ends = queued(file)
    work(world)
    num_bytes = file.stat().st_size

    def full(number: int, data: Any) -> int:
        if threading.current_thread().name != "recording":
            return really(number, data)
        if file.stat().st_size < num_bytes + 100:
            return really(number, data[:100])  # in the middle of a block
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        work(world)
    work(world)
    assert ends == ["[Errno 28] No space left on device"]
    assert losses()[RECORDING] > before[RECORDING]
    result = replayed(file, check=check)
    assert result.difference is None and result.num_requests >= 5


def test_a_disk_that_is_not_there_costs_the_recording_alone(tmp_path: Path) -> None:
    world, ends = queued(tmp_path / "missing" / "mailbox.rec")
    work(world)
    assert len(ends) == 1 and "No such file" in ends[0]


def test_a_disk_that_is_too_slow_holds_nobody_up_and_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, freed, really = tmp_path / "mailbox.rec", threading.Event(), os.write

    def slow(number: int, data: Any) -> int:
        if threading.current_thread().name == "recording":
            freed.wait(30)
        return really(number, data)

    monkeypatch.setattr(os, "write", slow)
    world, ends = queued(file, max_waiting=200_000)
    for index in range(100):
        world.add(f"slow{index}", [1, 2, 3], max_tokens=60)
        world.run()
        world.assert_outputs(f"slow{index}")
        if ends:
            break
    assert ends == [TOO_SLOW]
    freed.set()
    world.recording.close(30)
    assert replayed(file).difference is None


def test_everything_that_the_shell_asks_of_the_core_is_recorded() -> None:
    shell = [
        (ROOT / "services" / "scheduler" / f"{name}.py").read_text(encoding="utf-8") for name in ("actor", "links")
    ]
    asked = {
        node.attr
        for source in shell
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.core"
    }
    methods = {name for name in asked if callable(getattr(Scheduler, name, None))}
    assert methods > {"add", "apply", "schedule"}
    assert methods <= set(EVENTS)


def test_a_death_that_is_taken_back_is_recorded(tmp_path: Path) -> None:
    """Without it a replay would end the request at the third loss, and differ from there on."""
    world = recorded_world(file := tmp_path / "lives.rec", workers=1)
    world.add("r", [1, 2, 3], max_tokens=4, seed=1)
    for _ in range(4):
        assert world.scheduler.schedule("w0", 0.0) is not None
        world.scheduler.lose_worker("w0")
        world.scheduler.deaths.take_back("w0")
        world.join("w0")
    world.run()
    world.assert_outputs()
    result = replayed(file)
    assert result.difference is None and result.num_requests == 1 and result.num_plans >= 5


def test_what_the_core_asks_of_itself_is_not_recorded(tmp_path: Path) -> None:
    """A renewal retires a worker and adds one: a replay that did these again would begin a life too many."""
    world = recorded_world(file := tmp_path / "lives.rec", workers=1)
    world.add("r", [1, 2, 3], max_tokens=4, seed=1)
    assert world.scheduler.schedule("w0", 0.0) is not None
    frames = file.read_bytes().count(b"retire_worker"), file.read_bytes().count(b"add_worker")
    world.scheduler.renew_worker("w0", 77)
    after = file.read_bytes()
    assert (after.count(b"retire_worker"), after.count(b"add_worker")) == frames and b"renew_worker" in after


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
    with replay.opened(file) as recording:
        num_calls = sum(frame[0] == recorder.CALL for frame in replay.read_frames(recording))
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
    core = RecordedScheduler(POLICY, PlainFile(file))
    core.set_detokenizers(name for name in ("a", "b"))  # read once, by the recording and the core alike
    core.add_worker("w", 1, capacity())
    assert core.replicas.keys() == {"w"} and core._detokenizers == ["a", "b"]
    assert replayed(file).num_events == 2


@pytest.mark.parametrize("recording", KEPT, ids=lambda path: path.stem)
def test_what_was_recorded_once_is_read(recording: Path) -> None:
    with replay.opened(recording) as file:
        core, _ = replay.begin(next(replay.read_frames(file)))
    assert isinstance(core, Scheduler)
