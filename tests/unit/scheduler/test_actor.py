"""The scheduler's shell, handler by handler: what each message makes it send, with a clock that the test sets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from services.scheduler.actor import SchedulerActor
from services.scheduler.main import make
from shared.actor import LifePhase
from shared.config import Settings
from shared.messages import (
    AbortRequest,
    AddRequest,
    AttachRequest,
    DraftCapacity,
    DraftProposals,
    DraftUpdate,
    Fingerprint,
    GetLoad,
    Goodbye,
    Heartbeat,
    Hello,
    Holdings,
    Load,
    PeerGone,
    Refused,
    ReportHoldings,
    RequestHeader,
    RequestRejected,
    Roster,
    ServiceName,
    StepPlan,
    StepResult,
    Tick,
    TokenBatch,
    Wake,
    schema_hash,
)
from shared.packing import pack_tokens
from shared.sampling import GenerationDefaults, SamplingParams
from shared.transport import MemoryTransport
from tests.unit.scheduler.fake_worker import FakeWorker, capacity

SERVICES = {"w": ServiceName.WORKER, "d": ServiceName.DETOKENIZER, "g": ServiceName.GATEWAY, "s": ServiceName.DRAFT}


class Shell:
    """A shell whose messages are kept, and whose time is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        values = {"heartbeat_timeout": 10.0, "reconcile_interval": 5.0, **settings}
        actor = make(MemoryTransport(), Settings.of(**values))
        assert isinstance(actor, SchedulerActor)
        self.actor = actor
        self.sent: list[tuple[str, Any]] = []
        self.later: list[float] = []
        self.told: list[str] = []  # alarms of which an incident was written
        self.workers: dict[str, FakeWorker] = {}
        monkeypatch.setattr(actor, "send", lambda address, message: self.sent.append((address, message)))
        monkeypatch.setattr(actor, "afterwards", lambda work: work())
        monkeypatch.setattr(actor, "later", lambda seconds, message: self.later.append(seconds))
        monkeypatch.setattr(actor, "say_status", lambda: None)
        actor.now = actor._last_tick = actor._last_reconciled = 1000.0

    def hear(self, message: Any) -> None:
        self.actor.handlers()[type(message)](message)
        self.actor.before_flush()

    def taken(self, kind: type[Any], address: str = "") -> list[Any]:
        """The messages of a kind that went to an address, or anywhere, since they were last taken."""
        found = [one for where, one in self.sent if isinstance(one, kind) and address in ("", where)]
        self.sent = [(where, one) for where, one in self.sent if one not in found]
        return found

    def hello(self, name: str, epoch: int = 1, **more: Any) -> Hello:
        service = SERVICES[name[0]]
        size = capacity() if service is ServiceName.WORKER else None
        draft = DraftCapacity(8, 128, 50, "fake") if service is ServiceName.DRAFT else None
        values = {"worker": size, "draft": draft} | more
        return Hello(service, name, f"at-{name}", epoch, schema_hash(), **values)

    def join(self, *names: str) -> None:
        for name in names:
            self.hear(self.hello(name))
            if name[0] == "w":
                self.workers[name] = FakeWorker(capacity())
        self.sent.clear()

    def ask(self, request_id: str = "r", **more: Any) -> None:
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        resolved = params.resolved(GenerationDefaults(), max_tokens=16)
        header = RequestHeader(request_id, "at-g", arrival_time=self.actor.now, **more)
        self.hear(AddRequest(header, resolved, pack_tokens([1, 2, 3, 4]), [0]))

    def work(self, name: str = "w") -> None:
        """A worker answers all plans that it was sent."""
        for plan in self.taken(StepPlan, f"at-{name}"):
            answer = self.workers[name].take(plan)
            assert isinstance(answer, StepResult)
            self.hear(answer)

    @property
    def members(self) -> list[str]:
        return [member.instance for member in self.actor.membership.members]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    made = Shell(monkeypatch)
    made.join("w", "d", "g")
    return made


def test_two_plans_are_sent_at_once_and_one_for_each_answer(shell: Shell) -> None:
    shell.ask()
    assert len(shell.sent) == 2 and [plan.step_id for _, plan in shell.sent] == [0, 1]
    shell.work()
    assert [plan.step_id for plan in shell.taken(StepPlan, "at-w")] == [2, 3]
    assert shell.taken(TokenBatch, "at-d")


