"""The adapters of one worker: which it holds, which it is told to hold, and which its running sequences use."""

from __future__ import annotations

from collections import Counter

from shared.messages import Adapter, AdapterFailure, AdaptersHeld, HoldAdapters, WorkerCapacity

Key = tuple[str, str]  # of an adapter that is wanted: its digest, or its path where that is not known


def key_of(adapter: Adapter) -> Key:
    return (adapter.digest, "") if adapter.digest else ("", adapter.path)


class ReplicaAdapters:
    """Orders name all that a worker is to hold, so that nothing has to be counted on both sides.

    An answer counts only for what was ordered before it: an adapter that was given up and is wanted again is there
    when the later order is answered.
    """

    def __init__(self, capacity: WorkerCapacity) -> None:
        self.max_loras = capacity.max_loras
        self.max_held = capacity.num_held_loras
        self.running: Counter[str] = Counter()  # sequences that hold a row, by digest
        self._held: dict[str, Adapter] = {}  # by digest, the one that was started least recently first
        self._ordered: dict[Key, tuple[Adapter, int]] = {}  # and not there yet, with the order's number
        self._wanted: dict[Key, Adapter] = {}  # and not ordered yet
        self._given_up: set[str] = set()  # digests that no request may use any more
        self._order = 0

    def holds(self, digest: str) -> bool:
        return digest in self._held

    @property
    def held(self) -> list[Adapter]:
        return list(self._held.values())

    @property
    def num_to_hold(self) -> int:
        """Adapters that are there, on their way, or wanted."""
        return len(self._held) + len(self._ordered) + len(self._wanted)

    def waits_for_room(self, digest: str) -> bool:
        """Whether it is wanted, and all that the worker may hold is there or on its way."""
        return (digest, "") in self._wanted and len(self._held) + len(self._ordered) >= self.max_held

    @property
    def are_all_running(self) -> bool:
        """Whether sequences with rows use each that is held, so that none can make room for another."""
        return self._held.keys() <= self.running.keys()

    @property
    def is_loading(self) -> bool:
        """Whether the worker was told to hold one that is not there yet."""
        return bool(self._ordered)

    @property
    def has_orders(self) -> bool:
        """None is given while the digest of one that was ordered is not known: the next order could not say that it
        stays, and the worker would drop it and read it again."""
        if any(not digest for digest, _ in self._ordered):
            return False
        return bool(self._wanted or self._given_up & self._held.keys())

    def may_start(self, adapter: Adapter) -> bool:
        """Whether it is there, and a step may have one adapter more; one that is not there is wanted from now on."""
        digest = adapter.digest
        if digest not in self._held:
            self.want(adapter)
            return False
        return digest in self.running or len(self.running) < self.max_loras

    def start(self, digest: str) -> None:
        self.running[digest] += 1
        if digest in self._held:
            self._held[digest] = self._held.pop(digest)

    def stop(self, digest: str) -> None:
        self.running[digest] -= 1
        if not self.running[digest]:
            del self.running[digest]

    def want(self, adapter: Adapter) -> None:
        key = key_of(adapter)
        self._given_up.discard(adapter.digest)
        if adapter.digest not in self._held and key not in self._ordered:
            self._wanted[key] = adapter

    def give_up(self, digest: str) -> None:
        """No request uses it, and none will."""
        self._given_up.add(digest)

    def order(self, epoch: int, in_use: set[str]) -> HoldAdapters | None:
        """What to send; None where nothing changes.  Those `in_use` stay; of the others those that were used least
        recently make room."""
        if not self.has_orders:
            return None
        before = set(self._held)
        for digest in (self._given_up & before) - in_use:
            del self._held[digest]
        self._given_up &= in_use
        news = []
        for key, adapter in list(self._wanted.items()):
            if len(self._held) + len(self._ordered) >= self.max_held and not self._make_room(in_use):
                break
            del self._wanted[key]
            self._ordered[key] = adapter, self._order + 1
            news.append(adapter)
        if not news and before == self._held.keys():
            return None
        self._order += 1
        ordered = [adapter for adapter, _ in self._ordered.values()]
        return HoldAdapters(epoch, self._order, [*self._held.values(), *ordered])

    def _make_room(self, in_use: set[str]) -> bool:
        unused = next((digest for digest in self._held if digest not in in_use), None)
        if unused is None:
            return False
        del self._held[unused]
        return True

    def answered(self, message: AdaptersHeld) -> tuple[list[Adapter], list[AdapterFailure]]:
        """Take an answer in.  Returns what was read for loads, whose digests were not known, and what has failed.

        It has what was held before what was ordered, so that of two from one directory the last is what is there now.
        What failed is looked at first: the content that its directory had before is among those that are held.
        """
        came, failed = [], []
        for failure in message.failures:
            if self._is_due(key_of(failure.adapter), message.order):
                del self._ordered[key_of(failure.adapter)]
                failed.append(failure)
        for adapter in reversed(message.adapters):
            keys = [key for key in (("", adapter.path), (adapter.digest, "")) if self._is_due(key, message.order)]
            for key in keys:
                del self._ordered[key]
            if keys:
                self._held[adapter.digest] = adapter
            if ("", adapter.path) in keys:  # of one ordered by its digest a load that waits may get other content
                came.append(adapter)
        return came, failed

    def _is_due(self, key: Key, order: int) -> bool:
        return key in self._ordered and self._ordered[key][1] <= order
