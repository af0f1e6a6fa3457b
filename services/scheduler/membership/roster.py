"""The live instances by name, and when each was last heard of.  Time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.scheduler.membership.deployment import FingerprintGuard, Known
from shared.messages import (
    DraftCapacity,
    DropBlocks,
    FetchBlocks,
    Fingerprint,
    Heartbeat,
    Hello,
    LookUpBlocks,
    Member,
    OfferBlocks,
    ServeBlocks,
    ServiceName,
    StoreCapacity,
    WorkerCapacity,
)

# Several times the greatest real value of each: a greater one is an error, and its ledger would fill memory.
PLAUSIBLE = {
    "num_blocks": 1 << 22,
    "block_size": 1 << 10,
    "max_num_seqs": 1 << 14,
    "max_model_len": 1 << 24,
    "vocab_size": 1 << 22,
    "num_rows": 1 << 14,
    "num_snapshots": 1 << 20,
    "block_bytes": 64 << 20,
}
MAX_SLIDING = 16  # pools of a worker
MAX_REASON = 200  # characters
MAX_SILENCED = 256  # lives that were taken for dead and may come back
SPACE_BYTES = 16
MAX_ADDRESS, MAX_SECRET = 512, 64  # bytes of a store's
CAN_BE_NONE = {"vocab_size", "num_snapshots", "block_bytes"}


MoveOrder = OfferBlocks | FetchBlocks | ServeBlocks | DropBlocks | LookUpBlocks


@dataclass(slots=True)
class Presence:
    member: Member
    capacity: WorkerCapacity | None
    last_seen: float
    fingerprint: Fingerprint | None = None
    alive: frozenset[str] = frozenset()  # of a gateway: what began its open streams
    stalled: str = ""
    is_computing: bool = False
    store: StoreCapacity | None = None


class Membership:
    """The members and the version of the roster, which grows with every change."""

    def __init__(self, *, mixed_workers: bool = False) -> None:
        self.version = 1
        self.deployment = FingerprintGuard(mixed_workers=mixed_workers)
        self._present: dict[str, Presence] = {}
        self._silenced: dict[str, int] = {}  # the lives that were lost as silent, by instance

    @property
    def members(self) -> list[Member]:
        return [presence.member for presence in self._present.values()]

    def address_of(self, instance: str) -> str:
        return self._present[instance].member.address

    def with_store(self, order: MoveOrder) -> MoveOrder | None:
        """An order with the address and the secret of its store, where it has to be known; None where that has left."""
        if isinstance(order, ServeBlocks):
            return order
        presence = self._present.get(order.store)
        if presence is None or presence.store is None:
            return None
        if isinstance(order, DropBlocks | LookUpBlocks):
            return order
        return msgspec.structs.replace(order, address=presence.store.data_address, secret=presence.store.secret)

    def addresses(self, service: ServiceName) -> list[str]:
        return [member.address for member in self.members if member.service == service]

    @property
    def has_streams(self) -> bool:
        """Whether a gateway has streams that a worker has begun."""
        return any(presence.alive for presence in self._present.values())

    def fingerprints(self, *, is_alive: bool) -> list[Fingerprint]:
        return self.deployment.fingerprints(self._known(workers_only=True), is_alive=is_alive)

    def recall(self, hello: Hello) -> dict[str, str]:
        """Note with which fingerprints a gateway's streams began; returns the workers that differ, and why."""
        return self.deployment.recall(hello.alive, self._known(workers_only=True))

    def _known(self, *, but: str = "", workers_only: bool = False) -> list[Known]:
        return [
            Known(name, presence.fingerprint, presence.capacity)
            for name, presence in self._present.items()
            if name != but and (presence.capacity is not None or not workers_only)
        ]

    def refusal(self, hello: Hello, schema: str, *, is_alive: bool = False) -> str | None:
        """The reason why an instance cannot join, for its log; None where it can.

        `is_alive`: whether there are requests whose output must not change in the middle.
        """
        if hello.schema_hash != schema:
            return f"its messages have schema {hello.schema_hash}, this deployment's have {schema}: mixed versions"
        if reason := implausible(hello.worker or hello.draft) or self._draft_refusal(hello.draft):
            return reason
        if reason := implausible_store(hello):
            return reason
        return self.deployment.refusal(hello, self._known(but=hello.instance), is_alive=is_alive) or None

    def _draft_refusal(self, draft: DraftCapacity | None) -> str | None:
        """A draft uses the workers' token ids, or has no vocabulary of its own."""
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
        alive = frozenset(one.name for one in hello.alive)
        presence = Presence(member, hello.worker, now, hello.fingerprint, alive, store=hello.store)
        self._present[hello.instance] = presence
        self.deployment.joined(hello)
        if known is not None and known.member == member:
            return False
        self.version += 1
        return True

    def is_life(self, instance: str, epoch: int) -> bool:
        """Whether this life of an instance is on the roster."""
        presence = self._present.get(instance)
        return presence is not None and presence.member.epoch == epoch

    def heard(self, heartbeat: Heartbeat, now: float) -> bool:
        """Note what a member reports; False where it is not on the roster and should send a hello again."""
        if not self.is_life(heartbeat.instance, heartbeat.epoch):
            return False
        presence = self._present[heartbeat.instance]
        presence.last_seen = now
        presence.stalled, presence.is_computing = heartbeat.stalled, heartbeat.is_computing
        presence.alive = frozenset(heartbeat.alive)
        return True

    @property
    def stalled(self) -> list[str]:
        """The members that report a stall, with their reasons."""
        return [f"{name}: {p.stalled[:MAX_REASON]}" for name, p in self._present.items() if p.stalled]

    @property
    def computing(self) -> frozenset[str]:
        """The instances where a step is under way."""
        return frozenset(name for name, presence in self._present.items() if presence.is_computing)

    def leave(self, instance: str, epoch: int) -> Member | None:
        """Remove an instance; None where that life of it was not on the roster."""
        if not self.is_life(instance, epoch):
            return None
        self.version += 1
        return self._present.pop(instance).member

    def excuse(self, now: float) -> None:
        """Do not count the silence of the members so far: this process stood still."""
        for presence in self._present.values():
            presence.last_seen = now

    def take_silent(self, now: float, timeout: float) -> list[Member]:
        """Members not heard of for longer than `timeout` seconds, which are taken for dead from now on."""
        found = [p.member for p in self._present.values() if now - p.last_seen > timeout]
        for member in found:
            self._silenced.pop(member.instance, None)
            self._silenced[member.instance] = member.epoch
        for instance in list(self._silenced)[:-MAX_SILENCED]:
            del self._silenced[instance]
        return found

    def is_back(self, hello: Hello) -> bool:
        """Whether this is the life that was last taken for dead under its name: it was slow, or cut off."""
        return self._silenced.pop(hello.instance, None) == hello.epoch