def test_every_step_is_measured_and_logged_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch, log_steps=True)
    shell.join("w", "d", "g")
    with capture_logs() as lines:
        shell.ask()
        shell.actor.now += 0.25
        shell.work()
    (first, second) = [line for line in lines if line["event"] == "step_finished"]
    assert (first["step_id"], first["ms"], first["num_tokens"]) == (0, 250.0, 4) and second["step_id"] == 1
    assert shell.actor.steps.tokens.sum == 4 + 1 + 1 + 1


def test_notes_are_written_unless_tracing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for tracing, words in ((True, {"request_queued", "sequence_scheduled"}), (False, set())):
        shell = Shell(monkeypatch, tracing=tracing)
        shell.join("w", "d", "g")
        with capture_logs() as lines:
            shell.ask()
        assert {line["event"] for line in lines} == words


def test_an_answer_of_another_life_or_that_came_before_changes_nothing(shell: Shell) -> None:
    shell.ask()
    plan, _ = shell.taken(StepPlan, "at-w")
    answer = shell.workers["w"].take(plan)
    assert isinstance(answer, StepResult)
    shell.hear(answer)
    shell.sent.clear()
    with capture_logs() as lines:
        shell.hear(answer)
        shell.hear(msgspec.structs.replace(answer, epoch=7))
    assert [line["event"] for line in lines] == ["repeated_result", "stale_result"]
    assert shell.sent == [] and shell.actor.core.replicas["w"].epoch == plan.epoch


@pytest.mark.parametrize(("step_id", "event"), [(1, "step_lost"), (0, "worker_out_of_step")])
def test_a_link_that_lost_a_message_or_speaks_nonsense_is_begun_anew(shell: Shell, step_id: int, event: str) -> None:
    shell.ask()
    first, _ = shell.taken(StepPlan, "at-w")
    with capture_logs() as lines:
        shell.hear(StepResult(first.epoch, step_id, [1, 1], [5, 6]))
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [event]
    replica = shell.actor.core.replicas["w"]
    assert replica.epoch > first.epoch and replica.epoch == shell.actor.lives.last
    (plan, _) = shell.taken(StepPlan, "at-w")
    assert (plan.epoch, plan.step_id) == (replica.epoch, 0), "the request is computed anew"
    losses = shell.actor.core.counters.num_worker_losses, shell.actor.core.counters.num_lost_steps
    assert losses == ((0, 1) if event == "step_lost" else (1, 0))


def test_an_abort_says_whether_its_client_has_everything(shell: Shell) -> None:
    for request_id, reason in (("a", "cancelled"), ("b", "finished")):
        shell.ask(request_id)
        shell.hear(AbortRequest(request_id, reason, "at-other"))
        assert request_id in shell.actor.core.requests, "it is another gateway's"
        shell.hear(AbortRequest(request_id, reason, "at-g"))
        assert request_id not in shell.actor.core.requests
    assert (shell.actor.core.counters.num_aborted, shell.actor.core.counters.num_finished) == (1, 1)


def test_a_deadline_is_that_of_the_time_that_was_left(shell: Shell) -> None:
    shell.ask("a", time_left=50.0, deadline=1.0)
    deadline = shell.actor.core.requests["a"].header.deadline
    assert deadline is not None and deadline > 1.0, "that of its sender's clock says nothing here"
    shell.ask("k", is_kept=True)
    shell.hear(AttachRequest("k", "at-g", deadline=1.0, time_left=60.0))
    later = shell.actor.core.requests["k"].header.deadline
    assert later is not None and later > deadline
    shell.hear(AttachRequest("none", "at-g"))
    assert [one.request_id for one in shell.taken(RequestRejected, "at-g")] == ["none"]


def test_load_goes_to_the_gateway_that_asks(shell: Shell) -> None:
    shell.ask()
    shell.hear(GetLoad("q", "at-g"))
    (load,) = shell.taken(Load, "at-g")
    assert (load.request_id, load.num_running, load.step_tokens_sum) == ("q", 1, 5)
    (worker,) = load.workers
    assert (worker.num_running, worker.num_steps, worker.num_blocks) == (1, 2, 64)
    assert worker.num_free_blocks + worker.num_cached_blocks == 63 and load.kv_cache_usage == pytest.approx(1 / 64)


# -- ledgers


def test_holdings_are_asked_for_when_it_is_time(shell: Shell) -> None:
    shell.actor.now = 1004.9
    shell.hear(Tick())
    assert shell.taken(ReportHoldings) == []
    shell.actor.now = 1005.0
    shell.hear(Tick())
    assert len(shell.taken(ReportHoldings, "at-w")) == 1
    shell.hear(Tick())
    assert shell.taken(ReportHoldings) == []


