"""A core that records the calls made to it, so that `pageant replay` can make the same calls to another.

A recording is a row of frames.  The first has the core's settings.  Then comes a frame for each call, written before
the call is made, so that the last call of a scheduler that dies is there; and after a call a frame with the plan that
it made, or with the error that it raised.

Recordings hold the token ids of prompts and outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from shared.messages import Message, StepPlan, encode, schema_hash
from shared.version import VERSION

FORMAT = 1
LENGTH_BYTES = 4  # before each frame, little-endian
MESSAGE = 1  # the extension type of a message within a frame
START, CALL, PLAN, ERROR = "start", "call", "plan", "error"
SCALARS = frozenset({type(None), bool, int, float, str, bytes})
EVENTS = (
    "add", "abort", "attach", "abort_gateway", "expire", "stop_matched", "stream_lost", "set_detokenizers",
    "add_worker", "retire_worker", "lose_worker", "deaths.take_back", "add_draft", "lose_draft", "schedule", "apply",
    "propose", "take_updates", "ask_holdings", "reconcile", "check_ledgers", "renew_worker",
    "moves.join", "moves.leave", "moves.told", "moves.moved", "moves.take_orders", "moves.serve",
    "handovers.leave", "handovers.take_released",
    "adapters.learn", "adapters.load", "adapters.unload", "adapters.take_orders", "adapters.held",
)  # fmt: skip  # every call of a shell that changes the core

_encoder = msgspec.msgpack.Encoder()


class Recording(Protocol):
    """Where frames go."""

    def write(self, frame: bytes) -> None:
        """Append a frame; the recording handles its own errors."""


class RecordedScheduler(Scheduler):
    """A scheduler.  Calls that it makes to itself are not written: they follow from those that are."""

    def __init__(self, policy: Policy, recording: Recording) -> None:
        super().__init__(policy)
        self.recording = recording
        self._is_asked = False
        recording.write(framed(START, FORMAT, VERSION, schema_hash(), asdict(policy)))
        for name in EVENTS:
            *parts, method = name.split(".")
            owner = attrgetter(*parts)(self) if parts else self
            setattr(owner, method, self._recorded(name, getattr(owner, method)))

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_asked:
                return method(*args, **kwargs)
            args = tuple(map(_settled, args))
            self._is_asked = True
            try:
                return self._ask(name, method, args, kwargs)
            finally:
                self._is_asked = False

        return call

    def _ask(self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording = self.recording
        recording.write(framed(CALL, name, list(map(_packed, args)), {k: _packed(v) for k, v in kwargs.items()}))
        try:
            result = method(*args, **kwargs)
        except Exception as error:
            recording.write(framed(ERROR, type(error).__name__, str(error)))
            raise
        if isinstance(result, StepPlan):
            recording.write(framed(PLAN, encode(result)))
        return result


def framed(*parts: Any) -> bytes:
    data = _encoder.encode(parts)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _settled(value: Any) -> Any:
    """An iterator can be read once only: it becomes a list."""
    return value if type(value) in SCALARS or isinstance(value, Message) else list(value)


def _packed(value: Any) -> Any:
    return msgspec.msgpack.Ext(MESSAGE, encode(value)) if isinstance(value, Message) else value
