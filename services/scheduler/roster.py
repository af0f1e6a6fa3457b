"""Who is alive: instances by name, when each was last heard of.  Time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import DraftCapacity, Heartbeat, Hello, Member, ServiceName, WorkerCapacity

# The most of each that anyone has, several times over: beyond it somebody is wrong, and its ledger would fill memory.
PLAUSIBLE = {
    "num_blocks": 1 << 22,
    "block_size": 1 << 10,
    "max_num_seqs": 1 << 14,
    "max_model_len": 1 << 24,
    "vocab_size": 1 << 22,
    "num_rows": 1 << 14,
}
MAX_REASON = 200  # characters
CAN_BE_NONE = {"vocab_size"}


@dataclass(slots=True)
class Presence:
    member: Member
    capacity: WorkerCapacity | None
    last_seen: float
    stalled: str = ""
    is_computing: bool = False


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
            return implausible(hello.draft) or self._draft_refusal(hello.draft)
        if reason := implausible(hello.worker):
            return reason
        for presence in self._present.values():
            other = presence.capacity
            if other is not None and presence.member.instance != hello.instance:
                for name in ("model", "vocab_size", "block_size", "dtype", "max_model_len"):
                    mine, theirs = getattr(hello.worker, name), getattr(other, name)
                    if mine != theirs:
                        return f"its {name} is {mine!r}, that of {presence.member.instance} is {theirs!r}"
        return None

    def _draft_refusal(self, draft: DraftCapacity | None) -> str | None:
        """A draft speaks in the workers' token ids, or in none of its own."""
        if draft is None:
            return None
        for presence in self._present.values():
            if presence.capacity is not None and draft.vocab_size not in (0, presence.capacity.vocab_size):
                return (
                    f"its vocab_size is {draft.vocab_size}, that of {presence.member.instance} is "
                    f"{presence.capacity.vocab_size}"
                )
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

    def note(self, heartbeat: Heartbeat) -> None:
        """What a member that is on the roster says of itself."""
        presence = self._present[heartbeat.instance]
        presence.stalled, presence.is_computing = heartbeat.stalled, heartbeat.is_computing

    @property
    def stalled(self) -> list[str]:
        """Who says that work waits there although nothing goes on, and why."""
        return [f"{name}: {p.stalled[:MAX_REASON]}" for name, p in self._present.items() if p.stalled]

    @property
    def computing(self) -> frozenset[str]:
        """The instances where a step is under way."""
        return frozenset(name for name, presence in self._present.items() if presence.is_computing)

    def leave(self, instance: str, epoch: int) -> Member | None:
        """Strike an instance off; None where that life of it was not there."""
        presence = self._present.get(instance)
        if presence is None or presence.member.epoch != epoch:
            return None
        self.version += 1
        return self._present.pop(instance).member

    def excuse(self, now: float) -> None:
        """Take everybody's silence so far for our own."""
        for presence in self._present.values():
            presence.last_seen = now

    def silent(self, now: float, timeout: float) -> list[Member]:
        """Members not heard of for longer than `timeout` seconds."""
        return [p.member for p in self._present.values() if now - p.last_seen > timeout]


def implausible(capacity: WorkerCapacity | DraftCapacity | None) -> str | None:
    """Why nobody can offer this; None where somebody can."""
    for name, most in PLAUSIBLE.items():
        value = getattr(capacity, name, None)
        least = 0 if name in CAN_BE_NONE else 1
        if value is not None and not least <= value <= most:
            return f"its {name} is {value}, which must be in {least}..{most}"
    return None
