"""Rounds of sending: at once while there is time, at a share of a core where there is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from services.gateway.streams.flush_throttle import FEW, MAX_REST, FlushThrottle, stretch


class Stream:
    def __init__(self) -> None:
        self.num_woken = 0
        self.is_slow = False  # it is still sending when it is woken again
        self.sent: Callable[[], None] = lambda: None

    def wake(self, sent: Callable[[], None]) -> bool:
        self.num_woken += 1
        self.sent = sent
        return not self.is_slow


class Hand:
    """A clock and a processor meter that stand still unless they are moved, and streams that count."""

    def __init__(self, num_streams: int = FEW + 1, stretch: float = 2.0) -> None:
        self.now = 100.0
        self.spent = 5.0
        self.streams = [Stream() for _ in range(num_streams)]
        self.throttle = FlushThrottle(stretch=stretch, clock=lambda: self.now, spent=lambda: self.spent)
        self.output()

    @property
    def num_woken(self) -> int:
        (count,) = {stream.num_woken for stream in self.streams}
        return count

    def output(self) -> int:
        """Output comes for all; how often they were woken so far."""
        for stream in self.streams:
            self.throttle.add(stream)
        self.throttle.release()
        return self.num_woken

    def work(self, seconds: float, idle: float = 0.0) -> None:
        self.spent += seconds
        self.now += seconds + idle

    def send(self, seconds: float) -> None:
        """All that are not slow have sent what they had."""
        self.work(seconds)
        for stream in self.streams:
            if not stream.is_slow:
                stream.sent()


async def test_nothing_waits_while_rounds_are_short() -> None:
    hand = Hand()
    for count in range(2, 10):
        hand.work(0.002, idle=0.003)
        assert hand.output() == count


async def test_a_round_rests_as_long_as_it_worked() -> None:
    hand = Hand()
    hand.work(0.02)
    assert 0.019 < hand.throttle.rest() <= 0.021
    assert hand.output() == 1, "not yet"
    assert hand.output() == 1, "all of it leaves together"
    async with asyncio.timeout(30):
        while hand.num_woken < 2:
            await asyncio.sleep(0.005)


async def test_all_that_comes_during_a_rest_leaves_in_one_round() -> None:
    hand = Hand()
    hand.work(0.02)
    assert [hand.output() for _ in range(3)] == [1, 1, 1]
    async with asyncio.timeout(30):
        while hand.num_woken < 2:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.03)  # as long as further rests would take
    hand.work(0.02)
    assert hand.num_woken == 2 and hand.throttle.rest() > 0, "no round without streams has begun behind it"


@pytest.mark.parametrize(("cores", "times"), [(1, 7.0), (2, 4.0), (6, 2.0)])
def test_the_share_is_small_on_a_small_machine_only(cores: int, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(cores))}.__getitem__)  # of this process
    assert stretch() == times


async def test_no_output_waits_for_longer_than_its_limit() -> None:
    hand = Hand()
    hand.work(10.0)
    assert hand.throttle.rest() == MAX_REST


async def test_a_few_streams_never_wait() -> None:
    hand = Hand(FEW)
    for count in range(2, 6):
        hand.work(10.0)
        assert hand.output() == count


async def test_a_processor_that_others_use_is_no_reason_to_wait() -> None:
    hand = Hand()
    hand.work(0.02, idle=0.03)
    assert hand.output() == 2


async def test_only_what_sending_takes_is_waited_for() -> None:
    hand = Hand()
    hand.send(0.002)
    hand.work(0.004)  # a request of a megabyte is read
    assert hand.output() == 2
    hand.work(0.004)  # while they send, what the time was for is not known
    assert 0.003 < hand.throttle.rest() <= 0.004


async def test_a_slow_reader_is_not_waited_for() -> None:
    hand = Hand()
    hand.streams[0].is_slow = True
    hand.send(0.002)
    hand.work(0.004)
    assert hand.throttle.rest() > 0.0, "in its first round it counts, as it was not known to be slow"
    hand.work(0.0, idle=1.0)
    assert hand.output() == 2
    hand.send(0.002)
    hand.work(0.004)
    assert hand.throttle.rest() <= 0.0


async def test_a_round_in_which_nobody_sends_costs_nothing() -> None:
    hand = Hand()
    hand.work(0.0, idle=1.0)
    for stream in hand.streams:
        stream.is_slow = True
    assert hand.output() == 2
    hand.work(0.01)
    assert hand.throttle.rest() <= 0.0


async def test_rounds_that_are_short_beside_the_time_between_outputs_never_wait() -> None:
    hand = Hand(stretch=4.0)
    for _ in range(50):  # it learns how often output comes
        hand.send(0.001)
        hand.work(0.0, idle=0.009)
        hand.output()
    hand.send(0.004)
    assert hand.throttle.rest() == 0.0, "four times that is more than ten milliseconds, but most of a core is left"
    hand.work(0.0, idle=0.006)
    hand.output()
    hand.send(0.006)
    assert 0.017 < hand.throttle.rest() < 0.019, "it is behind"


async def test_senders_that_come_in_a_rest_are_woken_once_each_at_its_end() -> None:
    hand = Hand()
    hand.work(0.02)
    late = Stream()
    hand.output()
    hand.throttle.add(late)
    hand.throttle.add(late)
    hand.throttle.release()
    assert late.num_woken == 0 and hand.num_woken == 1
    async with asyncio.timeout(30):
        while not late.num_woken:
            await asyncio.sleep(0.005)
    assert late.num_woken == 1 and hand.num_woken == 2
    hand.throttle.release()
    assert hand.num_woken == 2, "nothing is there to send"


async def test_only_output_tells_how_often_output_comes() -> None:
    hand = Hand(stretch=4.0)
    for _ in range(50):
        hand.work(0.0, idle=0.01)
        hand.output()
        for _ in range(5):  # as when a stream has ended
            hand.throttle.release()
    hand.send(0.004)
    assert hand.throttle.rest() == 0.0, "less than half of ten milliseconds"


async def test_a_round_costs_what_was_spent_until_its_last_sender_had_sent() -> None:
    hand = Hand(stretch=2.0)
    hand.output()
    last, *others = hand.streams
    hand.work(0.01)
    for stream in others:
        stream.sent()
    hand.work(0.01)
    last.sent()
    hand.work(0.01)
    assert 0.0099 < hand.throttle.rest() < 0.0101, "forty milliseconds from its beginning on, of which thirty are over"
