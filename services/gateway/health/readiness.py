"""Whether all services are there, so that requests can be served, or soon will; tasks can wait for a change."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from services.gateway.bus.bus import Bus
from services.gateway.bus.deployment import RosterView
from services.gateway.bus.refusals import unavailable
from shared.actor import LifePhase
from shared.messages import Roster

WAIT_FOR_SERVICES = 0.2  # seconds, where they were not there before


class Readiness:
    """`patience`: seconds for which a missing service is taken to be on the way back.  `shares_ports`: others
    serve the same ports, so that one that drains still takes what had reached it."""

    def __init__(self, bus: Bus, deployment: RosterView, patience: float, *, shares_ports: bool) -> None:
        self._bus = bus
        self._deployment = deployment
        self._patience = patience
        self._shares_ports = shares_ports
        self._scheduler_seen = 0.0
        self._complete_at = -math.inf  # when no service was missing last
        self._stalled_elsewhere = ""
        self._changed = asyncio.Event()

    @property
    def is_leaving(self) -> bool:
        """Whether the gateway has been asked to end."""
        return self._bus.phase >= LifePhase.DRAINING

    @property
    def missing(self) -> str:
        """Why no request can be served now, or an empty string."""
        if self.is_leaving:
            return "the server is draining"
        return self._deployment.absent or ("" if self._bus.phase is LifePhase.READY else "the gateway is starting")

    @property
    def unwell(self) -> str:
        """Why health checks should fail: a service is missing, or work that waits does not go on.  In a stall
        requests are taken all the same: it may pass, and they would find no other gateway better."""
        return self.missing or self._stalled_elsewhere

    @property
    def _will_serve(self) -> bool:
        """Whether all are there, or were so lately that a missing one is probably being replaced."""
        phase = self._bus.phase
        if phase is not LifePhase.READY and not (phase is LifePhase.DRAINING and self._shares_ports):
            return False
        return not self._deployment.absent or time.monotonic() - self._complete_at < self._patience

    async def until_available(self) -> None:
        """Return once requests can be served, or will soon be; raises RequestError, soon, where they cannot."""
        if self._will_serve:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_FOR_SERVICES):
                while self.missing and not self.is_leaving:
                    await self.changed()
        if self.missing:
            raise unavailable(self.missing)

    # -- news

    def heard(self, roster: Roster, *, is_current: bool) -> None:
        """The scheduler lives; a roster that is not current says nothing more."""
        if is_current:
            self._stalled_elsewhere = roster.stalled
        self._scheduler_seen = time.monotonic()
        if not self._deployment.absent:
            self._complete_at = self._scheduler_seen

    def has_lost_scheduler(self, now: float) -> bool:
        """Whether nothing has come from it for longer than there is patience."""
        return now - self._scheduler_seen > self._patience

    async def changed(self) -> None:
        """Wait for the next change of the roster or the phase."""
        await self._changed.wait()

    def notice(self) -> None:
        """Wake the tasks that wait in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()