def test_a_leak_is_told_as_an_alarm_and_kept_as_an_incident(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Incidents:
        write = shell.told.append

    monkeypatch.setattr(shell.actor, "incidents", Incidents)
    shell.actor.core.replicas["w"].pool.allocate(2)
    shell.actor.now = 1006.0
    with capture_logs() as lines:
        shell.hear(Tick())
    (line,) = [line for line in lines if line["event"] == "leak_reclaimed"]
    assert line["num_leaked_blocks"] == 2 and shell.told == ["leak_reclaimed"]


def test_a_report_without_a_plan_begins_the_link_anew_and_a_stale_one_does_nothing(shell: Shell) -> None:
    shell.ask()
    shell.taken(StepPlan)
    epoch = shell.actor.core.replicas["w"].epoch
    with capture_logs() as lines:
        shell.hear(Holdings(epoch=3, report_id=1, next_step_id=0, due_step_id=0))
        assert shell.actor.core.replicas["w"].epoch == epoch
        shell.hear(Holdings(epoch=epoch, report_id=0, next_step_id=2, due_step_id=1))
    assert [line["event"] for line in lines if "worker" in line or line["event"] == "stale_holdings"][:2] == [
        "stale_holdings", "step_lost"
    ]  # fmt: skip
    assert shell.actor.core.replicas["w"].epoch > epoch


# -- drafts


def test_drafts_get_updates_and_the_shell_wakes_when_they_are_late(shell: Shell) -> None:
    shell.join("s")
    for _ in range(40):
        if not shell.actor.core.requests:
            shell.ask(f"r{shell.actor.core.counters.num_finished}")
        shell.actor.now += 0.01
        shell.work()
        if shell.later:
            break
    assert shell.taken(DraftUpdate, "at-s"), "it is told what was committed"
    (seconds,) = shell.later
    assert 0.0 < seconds <= 1.0
    shell.actor.before_flush()
    assert len(shell.later) == 1, "once for the same time"
    shell.actor.now += seconds
    shell.hear(Wake())
    assert shell.taken(StepPlan, "at-w"), "without drafts"


def test_a_draft_that_speaks_nonsense_is_begun_anew(shell: Shell) -> None:
    shell.join("s")
    link = shell.actor.core.drafts.links["s"]
    with capture_logs() as lines:
        shell.hear(DraftProposals(5, 0, [], [], [], []))
        assert shell.actor.core.drafts.links["s"].epoch == link.epoch
        shell.hear(DraftProposals(link.epoch, 0, [1, 2], [3], [1], [4]))
    assert [line["event"] for line in lines] == ["stale_proposals", "draft_out_of_step"]
    assert shell.actor.core.drafts.links["s"].epoch == shell.actor.lives.last > link.epoch


# -- members


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


def test_who_is_silent_too_long_is_lost_unless_this_process_stood_still(shell: Shell) -> None:
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


# -- its own state


def test_a_worker_that_makes_no_steps_for_its_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch, stall_timeout=4.0)
    shell.join("w", "d", "g")
    assert shell.actor.stall() == ""
    shell.ask()
    assert shell.actor.stall() == ""
    shell.actor.now += 4.5
    assert shell.actor.stall() == "no step for the work that waits at w"
    shell.hear(Heartbeat(ServiceName.WORKER, "w", 1, is_computing=True))
    assert shell.actor.stall() == ""


def test_its_state_in_numbers_has_members_and_load(shell: Shell) -> None:
    shell.ask()
    state = shell.actor.snapshot()
    assert state["load"]["num_running"] == 1 and state["num_requests"] == 1 and state["num_homeless"] == 0
    assert (
        [member.instance for member in state["members"]]
        == ["w", "d", "g"]
        == [member.instance for member in shell.actor.known_members]
    )
    (running,) = state["workers"]["w"]["running"]
    assert (running["request_id"], running["num_tokens"], running["num_pending"]) == ("r", 4, 2)
    assert len(shell.actor.collectors()) > 1 and shell.actor.inbox_name == "scheduler"


async def test_it_is_ready_when_it_has_begun(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[Any] = []
    monkeypatch.setattr(shell.actor, "every", lambda seconds, message: repeated.append((seconds, message)))
    await shell.actor.on_start()
    assert shell.actor.phase is LifePhase.READY and [type(one) for _, one in repeated] == [Tick]
