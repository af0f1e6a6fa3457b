"""Where the time of a call goes, as its gateway sees it: its own part, losses, a slow reader, what others tell."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from protos.pageant.v1.inference_pb2 import GenerateRequest
from services.cli.display.terminal import explained
from services.gateway.streams.latency import StreamLatency
from shared.messages import FinishReason, LatencyBreakdown, SequenceText, TokenizeRequest
from shared.tracing.explanation import cause, for_clients, missed
from shared.tracing.latency import NOTHING, LatencyTracker, arrived, checked, settled
from shared.tracing.phases import NUM_MISSES, NUM_PHASES, Miss, Phase
from tests.unit.gateway.generation.test_generate import ask, drain
from tests.unit.gateway.troupe import front


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Call:
    """A stream's account, the troupe's part of which the test plays."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.account = StreamLatency(100.0, self.clock)

    def after(self, seconds: float) -> Call:
        self.clock.now += seconds
        return self

    def hear(self, latency: LatencyBreakdown | None, *, end: bool = False, index: int = 0) -> None:
        reason = FinishReason.LENGTH if end else None
        news = SequenceText("r", index, 0, 0, "x", [1], finish_reason=reason, latency=latency)
        self.account.heard_at = self.clock.now
        if end or latency is not None:
            self.account.heard(news, self.clock.now, busy_since=self.clock.now)

    def seconds(self) -> dict[Phase, float]:
        return {Phase(n): micros / 1e6 for n, micros in enumerate(self.account.breakdown().spent) if micros}


def spent(**seconds: float) -> list[int]:
    found = [0] * NUM_PHASES
    for name, value in seconds.items():
        found[Phase[name.upper()]] = round(value * 1e6)
    return found


def test_a_call_from_end_to_end() -> None:
    call = Call()
    sent = call.after(0.5).account.sent()
    assert sent == LatencyBreakdown(spent(gateway=0.5), 100.5)
    call.after(2.0).hear(LatencyBreakdown(spent(gateway=0.5, prefill=1.75), 102.25))
    assert call.account.first == {"gateway": 500.0, "prefill": 1750.0, "to_gateway": 250.0}
    call.after(3.0).hear(LatencyBreakdown(spent(gateway=0.5, prefill=1.75, decode=3.0), 105.25), end=True)
    call.after(0.125).account.write_began()
    call.after(1.0).account.write_ended()
    assert call.seconds() == {
        Phase.GATEWAY: 0.625, Phase.PREFILL: 1.75, Phase.DECODE: 3.0, Phase.TO_GATEWAY: 0.25, Phase.CLIENT_BLOCKED: 1.0
    }  # fmt: skip
    assert sum(call.seconds().values()) == call.clock.now - 100.0


def test_what_the_client_says_of_its_sending_comes_first() -> None:
    clock = Call().clock
    account = StreamLatency(clock.now, clock, sent=clock.now - 0.25)
    clock.now += 0.5
    assert account.sent().spent == spent(from_client=0.25, gateway=0.5)
    assert list(account.fields()["phases"]) == ["from_client", "gateway"]
    assert account.fields()["arrival"] + 0.75 == clock.now


def test_a_write_that_is_under_way_when_the_end_comes_blocks_from_then_on() -> None:
    call = Call()
    call.account.sent()
    call.hear(LatencyBreakdown(spent(), 100.0))
    call.account.write_began()
    call.after(2.0).hear(LatencyBreakdown(spent(decode=2.0), 102.0), end=True)
    call.after(5.0).account.write_ended()
    call.after(0.25).account.write_began()
    call.after(1.0).account.write_ended()
    assert call.seconds() == {Phase.DECODE: 2.0, Phase.CLIENT_BLOCKED: 6.0, Phase.GATEWAY: 0.25}


def test_a_write_before_the_end_is_no_phase_of_its_own() -> None:
    call = Call()
    call.after(1.0).account.sent()
    call.account.write_began()
    call.after(2.0).account.write_ended()
    assert call.seconds() == {Phase.GATEWAY: 1.0, Phase.UNTOLD: 2.0}
    call.hear(LatencyBreakdown(spent(gateway=1.0, decode=2.0), call.clock.now), end=True)
    call.account.write_began()
    call.after(4.0).account.write_ended()
    call.after(8.0)
    assert call.seconds() == {Phase.GATEWAY: 9.0, Phase.DECODE: 2.0, Phase.CLIENT_BLOCKED: 4.0}
    call.account.sent()
    call.account.write_began()
    call.after(16.0).account.write_ended()
    assert Phase.UNTOLD in call.seconds() and call.seconds()[Phase.CLIENT_BLOCKED] == 4.0, "it is not over any more"


def test_what_was_written_before_the_end_does_not_block_it() -> None:
    call = Call()
    call.account.sent()
    call.account.write_began()
    call.account.write_ended()
    call.hear(LatencyBreakdown(spent(), 100.0), end=True)
    call.after(1.0)
    assert call.seconds() == {Phase.GATEWAY: 1.0}


