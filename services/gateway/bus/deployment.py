"""The other services by the newest roster: which are missing, what they compute with, and which tokenizer to ask."""

from __future__ import annotations

from services.gateway.bus.bus import Bus
from shared.messages import Roster, ServiceName
from shared.transport import pick

NEEDED = (ServiceName.TOKENIZER, ServiceName.WORKER, ServiceName.DETOKENIZER)


class RosterView:
    """Keeps nothing: each answer is read from the roster as it is now."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @property
    def roster(self) -> Roster:
        return self._bus.roster

    @property
    def scheduler_is_live(self) -> bool:
        return self._bus.scheduler_is_live

    @property
    def absent(self) -> str:
        """Which other services are not there, or an empty string."""
        if not self._bus.scheduler_is_live:
            return "no scheduler is live"
        absent = [service for service in NEEDED if not self._bus.members(service)]
        if self.roster.is_asleep and ServiceName.WORKER in absent:
            absent.remove(ServiceName.WORKER)  # it comes when a request wants it
        return f"no {' and no '.join(absent)} is live" if absent else ""

    def absent_for(self, fingerprint: str) -> str:
        """As `absent`, for a stream that was begun with this fingerprint: others would change its text."""
        absent = self.absent
        kinds = [one.name for one in self.roster.fingerprints]
        if absent or not fingerprint or not kinds or fingerprint in kinds:
            return absent
        return f"no worker has fingerprint {fingerprint}, with which this stream began; workers have {', '.join(kinds)}"

    @property
    def system_fingerprint(self) -> str:
        """The name of what is computed with, in a row where workers are mixed; empty where no worker has come yet."""
        return ",".join(sorted(one.name for one in self.roster.fingerprints))

    def tokenizer(self, key: str) -> str:
        """The address of the live replica that serves `key`, or an empty string."""
        return pick(key, [member.address for member in self._bus.members(ServiceName.TOKENIZER)]) or ""
