"""The scheduler's shell, handler by handler: what each message makes it send, with a clock that the test sets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.actor import LifePhase
from shared.messages import (
    AbortRequest,
    AttachRequest,
    DraftProposals,
    DraftUpdate,
    GetLoad,
    Heartbeat,
    Holdings,
    Load,
    ReportHoldings,
    RequestRejected,
    ServiceName,
    StepPlan,
    StepResult,
    Tick,
    TokenBatch,
    Wake,
)
from tests.unit.scheduler.actor.shell import Shell


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
    assert shell.actor.steps.tokens.sum == 4 + 1 + 1, "of the prompt, and sampled in two steps"


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
        assert shell.actor.core.counters.num_finished == (reason == "finished")
    assert shell.actor.core.counters.num_aborted == 1


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
    assert (load.request_id, load.num_running, load.step_tokens_sum) == ("q", 1, 0), "no step has ended"
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


def test_an_alarm_is_told_with_the_message_that_raised_it(shell: Shell) -> None:
    shell.actor.core.journal.alarm("leak_reclaimed", worker="w")
    with capture_logs() as lines:
        shell.hear(GetLoad("q", "at-g"))
    assert [line["event"] for line in lines] == ["leak_reclaimed"]


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


# -- its own state


def test_a_worker_that_makes_no_steps_for_its_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch, stall_timeout=4.0)
    shell.join("w", "d", "g")
    assert shell.actor.stall() == ""
    shell.ask()
    assert shell.actor.stall() == ""
    shell.actor.now += 4.5
    assert shell.actor.stall() == "work waits at w, and no step is computed there"
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