def test_a_second_end_of_writing_is_none() -> None:
    call = Call()
    call.account.sent()
    call.hear(LatencyBreakdown(spent(), 100.0), end=True)
    call.after(1.0).account.write_ended()
    call.after(1.0)
    assert call.seconds() == {Phase.GATEWAY: 2.0}


def test_what_came_first_is_kept_and_a_closed_account_stays_as_it_is() -> None:
    call = Call()
    call.after(1.0).account.sent()
    call.after(1.0).hear(LatencyBreakdown(spent(prefill=1.0), 102.0))
    call.after(1.0).hear(LatencyBreakdown(spent(prefill=1.0, decode=1.0), 103.0))
    assert call.account.first == {"prefill": 1000.0}
    call.account.close()
    before = call.account.breakdown()
    call.after(5.0)
    assert call.account.breakdown() == before and call.seconds() == {Phase.PREFILL: 1.0, Phase.DECODE: 1.0}


def test_the_end_s_line_has_the_counts_of_the_last_breakdown() -> None:
    call = Call()
    call.account.sent()
    misses = [3, 0, 7] + [0] * (NUM_MISSES - 3)
    last = LatencyBreakdown(spent(prefill=1.0), 100.0, 5, 4, 2, misses, 1200)
    call.after(1.0).hear(last, end=True)
    fields = call.account.finished_fields()
    assert (fields["num_ahead"], fields["num_chunks"], fields["num_preemptions"]) == (5, 4, 2)
    assert fields["misses"] == {"below_block": 3, "evicted": 7} and fields["evicted_ago_ms"] == 1200
    assert call.account.explanation().num_ahead == 5
    assert fields["first_phases"] == {"prefill": 1000.0, "to_gateway": 1000.0}
    other = Call()
    other.account.sent()
    assert other.account.breakdown().evicted_ago == -1, "nothing is known of that"
    other.hear(LatencyBreakdown(spent(), 100.0, evicted_ago=0), end=True)
    assert other.account.finished_fields()["evicted_ago_ms"] == 0, "just now"
    other.hear(LatencyBreakdown(spent(), 100.0, evicted_ago=-1), end=True)
    assert "evicted_ago_ms" not in other.account.finished_fields(), "nothing was evicted"


def test_what_was_sent_in_vain_is_lost() -> None:
    call = Call()
    call.after(0.5).account.sent()
    sent = call.after(2.0).account.sent()
    assert sent.spent == spent(gateway=0.5, lost=2.0)


def test_what_had_come_before_a_loss_still_counts() -> None:
    call = Call()
    call.account.sent()
    call.after(1.0).hear(LatencyBreakdown(spent(prefill=1.0), 101.0))
    call.after(2.0).hear(None)
    sent = call.after(4.0).account.sent()
    assert sent.spent == spent(prefill=1.0, decode=2.0, lost=4.0)


def test_of_a_call_that_ends_before_its_time_the_rest_is_not_told() -> None:
    call = Call()
    call.after(0.5).account.sent()
    call.after(3.0)
    assert call.account.fields()["phases"] == {"gateway": 500.0, "untold": 3000.0}
    assert call.account.fields()["cause"] == "3000 ms of 3500 not answered"


def test_of_n_sequences_the_one_that_ends_last_is_told_of_and_the_first_one_s_misses() -> None:
    call = Call()
    call.account.sent()
    misses = [0, 7] + [0] * (NUM_MISSES - 2)
    call.hear(LatencyBreakdown(spent(prefill=1.0), 100.0, misses=misses), end=True)
    later = LatencyBreakdown(spent(prefill=1.0, decode=1.0), 101.0, misses=[1] + [0] * (NUM_MISSES - 1))
    call.after(1.0).hear(later, end=True, index=1)
    assert call.account.breakdown().spent == spent(prefill=1.0, decode=1.0)
    assert call.account.finished_fields()["misses"] == {"never_seen": 7}


async def test_the_line_that_ends_a_call_accounts_for_its_time() -> None:
    async with front() as f:
        with structlog.testing.capture_logs() as lines:
            call = f.inference.Generate(ask())
            _, request = await f.troupe.asked(TokenizeRequest)
            assert request.latency is not None
            await asyncio.sleep(0.01)
            account = LatencyTracker(Phase.PREFILL, request.latency.stamp, request.latency)
            latency = account.breakdown(request.latency.stamp + 0.001)
            f.troupe.say(request, "there", finish_reason=FinishReason.STOP, num_output_tokens=1, latency=latency)
            await drain(call)
        (line,) = [line for line in lines if line["event"] == "request_finished"]
        assert line["phases"]["prefill"] == pytest.approx(1.0, abs=0.01)
        assert sum(line["phases"].values()) == pytest.approx(line["e2e_ms"], abs=2.0)
        assert line["arrival"] == request.header.arrival_time
        assert line["cause"]


