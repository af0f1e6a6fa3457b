"""Who is alive: instances by name, when each was last heard of.  Time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Hello, Member, ServiceName, WorkerCapacity


@dataclass(slots=True)
class Presence:
    member: Member
    capacity: WorkerCapacity | None
    last_seen: float


class Troupe:
    """The membership and its version, which grows with every change."""

    def __init__(self) -> None:
        self.version = 1
        self._present: dict[str, Presence] = {}

    @property
    def members(self) -> list[Member]:
        return [presence.member for presence in self._present.values()]

    def address_of(self, instance: str) -> str:
        return self._present[instance].member.address

    def addresses(self, service: ServiceName) -> list[str]:
        return [member.address for member in self.members if member.service == service]

    def refusal(self, hello: Hello, schema: str) -> str | None:
        """Why an instance cannot join, in words for its log; None where it can."""
        if hello.schema_hash != schema:
            return f"its messages have schema {hello.schema_hash}, this deployment's have {schema}: mixed versions"
        if hello.worker is None:
            return None
        for presence in self._present.values():
            other = presence.capacity
            if other is not None and presence.member.instance != hello.instance:
                for name in ("model", "vocab_size", "block_size", "dtype", "max_model_len"):
                    mine, theirs = getattr(hello.worker, name), getattr(other, name)
                    if mine != theirs:
                        return f"its {name} is {mine!r}, that of {presence.member.instance} is {theirs!r}"
        return None

    def join(self, hello: Hello, now: float) -> bool:
        """Note a hello; True where the instance is new, or in a new life."""
        member = Member(hello.service, hello.instance, hello.address, hello.epoch)
        known = self._present.get(hello.instance)
        self._present[hello.instance] = Presence(member, hello.worker, now)
        if known is not None and known.member == member:
            return False
        self.version += 1
        return True

    def heard(self, instance: str, epoch: int, now: float) -> bool:
        """Note a heartbeat; False where the instance is not on the roster and should say hello again."""
        presence = self._present.get(instance)
        if presence is None or presence.member.epoch != epoch:
            return False
        presence.last_seen = now
        return True

    def leave(self, instance: str, epoch: int) -> Member | None:
        """Strike an instance off; None where that life of it was not there."""
        presence = self._present.get(instance)
        if presence is None or presence.member.epoch != epoch:
            return None
        self.version += 1
        return self._present.pop(instance).member

    def silent(self, now: float, timeout: float) -> list[Member]:
        """Members not heard of for longer than `timeout` seconds."""
        return [p.member for p in self._present.values() if now - p.last_seen > timeout]
