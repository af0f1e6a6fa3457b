"""The shell's part in moves of blocks: who offers data links, orders with their addresses, workers that leave."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.scheduler.membership.roster import Membership
from services.scheduler.scheduler import Scheduler
from shared.messages import Hello, Leaving, MayLeave, Message, ServiceName

log = structlog.get_logger()


class BlockTraffic:
    """Between the core and the members."""

    def __init__(self, core: Scheduler, membership: Membership, send: Callable[[str, Message], None]) -> None:
        self._core = core
        self._membership = membership
        self._send = send
        self._leaving: dict[str, Leaving] = {}

    def greet(self, hello: Hello) -> None:
        """A member that is on the roster now has a data link, or none."""
        if hello.store is None:
            return
        if hello.service is ServiceName.WORKER:
            self._core.moves.serve(hello.instance)
        else:
            self._core.moves.join(hello.instance, can_look_up=hello.store.can_look_up)

    def leaving(self, message: Leaving) -> None:
        """A worker is about to leave.  One of another life hears nothing, and leaves when its time is over."""
        if self._membership.is_life(message.instance, message.epoch):
            log.info("leaving", member=message.instance)
            here = {name: one for name, one in self._leaving.items() if self._membership.is_life(name, one.epoch)}
            self._leaving = here | {message.instance: message}
            self._core.handovers.leave(message.instance)

    def dispatch(self, now: float) -> None:
        """Behind the plans that were made."""
        if self._core.moves.are_possible:
            for instance, order in self._core.moves.take_orders(now):
                if (addressed := self._membership.with_store(order)) is not None:
                    self._send(self._membership.address_of(instance), addressed)
        if self._leaving:
            for instance in self._core.handovers.take_released():
                message = self._leaving.pop(instance, None)
                if message is not None and self._membership.is_life(instance, message.epoch):
                    self._send(self._membership.address_of(instance), MayLeave(instance, message.epoch))