async def test_a_client_that_asks_is_told_in_the_last_message() -> None:
    async with front() as f:
        calls = [f.inference.Generate(GenerateRequest(text="Once", explain=explain)) for explain in (True, False)]
        for _ in calls:
            _, request = await f.troupe.asked(TokenizeRequest)
            assert request.latency is not None
            counts = [3] + [0] * (NUM_MISSES - 1)
            latency = LatencyBreakdown(request.latency.spent, request.latency.stamp, num_ahead=5, misses=counts)
            f.troupe.say(request, "over ", latency=latency)
            f.troupe.say(request, "there", at=(1, 5), finish_reason=FinishReason.STOP, latency=latency)
        *early, last = await drain(calls[0])
        assert not any(response.HasField("explanation") for response in (*early, *await drain(calls[1])))
        told = last.explanation
        assert {entry.phase for entry in told.phases} <= {phase.label for phase in Phase}
        assert told.num_ahead == 5 and told.cause
        assert [(entry.reason, entry.tokens) for entry in told.misses] == [("below_block", 3)]
        assert "below_block" in explained(told) and explained(told).endswith(told.cause)


async def test_without_tracing_nothing_travels() -> None:
    async with front(tracing=False) as f:
        call = f.inference.Generate(ask())
        _, request = await f.troupe.asked(TokenizeRequest)
        assert request.latency is None
        f.troupe.say(request, "there", finish_reason=FinishReason.STOP, num_output_tokens=1)
        await drain(call)


# -- breakdowns


def test_mail_that_waited_for_a_busy_service_is_that_service_s_time() -> None:
    sent = LatencyBreakdown(spent(), 100.0)
    assert arrived(sent, Phase.TO_TOKENIZER, now=102.0, busy_since=99.0) == (LatencyBreakdown(spent(), 100.0), 100.0)
    latency, since = arrived(sent, Phase.TO_TOKENIZER, now=102.0, busy_since=101.5)
    assert (latency.spent, since) == (spent(to_tokenizer=1.5), 101.5)


def test_clocks_apart_cancel_out() -> None:
    there, _ = arrived(LatencyBreakdown(spent(), 100.0), Phase.TO_TOKENIZER, now=130.25, busy_since=130.25)
    back, _ = arrived(there, Phase.TO_SCHEDULER, now=100.5, busy_since=100.5)
    assert back.spent == spent(to_tokenizer=30.25, to_scheduler=-29.75)
    assert settled(back.spent) == spent(to_tokenizer=0.5)


@pytest.mark.parametrize(
    "nonsense",
    [
        LatencyBreakdown([1]), LatencyBreakdown([1 << 62] * NUM_PHASES),
        LatencyBreakdown([0] * NUM_PHASES, float("nan")), LatencyBreakdown([0] * NUM_PHASES, float("inf")),
        LatencyBreakdown([0] * NUM_PHASES, misses=[1]), LatencyBreakdown([0] * NUM_PHASES, 1e300),
        LatencyBreakdown([0] * NUM_PHASES, evicted_ago=-(1 << 63)),
    ],
)  # fmt: skip
def test_a_breakdown_that_makes_no_sense_is_not_believed(nonsense: LatencyBreakdown) -> None:
    assert checked(nonsense) == NOTHING


def test_causes_in_words() -> None:
    queued = LatencyBreakdown(spent(queue_blocks=0.61, queue_step=0.002, decode=0.228), 0.0, num_ahead=14)
    assert cause(queued) == "612 ms of 840 queued: no free blocks, 14 requests ahead"
    counts = [12, 0, 288] + [0] * (NUM_MISSES - 3)
    prefill = LatencyBreakdown(spent(prefill=0.5), 0.0, misses=counts, evicted_ago=5100)
    assert missed(prefill) == "300 tokens to compute, 12 below a block, 288 evicted 5.1 s before"
    assert cause(prefill).endswith(missed(prefill))
    assert cause(LatencyBreakdown(spent(preempted=0.2, recompute=0.1), num_preemptions=2)).endswith(
        "recomputed: 2 times"
    )


def test_every_phase_has_words() -> None:
    said = {cause(LatencyBreakdown([1000 * (number == phase) for number in range(NUM_PHASES)])) for phase in Phase}
    assert len(said) == len(Phase) - 1, "being preempted and recomputing are one"


def test_a_client_does_not_learn_what_other_tenants_ask() -> None:
    counts = [0] * NUM_MISSES
    counts[Miss.SALT], counts[Miss.NEVER_SEEN] = 32, 8
    told = for_clients(LatencyBreakdown(spent(), 1.0, misses=counts))
    assert told.misses[Miss.SALT] == 0
    assert told.misses[Miss.NEVER_SEEN] == 40
    assert counts[Miss.SALT] == 32
