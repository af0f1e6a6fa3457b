"""Makes the recorded calls to a fresh core, and compares the plans.

The same code makes the same plans, byte for byte.  The first plan that differs is reported, and so is an error that is
raised only now, or was raised only then.  A recording that ends within a call is of a scheduler that died in that call.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from services.scheduler.recording.recorder import CALL, ERROR, EVENTS, FORMAT, LENGTH_BYTES, MESSAGE, PLAN, START
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.errors import ProtocolError
from shared.messages import (
    AddRequest,
    DraftCapacity,
    MessageDecoder,
    SchedulerInbox,
    StepPlan,
    StepResult,
    WorkerCapacity,
    encode,
    schema_hash,
)
from shared.messages.codec import UNDECODABLE

MAX_FRAME_BYTES = 1 << 30
GZIP = b"\x1f\x8b"  # what a compressed recording begins with; earlier versions' were not
Check = Callable[[Scheduler], None]


class RecordedCall(msgspec.Struct, frozen=True):
    """One call of the core, and its recorded outcome: a plan's bytes, or the error that was raised."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    plan: bytes = b""
    error: str = ""
    is_last: bool = False  # of the recording: its outcome may be missing


class ReplayDifference(msgspec.Struct, frozen=True):
    """The first point at which a replay does not do what was recorded."""

    event: int  # which call, from 1
    call: str
    what: str

    def __str__(self) -> str:
        return f"event {self.event}, {self.call}: {self.what}"


class Replayed(msgspec.Struct):
    """The outcome of a replay.  `digest` is over all plans' bytes, in order."""

    num_events: int = 0
    num_plans: int = 0
    num_requests: int = 0
    seconds: float = 0.0  # between the first and the last call with a time
    digest: str = ""
    difference: ReplayDifference | None = None
    foreign: str = ""  # why another version of the code may have made the recording


def replay(file: BinaryIO, check: Check | None = None) -> Replayed:
    """Play a recording to its end, or to the first difference; `check` looks at the core after each event.

    Raises ProtocolError where the file is no recording, or one whose beginning this version cannot read.
    """
    frames = read_frames(file)
    core, foreign = begin(next(frames, []))
    replayed, digest = Replayed(foreign=foreign), sha256()
    first = last = None
    for call in calls(frames):
        replayed.num_events += 1
        replayed.num_requests += call.name == "add"
        if call.name == "schedule":
            last = call.args[-1] if len(call.args) > 1 else call.kwargs.get("now")
            first = last if first is None else first
        plan, what = answer(core, call, check)
        if plan:
            replayed.num_plans += 1
            digest.update(plan)
        if what:
            replayed.difference = ReplayDifference(replayed.num_events, described(call), what)
            break
    replayed.seconds = (last or 0.0) - (first or 0.0)
    replayed.digest = digest.hexdigest()
    return replayed


def answer(core: Scheduler, call: RecordedCall, check: Check | None) -> tuple[bytes, str]:
    """The bytes of the plan that this core makes, if it makes one, and how that is not what it was, if it is not."""
    plan, error = b"", ""
    try:
        result = attrgetter(call.name)(core)(*call.args, **call.kwargs)
        plan = encode(result) if isinstance(result, StepPlan) else b""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    drain(core)
    if error != call.error:
        before, now = call.error or "nothing", error or "nothing"
        return plan, f"raises {error}" if call.is_last and error else f"raised {before}, now {now}"
    if plan != call.plan and not (call.is_last and not call.plan):
        return plan, compared(call.plan, plan)
    return plan, checked(core, check) if check is not None else ""


def checked(core: Scheduler, check: Check) -> str:
    try:
        check(core)
    except Exception as broken:
        return str(broken)
    return ""


def drain(core: Scheduler) -> None:
    """Take what a shell would send: that changes no later decision."""
    core.outbound.take_batches()
    core.outbound.take_rejections()
    core.adapters.take_answers()
    core.journal.take()


