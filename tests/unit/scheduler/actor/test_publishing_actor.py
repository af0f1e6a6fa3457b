"""A scheduler that publishes: what its workers' pools hold, behind each batch of messages."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.publishing.publisher import EventPublisher
from services.scheduler.publishing_actor import PublishingActor
from tests.unit.scheduler.actor.shell import Shell
from tests.unit.scheduler.test_kv_events import asked
from tests.unit.scheduler.worlds.fake_worker import capacity

ANY = "tcp://127.0.0.1:*"


@pytest.mark.parametrize("form", ["map", "array"])
async def test_events_are_published_as_they_happen_until_it_stops(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    shell = Shell(monkeypatch, kv_events=ANY, kv_events_replay=ANY, kv_events_topic="here", kv_events_format=form)
    actor = shell.actor
    assert isinstance(actor, PublishingActor)
    shell.join("w", "d", "g")
    shell.ask()
    while actor.core.requests:
        shell.work()
    actor.core.lose_worker("w")
    actor.before_flush()
    while len(found := asked(actor.publisher, 0)) < 3:
        pass
    assert [(topic, number) for topic, number, _ in found] == [(b"here", 0), (b"here", 1), (b"here", 2)]
    told = [msgspec.msgpack.decode(payload) for _, _, payload in found]
    assert all((now, rank) == (actor.now, 0) for now, _, rank in told)
    kinds = [event["type"] if form == "map" else event[0] for _, (event,), _ in told]
    assert kinds == ["AllBlocksCleared", "BlockStored", "AllBlocksCleared"]
    (stored,) = told[1][1]
    assert capacity().block_size in (stored.values() if form == "map" else stored)
    await actor.on_stop()
    EventPublisher(actor.publisher.endpoint, "", "here", 1).close()
