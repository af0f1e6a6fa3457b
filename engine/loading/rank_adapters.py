"""Adapters in a group of ranks: each reads its own part of one, when the leader says so.

    leader -> a rank   HoldAdapter   read this, and hold it at this place
    a rank -> leader   AdapterHeld   it is there, or why it cannot be

They pass the channel on which the ranks agreed while they loaded.  No step names the place before all have answered.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import msgspec

from engine.lora.adapter import LoraAdapter
from shared.errors import FatalError, ModelError
from shared.ranks.channel import Channel

LOOK_EVERY = 0.1  # seconds, at whether the group has ended


class HoldAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int  # of the order
    place: int
    path: str  # of its directory, on each rank's host
    digest: str


class AdapterHeld(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int  # of the order
    rank: int
    error: str = ""


class AdapterOrders:
    """The leader's end: one order after the other."""

    def __init__(self) -> None:
        self.channels: Sequence[Channel] = ()  # once the group is there
        self._answers: queue.SimpleQueue[AdapterHeld] = queue.SimpleQueue()
        self._has_ended = threading.Event()
        self._number = 0

    def hold(self, place: int, adapter: LoraAdapter) -> None:
        """Returns once all others have it.  Raises ModelError where one cannot, FatalError once the group has ended."""
        self._number += 1
        order = HoldAdapter(self._number, place, str(adapter.directory), adapter.digest)
        for channel in self.channels:
            channel.send(order)
        answers: list[AdapterHeld] = []
        while len(answers) < len(self.channels):
            answer = self._next_answer()
            if answer.number == order.number:  # others are of an order that was given up
                answers.append(answer)
        if refusal := next((one for one in answers if one.error), None):
            raise ModelError(f"rank {refusal.rank}: {refusal.error}")

    def answered(self, answer: AdapterHeld) -> None:
        """From any thread."""
        self._answers.put(answer)

    def end(self) -> None:
        """The group has ended: a thread that waits here gets an error."""
        self._has_ended.set()

    def _next_answer(self) -> AdapterHeld:
        while not self._has_ended.is_set():
            try:
                return self._answers.get(timeout=LOOK_EVERY)
            except queue.Empty:
                continue
        raise FatalError("the group of ranks has ended while an adapter was loaded")