def compared(before: bytes, now: bytes) -> str:
    """How two plans differ; empty where only the number of their fields does."""
    decoder = MessageDecoder[StepPlan](StepPlan)
    if not before or not now:
        return "a plan is made where there was none" if now else "no plan is made where there was one"
    old, new = msgspec.structs.asdict(decoder.decode(before)), msgspec.structs.asdict(decoder.decode(now))
    named = [f"{name} was {_short(old[name])}, is {_short(new[name])}" for name in old if old[name] != new[name]]
    return f"step {old['step_id']} differs: {'; '.join(named)}" if named else ""


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def described(call: RecordedCall) -> str:
    """A call in one line, without the contents of its prompt."""
    return f"{call.name}({', '.join(_name(arg) for arg in call.args)})"


def _name(argument: Any) -> str:
    if isinstance(argument, AddRequest):
        return f"request {argument.header.request_id}"
    if isinstance(argument, StepResult):
        return f"result of step {argument.step_id}"
    return type(argument).__name__ if isinstance(argument, msgspec.Struct) else _short(argument, 60)


# -- reading


def begin(frame: list[Any]) -> tuple[Scheduler, str]:
    """A core with the recorded settings, and the reason why it may be that of other code."""
    if len(frame) != 5 or frame[0] != START:
        raise ProtocolError("this file is not a recording of a scheduler from its beginning")
    _, version, made_by, schema, policy = frame
    if version != FORMAT:
        raise ProtocolError(f"the recording has format {version}, and this version reads {FORMAT}")
    foreign = "" if schema == schema_hash() else f"it was made by version {made_by} with other messages"
    try:
        known = msgspec.convert(policy, Policy)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the recording's settings cannot be read: {error}") from error
    return Scheduler(known), foreign


def opened(path: Path) -> BinaryIO:
    """Raises OSError."""
    with path.open("rb") as file:
        is_compressed = file.read(len(GZIP)) == GZIP
    return cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb")


def read_frames(file: BinaryIO) -> Iterator[list[Any]]:
    """One frame after the other; the last one may have been cut off.  Raises ProtocolError on what is none."""
    arguments = MessageDecoder[Any](SchedulerInbox | DraftCapacity | WorkerCapacity)

    def extended(code: int, data: memoryview) -> Any:
        if code != MESSAGE:
            raise ProtocolError(f"a recording has no extension of type {code}")
        return arguments.decode(data)

    decoder = msgspec.msgpack.Decoder(list[Any], ext_hook=extended)
    while len(length := read(file, LENGTH_BYTES)) == LENGTH_BYTES:
        size = int.from_bytes(length, "little")
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {size} bytes is too large")
        if len(data := read(file, size)) < size:
            return
        try:
            yield decoder.decode(data)
        except UNDECODABLE as error:
            raise ProtocolError(f"a frame cannot be read: {error}") from error


def read(file: BinaryIO, size: int) -> bytes:
    """Fewer bytes at the end, which may lie within a compressed block."""
    try:
        return file.read(size)
    except EOFError:
        return b""
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ProtocolError(f"a compressed recording is damaged: {error}") from error


def calls(frames: Iterable[list[Any]]) -> Iterator[RecordedCall]:
    """Calls with their outcomes."""
    pending: RecordedCall | None = None
    for frame in frames:
        match frame:
            case [kind, str(name), list(args), dict(kwargs)] if kind == CALL:
                if pending is not None:
                    yield pending
                if name not in EVENTS:
                    raise ProtocolError(f"a scheduler has no call {name!r}")
                pending = RecordedCall(name, args, kwargs)
            case [kind, bytes(plan)] if kind == PLAN and pending is not None:
                pending = msgspec.structs.replace(pending, plan=plan)
            case [kind, str(error), str(text)] if kind == ERROR and pending is not None:
                pending = msgspec.structs.replace(pending, error=f"{error}: {text}")
            case _:
                kind = frame[0] if frame else ""
                raise ProtocolError(f"a frame of kind {kind!r} is in a wrong place, or is not whole")
    if pending is not None:
        yield msgspec.structs.replace(pending, is_last=True)
