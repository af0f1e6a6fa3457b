"""The scheduler's shell: what members that come, speak, are silent and go make it send."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.state.sequence import MAX_DEATHS_TAKEN_BACK, MAX_WORKER_DEATHS
from shared.messages import (
    AbortRequest,
    Adapter,
    AdapterLoaded,
    AdaptersHeld,
    Fingerprint,
    Goodbye,
    Heartbeat,
    HoldAdapters,
    LoadAdapter,
    PeerGone,
    Refused,
    RequestRejected,
    Roster,
    ServiceName,
    Tick,
    TokenBatch,
    UnloadAdapter,
)
from tests.unit.scheduler.actor.shell import SERVICES, Shell
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    made = Shell(monkeypatch)
    made.join("w", "d", "g")
    return made


def test_a_new_member_is_told_to_all_and_one_that_is_known_gets_the_roster(shell: Shell) -> None:
    shell.hear(shell.hello("d2"))
    assert {where for where, one in shell.sent if isinstance(one, Roster)} == {"at-w", "at-d", "at-g", "at-d2"}
    version = shell.taken(Roster)[0].version
    shell.hear(shell.hello("d2"))
    assert [where for where, _ in shell.sent] == ["at-d2"] and shell.taken(Roster)[0].version == version
    epoch = shell.actor.core.replicas["w"].epoch
    shell.hear(shell.hello("w"))
    assert [type(one).__name__ for where, one in shell.sent if where == "at-w"] == ["Roster", "ReportHoldings"]
    assert shell.actor.core.replicas["w"].epoch == epoch, "it goes on where it is"
    shell.hear(shell.hello("w", 2))
    assert shell.actor.core.replicas["w"].epoch > epoch, "another life has nothing"


def test_the_roster_says_what_is_there(shell: Shell) -> None:
    shell.hear(Heartbeat(ServiceName.DETOKENIZER, "d", 1, stalled="no disk"))
    shell.hear(shell.hello("d"))
    roster = shell.taken(Roster, "at-d")[-1]
    assert (roster.scheduler_epoch, roster.max_model_len, roster.max_input_length) == (shell.actor.epoch, 128, 127)
    assert [member.instance for member in roster.members] == ["w", "d", "g"] and roster.former_epochs == []
    assert roster.model is not None and roster.model.num_blocks == 64 and roster.stalled == ""
    shell.hear(Heartbeat(ServiceName.GATEWAY, "g", 1, stalled="no disk"))
    shell.actor.stalled = "it waits"
    shell.hear(Tick())
    assert shell.taken(Roster, "at-g")[-1].stalled == "it waits; g: no disk"


def test_another_schema_is_refused(shell: Shell) -> None:
    shell.hear(msgspec.structs.replace(shell.hello("d2"), schema_hash="other"))
    ((where, refused),) = shell.sent
    assert where == "at-d2" and isinstance(refused, Refused) and "schema" in refused.reason
    assert shell.members == ["w", "d", "g"]


def test_a_worker_s_fingerprint_is_known_by_its_name(shell: Shell) -> None:
    one = Fingerprint(config="another")
    shell.hear(Goodbye(ServiceName.WORKER, "w", 1))
    shell.hear(shell.hello("w2", fingerprint=one))
    assert shell.actor.core.replicas["w2"].capacity.fingerprint == one.name
    shell.hear(Goodbye(ServiceName.WORKER, "w2", 1))
    shell.hear(shell.hello("w3"))
    assert shell.actor.core.replicas["w3"].capacity.fingerprint == ""


def test_a_greater_epoch_that_a_member_knows_is_passed_by(shell: Shell) -> None:
    shell.join("s")
    before, known = shell.actor.epoch, shell.actor.epoch + (1 << 40)
    links = shell.actor.core.replicas["w"].epoch, shell.actor.core.drafts.links["s"].epoch
    shell.hear(Heartbeat(ServiceName.GATEWAY, "g", 1, newest_epoch=before))
    assert shell.actor.epoch == before
    shell.hear(Heartbeat(ServiceName.GATEWAY, "g", 1, newest_epoch=known))
    assert shell.actor.epoch > known and shell.actor.lives.former == [before]
    assert min(shell.actor.core.replicas["w"].epoch, shell.actor.core.drafts.links["s"].epoch) > shell.actor.epoch
    assert max(links) < shell.actor.epoch
    assert {where for where, one in shell.sent if isinstance(one, Roster)} == {"at-w", "at-d", "at-g", "at-s"}


def test_an_unknown_sender_of_heartbeats_gets_the_roster_where_it_can(shell: Shell) -> None:
    shell.hear(Heartbeat(ServiceName.DETOKENIZER, "d9", 1))
    shell.hear(Heartbeat(ServiceName.DETOKENIZER, "d", 1, address="at-d"))
    assert shell.sent == []
    shell.hear(Heartbeat(ServiceName.DETOKENIZER, "d9", 1, address="at-d9"))
    assert [where for where, _ in shell.sent] == ["at-d9"]


def test_a_member_that_is_silent_too_long_is_lost_unless_this_process_stood_still(shell: Shell) -> None:
    for now in (1004.0, 1008.0, 1010.0):
        shell.actor.now = now
        for name in ("w", "d"):
            shell.hear(Heartbeat(SERVICES[name], name, 1))
        shell.hear(Tick())
    assert shell.members == ["w", "d", "g"], "ten seconds are not too long"
    shell.actor.now = 1015.0
    shell.hear(Tick())
    assert shell.members == ["w", "d"]
    shell.actor.now = 1030.1
    shell.hear(Tick())
    assert shell.members == ["w", "d"], "their messages may not be read yet"
    for now in (1034.0, 1038.0, 1040.2):
        shell.actor.now = now
        shell.hear(Tick())
    assert shell.members == [] and not shell.actor.core.replicas


def test_what_goes_with_a_member_that_leaves(shell: Shell) -> None:
    shell.ask()
    shell.hear(Goodbye(ServiceName.WORKER, "w", 9))
    assert "w" in shell.members, "another life of it"
    shell.hear(Goodbye(ServiceName.WORKER, "w", 1))
    assert not shell.actor.core.replicas and shell.actor.core.counters.num_worker_losses == 0
    assert list(shell.actor.core.requests) == ["r"], "it waits for another"
    shell.hear(PeerGone("at-g"))
    assert shell.members == ["d"] and not shell.actor.core.requests


def test_a_worker_s_death_is_a_loss_and_a_draft_s_ends_drafting(shell: Shell) -> None:
    shell.join("s")
    shell.ask()
    shell.actor.now += 3.0
    shell.hear(PeerGone("at-w"))
    assert shell.actor.core.counters.num_worker_losses == 1 and shell.actor.core.clock.now == 1003.0
    shell.hear(PeerGone("at-s"))
    assert not shell.actor.core.drafts and shell.members == ["d", "g"]


def test_streams_move_when_their_detokenizer_leaves(shell: Shell) -> None:
    shell.ask()
    shell.work()
    shell.sent.clear()
    shell.hear(shell.hello("d2"))
    shell.sent.clear()
    shell.hear(Goodbye(ServiceName.DETOKENIZER, shell.actor.core.requests["r"].detokenizer.removeprefix("at-"), 1))
    (batch,) = shell.taken(TokenBatch)
    assert len(batch.opened) == 1 and batch.sequences[0].offset == 0


def test_requests_whose_time_is_over_are_ended_at_a_tick(shell: Shell) -> None:
    shell.ask("a")
    request = shell.actor.core.requests["a"]
    request.header = msgspec.structs.replace(request.header, deadline=1002.0)
    shell.hear(Tick())
    assert "a" in shell.actor.core.requests
    shell.actor.now = 1002.0
    shell.hear(Tick())
    assert [one.request_id for one in shell.taken(RequestRejected, "at-g")] == ["a"]


def silence(shell: Shell, *names: str, speaking: tuple[str, ...]) -> None:
    """Some are silent until they are lost, others speak."""
    for _ in range(4):
        shell.actor.now += 4.0
        for name in speaking:
            shell.hear(Heartbeat(SERVICES[name[0]], name, 1))
        shell.hear(Tick())
    assert not set(names) & set(shell.members)


def deaths(shell: Shell) -> int:
    return shell.actor.core.requests["r"].num_worker_deaths


def test_a_worker_that_was_only_slow_is_no_death(shell: Shell) -> None:
    """On a machine with too much to do each worker is silent now and then, and goes on."""
    shell.ask()
    for _ in range(4):
        silence(shell, "w", speaking=("d", "g"))
        assert deaths(shell) == 1
        shell.hear(shell.hello("w"))
        assert deaths(shell) == 0
    shell.workers["w"] = FakeWorker(capacity())
    shell.work()
    assert shell.actor.core.requests["r"].num_output_tokens > 0 and not shell.taken(RequestRejected)


def test_a_new_process_under_the_name_of_a_silent_one_takes_no_death_back(shell: Shell) -> None:
    shell.ask()
    silence(shell, "w", speaking=("d", "g"))
    shell.hear(shell.hello("w", 2))
    assert deaths(shell) == 1
    shell.hear(PeerGone("at-w"))
    assert deaths(shell) == 2
    shell.hear(shell.hello("w", 2))
    assert deaths(shell) == 2, "its connection ended: that is no silence"
    shell.hear(PeerGone("at-w"))
    assert [one.request_id for one in shell.taken(RequestRejected, "at-g")] == ["r"]


def test_a_request_that_silences_worker_after_worker_is_found_out(shell: Shell) -> None:
    shell.ask()
    num_silent = 0
    while "r" in shell.actor.core.requests:
        silence(shell, "w", speaking=("d", "g"))
        shell.hear(shell.hello("w"))
        num_silent += 1
        assert num_silent < 20
    assert num_silent == MAX_DEATHS_TAKEN_BACK + MAX_WORKER_DEATHS + 1


def test_gateways_hear_of_an_adapter_before_its_load_is_answered(shell: Shell) -> None:
    shell.hear(shell.hello("w", 2, worker=msgspec.structs.replace(capacity(), max_loras=2, num_held_loras=2)))
    version = shell.taken(Roster, "at-g")[-1].version
    shell.hear(LoadAdapter("l", "at-g", "one", "/one"))
    (order,) = shell.taken(HoldAdapters, "at-w")
    assert [adapter.path for adapter in order.adapters] == ["/one"]
    shell.sent.clear()
    one = Adapter("one", "d" * 16, "/one")
    shell.hear(AdaptersHeld(order.epoch, order.order, [one]))
    roster, answer = (message for where, message in shell.sent if where == "at-g")
    assert isinstance(roster, Roster) and roster.adapters == [one] and roster.version > version
    assert answer == AdapterLoaded("l", one)
    shell.sent.clear()
    shell.hear(UnloadAdapter("u", "at-g", "one"))
    forgotten, answer = (message for where, message in shell.sent if where == "at-g")
    assert isinstance(forgotten, Roster) and forgotten.adapters == [] and forgotten.version > roster.version
    assert answer == AdapterLoaded("u", one)
    (order,) = shell.taken(HoldAdapters, "at-w")
    assert order.adapters == []


def test_while_a_request_is_alive_no_worker_comes_that_computes_otherwise(shell: Shell) -> None:
    shell.hear(Goodbye(ServiceName.WORKER, "w", 1))
    mine, other = Fingerprint(config="mine"), Fingerprint(config="other")
    shell.hear(shell.hello("w2", fingerprint=mine))
    shell.ask()
    shell.hear(Goodbye(ServiceName.WORKER, "w2", 1))
    assert shell.taken(Roster, "at-g")[-1].fingerprints == [mine]
    shell.hear(shell.hello("w3", fingerprint=other))
    (refused,) = shell.taken(Refused, "at-w3")
    assert "its config is 'other'" in refused.reason and not shell.actor.core.replicas
    shell.hear(AbortRequest("r", gateway="at-g"))
    shell.hear(shell.hello("w3", fingerprint=other))
    assert not shell.taken(Refused) and list(shell.actor.core.replicas) == ["w3"]


def test_a_worker_that_has_begun_streams_of_its_own_stays_where_a_gateway_has_earlier_ones(shell: Shell) -> None:
    mine, earlier = Fingerprint(config="mine"), Fingerprint(config="earlier")
    shell.hear(Goodbye(ServiceName.WORKER, "w", 1))
    shell.hear(shell.hello("w2", fingerprint=mine))
    shell.workers["w2"] = FakeWorker(capacity())
    shell.hear(shell.hello("g2", alive=[earlier]))
    assert not shell.actor.core.replicas and shell.taken(Refused, "at-w2")
    shell.hear(Goodbye(ServiceName.GATEWAY, "g2", 1))
    shell.hear(shell.hello("w3", fingerprint=mine))
    shell.workers["w3"] = FakeWorker(capacity())
    shell.ask()
    shell.work("w3")
    shell.hear(shell.hello("g3", alive=[earlier]))
    assert list(shell.actor.core.replicas) == ["w3"] and not shell.taken(Refused)


def test_a_gateway_brings_the_adapters_that_it_knows_from_an_earlier_life(shell: Shell) -> None:
    one, two = Adapter("one", "d" * 16, "/one"), Adapter("two", "e" * 16, "/two")
    shell.hear(shell.hello("g2", adapters=[two, one]))
    assert shell.taken(Roster, "at-g2")[-1].adapters == [one, two]
    shell.hear(shell.hello("g3", adapters=[Adapter("one", "other", "/other")]))
    assert shell.taken(Roster, "at-g3")[-1].adapters == [one, two], "what is known stays"