def implausible(capacity: WorkerCapacity | DraftCapacity | None) -> str | None:
    """The reason why this cannot be the capacity of a process; None where it can."""
    for name, most in PLAUSIBLE.items():
        value = getattr(capacity, name, None)
        least = 0 if name in CAN_BE_NONE else 1
        if value is not None and not least <= value <= most:
            return f"its {name} is {value}, which must be in {least}..{most}"
    return implausible_windows(capacity) if isinstance(capacity, WorkerCapacity) else None


def implausible_store(hello: Hello) -> str | None:
    """The reason why these cannot be a store's address and secret, or a worker's space; None where they can."""
    store, worker = hello.store, hello.worker
    if store is not None and not (len(store.data_address) <= MAX_ADDRESS and 0 < len(store.secret) <= MAX_SECRET):
        return f"its data link needs an address of at most {MAX_ADDRESS} bytes and a secret of 1 to {MAX_SECRET} bytes"
    if worker is not None and worker.block_space and (len(worker.block_space) != SPACE_BYTES or not worker.block_bytes):
        return f"its blocks have a space of {len(worker.block_space)} bytes, or no size"
    return None


def implausible_windows(capacity: WorkerCapacity) -> str | None:
    """The reason why these cannot be a worker's sliding pools; None where they can."""
    windows = [one.window for one in capacity.sliding]
    if windows != sorted(set(windows)) or not all(1 <= window <= PLAUSIBLE["max_model_len"] for window in windows):
        return f"the windows of its sliding pools are {windows[:MAX_SLIDING]}, which must be positive and grow"
    if len(windows) > MAX_SLIDING:
        return f"it has {len(windows)} sliding pools, more than {MAX_SLIDING}"
    for one in capacity.sliding:
        longest = -(-capacity.max_model_len // capacity.block_size)
        least = min(longest, -(-one.window // capacity.block_size) + 2)
        if not least <= one.num_blocks <= PLAUSIBLE["num_blocks"]:
            return (
                f"its pool for a window of {one.window} tokens has {one.num_blocks} blocks, which must be in "
                f"{least}..{PLAUSIBLE['num_blocks']}"
            )
    return None
