"""Frames that no service would send, through every service's own run loop.

PAGEANT_TEST_FRAMES=1000000 pytest tests/messages/test_fuzz.py -k stranger     so many at each inbox
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from typing import get_args

import msgspec
import pytest

from shared import messages as m
from shared.errors import ProtocolError
from shared.messages.inboxes import INBOXES, TO_ONESELF, from_others
from tests.messages.fuzz.frames import FrameFuzzer
from tests.messages.fuzz.play import begin, fuzz
from tests.messages.fuzz.stages import STAGES, SchedulerStage
from tests.messages.fuzz.values import Nonsense, described

NUM_FRAMES = int(os.environ.get("PAGEANT_TEST_FRAMES", "6000"))
TIMEOUT = 300 + NUM_FRAMES // 2000  # seconds


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("service", STAGES)
async def test_frames_of_a_stranger_kill_nobody_and_change_nothing(service: str) -> None:
    outcome = await fuzz(service, NUM_FRAMES, seed=7)
    assert not outcome.crash
    assert not outcome.num_changes, outcome.change
    assert outcome.num_frames == NUM_FRAMES
    assert outcome.num_undecodable > NUM_FRAMES // 4
    assert outcome.num_handled > NUM_FRAMES // 20, "some make sense enough to be handled"


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("service", STAGES)
async def test_frames_of_an_insider_gone_mad_kill_nobody(service: str) -> None:
    outcome = await fuzz(service, NUM_FRAMES, seed=8, insider=True)
    assert not outcome.crash


async def test_a_change_of_state_would_be_seen() -> None:
    stage = SchedulerStage()
    running = asyncio.create_task(stage.actor.run())
    await begin(stage)
    before = stage.digest()
    assert stage.digest() == before
    stage.actor.inbox.deliver([m.encode(m.AbortRequest("healthy-1"))])
    while stage.actor.inbox._mail:
        await asyncio.sleep(0)
    with pytest.raises(KeyError):
        stage.digest()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_frames_are_of_every_kind_of_wrongness() -> None:
    for union in INBOXES:
        decoder = m.MessageDecoder[m.Message](from_others(union))
        seen: dict[str, int] = {}
        for frame in itertools.islice(FrameFuzzer(union, seed=3), 4000):
            try:
                seen[type(decoder.decode(frame)).__name__] = seen.get(type(decoder.decode(frame)).__name__, 0) + 1
            except ProtocolError:
                seen["undecodable"] = seen.get("undecodable", 0) + 1
        assert set(seen) == {kind.__name__ for kind in get_args(from_others(union))} | {"undecodable"}


def test_nonsense_fits_its_type() -> None:
    rng = random.Random(1)
    for kind in sorted({kind for union in INBOXES for kind in get_args(union)}, key=lambda kind: kind.__name__):
        nonsense, decoder, fitting = Nonsense(rng), msgspec.msgpack.Decoder(kind), 0
        assert described(kind)
        for _ in range(50):
            try:
                decoder.decode(nonsense.message(kind))
                fitting += 1
            except msgspec.ValidationError:  # a number that is wider than any field
                pass
        assert fitting > 5


@pytest.mark.parametrize("union", INBOXES, ids=lambda union: "+".join(kind.__name__ for kind in get_args(union))[:20])
def test_nobody_else_can_say_what_one_says_to_oneself(union: object) -> None:
    decoder = m.MessageDecoder[m.Message](from_others(union))
    for message in (m.Drain(1.0), m.Tick(), m.Wake()):
        assert type(message) in TO_ONESELF
        with pytest.raises(ProtocolError):
            decoder.decode(m.encode(message))
