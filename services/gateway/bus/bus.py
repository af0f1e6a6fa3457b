"""What the gateway's services need of its process: an address, a roster, and a way to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.actor import LifePhase
from shared.messages import Member, Message, Roster, ServiceName


class Bus(Protocol):
    """The process's mailbox, as those that serve clients may use it."""

    @property
    def address(self) -> str:
        """Where answers to this gateway are sent; it may change."""

    @property
    def scheduler(self) -> str:
        """The scheduler's address."""

    @property
    def scheduler_is_live(self) -> bool:
        """Whether a roster came within the heartbeat timeout."""

    @property
    def roster(self) -> Roster:
        """The newest one."""

    @property
    def phase(self) -> LifePhase:
        """Of the process's life."""

    @property
    def busy_since(self) -> float:
        """Unix seconds; the mailbox has not been empty since then."""

    def members(self, service: ServiceName) -> Sequence[Member]:
        """The live instances of a service."""

    def send(self, address: str, message: Message) -> None:
        """Queue a message for the next flush."""

    def send_soon(self, address: str, message: Message) -> None:
        """Queue a message from outside a handler; it leaves at the end of this turn of the event loop."""

    def flush(self) -> None:
        """Send what is queued now."""
