"""Adapters: which are there, who holds them, and orders to load and to forget."""

from __future__ import annotations

from shared.messages.base import Message


class Adapter(Message, frozen=True):
    """One content under one name.  The digest is what tokens, keys and values depend on."""

    name: str
    digest: str = ""  # of the files; empty where a worker has not read them yet
    path: str = ""  # the directory, as workers see it


class LoadAdapter(Message, frozen=True):
    """Gateway -> scheduler: have a worker read a directory, and let requests name what is there.

    Answered by AdapterLoaded, or by RequestRejected.  What had the name before serves no request that comes later.
    """

    request_id: str
    gateway: str
    name: str
    path: str


class UnloadAdapter(Message, frozen=True):
    """Gateway -> scheduler: forget a name.  Answered as LoadAdapter is, once no request uses it any more."""

    request_id: str
    gateway: str
    name: str


class AdapterLoaded(Message, frozen=True):
    """Scheduler -> gateway, for both."""

    request_id: str
    adapter: Adapter


class HoldAdapters(Message, frozen=True):
    """Scheduler -> worker: hold these and no others.  Answered by AdaptersHeld, orders in turn."""

    epoch: int
    order: int
    adapters: list[Adapter]


class AdapterFailure(Message, frozen=True):
    adapter: Adapter  # as it was ordered
    reason: str


class AdaptersHeld(Message, frozen=True):
    """Worker -> scheduler: what it holds since this order, with digests, and what it could not load."""

    epoch: int
    order: int
    adapters: list[Adapter]
    failures: list[AdapterFailure] = []
