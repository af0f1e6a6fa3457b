"""What is received: bytes at a time, of all and of each sender; bodies that stop; senders in debt."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenizeRequest
from services.gateway.access.intake import (
    BURST,
    CREDIT,
    FASTEST,
    PATIENCE,
    REFUSED_BYTES_PER_SECOND,
    SMALL,
    Body,
    BodyIntake,
    BodyTimeoutError,
    IntakeLimits,
    make_intake,
    refusal_wait,
)
from services.gateway.grpc.receiving import host_of
from shared.config import GatewaySettings
from shared.errors import RejectCode, RequestError
from shared.fairness.debts import Debts
from shared.fairness.fair_slots import FairSlots
from shared.messages import EncodeRequest
from tests.unit.gateway.troupe import LAST, failure, front, until

MEGABYTE = 1 << 20
REFUSAL = 0.3  # seconds, in the place of the gateway's


@pytest.fixture(autouse=True)
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.access.intake.REFUSAL", REFUSAL)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def intake(total: int = 10 * MEGABYTE, sender: int = 4 * MEGABYTE, clock: Any = time.monotonic) -> BodyIntake:
    return BodyIntake(IntakeLimits(total, sender, 10.0), clock)


def test_bytes_are_bounded_in_all_and_of_each_sender() -> None:
    one = intake()
    bodies = [one.body("greedy") for _ in range(4)]
    for body in bodies:
        body.grow(MEGABYTE)
    with pytest.raises(RequestError, match="from this sender") as refused:
        for _ in range(8):
            bodies[0].grow(MEGABYTE // 8)
    assert refused.value.code is RejectCode.RESOURCE_EXHAUSTED
    for name in "abcd":
        for _ in range(2):
            try:
                one.body(name).grow(MEGABYTE)
            except RequestError as error:
                assert error.code is RejectCode.UNAVAILABLE and "at this gateway" in str(error)
    assert one.num_bytes <= one.limits.total
    one.body("late").grow(SMALL)  # a small one is read at any time


def test_what_is_held_is_the_sum_of_what_is_under_way() -> None:
    """Random bodies and ends: nothing leaks, whatever the order."""
    rng, one = random.Random(7), intake()
    open_bodies: list[Body] = []
    for _ in range(3000):
        if rng.random() < 0.5 or not open_bodies:
            open_bodies.append(one.body(rng.choice("xyz")))
        body = rng.choice(open_bodies)
        if rng.random() < 0.3:
            body.close()
            body.close()  # a second time changes nothing
            open_bodies.remove(body)
        else:
            try:
                body.grow(rng.randrange(MEGABYTE))
            except RequestError:
                body.close()
                open_bodies.remove(body)
        assert 0 <= one.num_bytes <= one.limits.total
    for body in open_bodies:
        body.close()
    assert one.num_bytes == 0


def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    clock = Clock()
    body = intake(clock=clock).body("slow")
    clock.now += 9.9
    body.grow(1)
    clock.now += 2
    with pytest.raises(BodyTimeoutError):
        body.grow(1)
    steady = intake(clock=clock).body("steady")
    for _ in range(60):
        clock.now += 1
        steady.grow(32 << 10)


def test_a_sender_is_read_at_a_rate_beyond_a_burst_and_others_are_not_held_up() -> None:
    clock = Clock()
    one = intake(64 * MEGABYTE, 64 * MEGABYTE, clock)
    first, second = one.body("fast"), one.body("fast")
    assert first.grow(int(FASTEST * BURST)) == 0.0
    assert first.grow(FASTEST // 16) == pytest.approx(1 / 16)
    assert second.grow(FASTEST // 16) == pytest.approx(2 / 16), "all its bodies count"
    assert one.body("another").grow(SMALL) == 0.0
    clock.now += 1.0
    assert first.grow(SMALL) == 0.0


def test_those_who_are_refused_do_not_come_again_together() -> None:
    waits = [refusal_wait() for _ in range(100)]
    assert min(waits) >= REFUSAL and max(waits) <= 2 * REFUSAL and max(waits) - min(waits) > REFUSAL / 2


def test_debts_are_paid_by_time_and_forgotten() -> None:
    clock = Clock()
    debts = Debts(5.0, clock)
    debts.charge("a", 4.0)
    assert debts.of("a") < 0, "it has credit"
    debts.charge("a", 4.0)
    assert debts.of("a") == pytest.approx(3.0) and debts.of("b") < 0
    clock.now += 3.0
    assert debts.of("a") == pytest.approx(0.0)
    for number in range(1000):
        clock.now += 1.0
        debts.charge(str(number), 0.5)
    assert len(debts) < 200


def test_who_sends_megabytes_for_nothing_gets_into_debt_and_out_again() -> None:
    clock = Clock()
    one = intake(clock=clock)
    for _ in range(100):
        one.refused("small", SMALL)
    assert one.wait("small") == 0.0
    for _ in range(int(CREDIT) + 3):
        one.refused("greedy", REFUSED_BYTES_PER_SECOND)
    assert one.wait("greedy") == pytest.approx(3.0) and one.wait("other") == 0.0
    assert one.in_debt("greedy").retry_after_ms == 3000
    clock.now += 3.5
    assert one.wait("greedy") == 0.0


def test_each_sender_can_send_one_of_the_largest() -> None:
    limits = make_intake(GatewaySettings(max_request_bytes=512 << 20)).limits
    assert limits.sender >= 512 << 20 and limits.total >= 2 * (512 << 20)


async def test_turns_are_passed_on_when_tasks_give_up() -> None:
    turns, rng = FairSlots(2), random.Random(3)
    running = 0

    async def work(owner: str) -> None:
        nonlocal running
        async with turns.turn(owner):
            running += 1
            assert running <= 2
            try:
                await asyncio.sleep(rng.random() / 500)
            finally:
                running -= 1

    tasks = [asyncio.create_task(work(rng.choice("abc"))) for _ in range(200)]
    for task in rng.sample(tasks, 60):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.num_waiting == 0
    async with asyncio.timeout(5), turns.turn("last"), turns.turn("last"):
        pass


async def test_an_owner_that_gives_nothing_back_leaves_places_to_others() -> None:
    turns, begun = FairSlots(4, per_owner=2), list[str]()

    async def hold(owner: str) -> None:
        async with turns.turn(owner):
            begun.append(owner)
            await asyncio.Event().wait()

    greedy = [asyncio.create_task(hold("greedy")) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert begun == ["greedy"] * 2 and turns.num_waiting == 48
    async with asyncio.timeout(5), turns.turn("other"), turns.turn("other"):
        pass
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    assert turns.num_waiting == 0 and not turns._held


def test_hosts_of_peers() -> None:
    assert host_of("ipv4:127.0.0.1:5000") == "127.0.0.1"
    assert host_of("ipv6:%5B::1%5D:5000") == host_of("ipv6:[::1]:5000") == "::1"
    assert host_of("unix:/tmp/x") == "/tmp/x"


def in_debt(one: BodyIntake, sender: str) -> None:
    one.refused(sender, int((CREDIT + 60) * REFUSED_BYTES_PER_SECOND))


async def test_grpc_refused_megabytes_put_their_sender_in_debt_and_nobody_else() -> None:
    greedy, modest = (("x-tenant", "greedy"),), (("x-tenant", "modest"),)
    async with front() as f:
        one = f.troupe.gateway.intake
        bad = GenerateRequest(text="x" * (4 * MEGABYTE), model="other")
        for _ in range(6):
            error = await failure(f.inference.Generate(bad, metadata=greedy))
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                break
        assert one.wait("127.0.0.1 greedy") > PATIENCE
        error = await failure(f.inference.Generate(bad, metadata=greedy))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "were refused" in error.details()
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
        call = f.inference.Generate(GenerateRequest(text="x"), metadata=modest)
        f.troupe.say(await f.troupe.request(), "done", **LAST)
        assert (await call.read()).text == "done"
        call = f.inference.Generate(GenerateRequest(text="x"), metadata=greedy)
        f.troupe.say(await f.troupe.request(), "slow", **LAST)
        assert (await call.read()).text == "slow", "a small request of a sender in debt is served, slowly"


async def test_a_grpc_message_that_cannot_be_read_is_put_down_to_its_sender() -> None:
    async with front() as f:
        generate = f.channel.unary_stream("/pageant.v1.Inference/Generate")
        error = await failure(generate(b"\xff" * MEGABYTE, metadata=(("x-tenant", "greedy"),)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "cannot be read" in error.details()
        assert f.troupe.gateway.intake.debts.of("127.0.0.1 greedy") > -CREDIT


async def test_of_a_sender_in_debt_few_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.grpc.receiving.MOST_SLOW", 1)
    async with front() as f:
        in_debt(f.troupe.gateway.intake, "127.0.0.1 greedy")
        greedy = (("x-tenant", "greedy"),)
        calls = [f.inference.ListModels(ListModelsRequest(), metadata=greedy) for _ in range(4)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        codes = [error.code() for error in ended if isinstance(error, grpc.aio.AioRpcError)]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2, "one was read, one waited"


async def test_without_a_key_that_opens_the_address_pays_and_the_message_is_not_read() -> None:
    async with front(api_keys="acme:correct-horse") as f:
        bad = GenerateRequest(text="x" * (8 * MEGABYTE))
        for _ in range(4):
            assert (await failure(f.inference.Generate(bad))).code() is grpc.StatusCode.UNAUTHENTICATED
        in_debt(f.troupe.gateway.intake, "address 127.0.0.1")
        key = (("x-api-key", "correct-horse"),)
        call = f.inference.Generate(GenerateRequest(text="x"), metadata=key)
        f.troupe.say(await f.troupe.request(), "done", **LAST)
        assert (await call.read()).text == "done", "who has a key pays for itself alone"


async def test_a_grpc_message_that_stops_half_way_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.grpc.receiving.CONTENDED_SECONDS", 0.05)
    async with front(body_timeout=0.1) as f:
        # A stream of requests may begin without a message; to the server it is a call whose message does not come.
        method = f.channel.stream_unary("/pageant.v1.Inference/ListModels")
        call = method()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "did not come in time" in error.details()
        assert len((await f.inference.ListModels(ListModelsRequest())).models) == 1


async def test_calls_that_never_send_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.grpc.receiving.CONTENDED_SECONDS", 0.2)
    async with front(max_receiving_bytes=1, body_timeout=60) as f:  # two places
        method = f.channel.stream_unary("/pageant.v1.Inference/ListModels")
        stuck = [method(metadata=(("x-tenant", "stuck"),)) for _ in range(6)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            assert len((await f.inference.ListModels(ListModelsRequest())).models) == 1
        for call in stuck:
            call.cancel()


async def test_a_call_without_a_message_is_told_so() -> None:
    async with front() as f:

        async def none() -> Any:
            return
            yield

        error = await failure(f.channel.stream_unary("/pageant.v1.Inference/ListModels")(none()))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "no message" in error.details()


async def test_questions_to_the_tokenizer_go_through_the_admission() -> None:
    async with front(max_tenant_reqs=1, api_keys="a:key-of-a-1,b:key-of-b-1") as f:
        a, b = (("x-api-key", "key-of-a-1"),), (("x-api-key", "key-of-b-1"),)
        first = asyncio.ensure_future(f.inference.Tokenize(TokenizeRequest(text="x" * 4000), metadata=a))
        _, question = await f.troupe.asked(EncodeRequest)
        assert question.tenant == "a"
        assert f.troupe.gateway.generation.admission.num_tokens == 1001
        for refused in (f.inference.Tokenize(TokenizeRequest(text="y"), metadata=a),
                        f.inference.Generate(GenerateRequest(text="y"), metadata=a)):  # fmt: skip
            error = await failure(refused)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "of this tenant" in error.details()
            assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
        other = f.inference.Generate(GenerateRequest(text="y"), metadata=b)
        await f.troupe.request()
        other.cancel()
        first.cancel()
        await until(lambda: not f.troupe.gateway.generation.admission.num_tokens)
