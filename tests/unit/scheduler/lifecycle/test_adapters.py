"""Orders of adapters and their answers, without a worker: what is asked of whom, and what an answer is taken for."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import msgspec

from services.scheduler.recording.recorder import RecordedScheduler
from services.scheduler.recording.replay import drain, replay
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.adapters import ReplicaAdapters
from services.scheduler.state.policy import Policy
from shared.errors import RejectCode
from shared.messages import (
    Adapter,
    AdapterFailure,
    AdaptersHeld,
    AddRequest,
    Hello,
    HoldAdapters,
    LoadAdapter,
    RequestHeader,
    ServiceName,
    UnloadAdapter,
    WorkerCapacity,
)
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity
from tests.unit.scheduler.worlds.world import World

ONE, TWO, THREE = (Adapter(name, digest=name * 8, path=f"/{name}") for name in ("one", "two", "three"))


class Memory:
    def __init__(self) -> None:
        self.file = BytesIO()

    def write(self, frame: bytes) -> None:
        self.file.write(frame)


def held(adapters: ReplicaAdapters, *wanted: Adapter, in_use: set[str] = frozenset()) -> HoldAdapters:  # type: ignore[assignment]
    """Have them ordered and answered."""
    for adapter in wanted:
        adapters.want(adapter)
    order = adapters.order(1, in_use)
    assert order is not None
    adapters.answered(AdaptersHeld(1, order.order, order.adapters))
    return order


def able(max_loras: int = 2, num_held: int = 2) -> WorkerCapacity:
    return msgspec.structs.replace(capacity(), max_loras=max_loras, num_held_loras=num_held)


def make(max_loras: int = 2, num_held: int = 2) -> ReplicaAdapters:
    return ReplicaAdapters(able(max_loras, num_held))


def test_an_order_names_all_that_is_to_be_held() -> None:
    adapters = make()
    assert held(adapters, ONE).adapters == [ONE]
    assert held(adapters, TWO).adapters == [ONE, TWO]
    assert adapters.order(1, set()) is None, "nothing is wanted"


def test_what_was_started_least_recently_makes_room_unless_it_is_in_use() -> None:
    adapters = make()
    held(adapters, ONE, TWO)
    adapters.start(ONE.digest)
    adapters.stop(ONE.digest)
    assert held(adapters, THREE).adapters == [ONE, THREE]
    adapters.want(TWO)
    assert adapters.order(1, {ONE.digest, THREE.digest}) is None
    order = adapters.order(1, {THREE.digest})
    assert order is not None
    assert order.adapters == [THREE, TWO]


def test_an_answer_to_an_earlier_order_does_not_bring_back_what_was_given_up_since() -> None:
    adapters = make(num_held=1)
    first = held(adapters, ONE)
    adapters.want(TWO)
    adapters.order(1, set())  # ONE makes room
    adapters.want(ONE)
    adapters.answered(AdaptersHeld(1, 2, [TWO]))
    adapters.order(1, set())  # and comes back
    adapters.answered(AdaptersHeld(1, first.order, [ONE]))
    assert not adapters.holds(ONE.digest), "the worker may have dropped it since, and read it again only now"
    adapters.answered(AdaptersHeld(1, 3, [ONE]))
    assert adapters.holds(ONE.digest)


def test_of_two_contents_of_one_directory_the_later_is_what_a_load_gets() -> None:
    adapters = make()
    held(adapters, ONE)
    adapters.want(Adapter("one", path="/one"))
    order = adapters.order(1, set())
    assert order is not None
    news = Adapter("one", "new", "/one")
    assert adapters.answered(AdaptersHeld(1, order.order, [ONE, news])) == ([news], [])


def test_no_order_is_given_while_one_is_loaded_whose_digest_is_not_known() -> None:
    """It could not name what is loaded, so the worker would drop that and read it again."""
    adapters = make(num_held=4)
    held(adapters, ONE)
    adapters.want(Adapter("two", path="/two"))
    order = adapters.order(1, set())
    assert order is not None
    adapters.want(THREE)
    adapters.give_up(ONE.digest)
    assert not adapters.has_orders and adapters.order(1, set()) is None
    adapters.answered(AdaptersHeld(1, order.order, [ONE, TWO]))
    order = adapters.order(1, set())
    assert order is not None and order.adapters == [TWO, THREE]


def test_a_load_that_failed_is_not_answered_with_what_its_directory_had_before() -> None:
    adapters = make()
    held(adapters, ONE)
    adapters.want(Adapter("one", path="/one"))
    order = adapters.order(1, set())
    assert order is not None
    failure = AdapterFailure(Adapter("one", path="/one"), "bad")
    assert adapters.answered(AdaptersHeld(1, order.order, [ONE], [failure])) == ([], [failure])
    assert adapters.holds(ONE.digest) and not adapters.is_loading


def test_what_was_given_up_goes_with_the_next_order_unless_it_is_wanted_again() -> None:
    adapters = make()
    held(adapters, ONE, TWO)
    adapters.give_up(ONE.digest)
    adapters.give_up(TWO.digest)
    adapters.want(ONE)
    before, order, after = adapters.has_orders, adapters.order(1, set()), adapters.has_orders
    assert order is not None and order.adapters == [ONE]
    assert (before, after) == (True, False) and adapters.order(1, set()) is None
    adapters.give_up(ONE.digest)
    assert adapters.order(1, {ONE.digest}) is None, "a sequence has it"
    order = adapters.order(1, set())
    assert order is not None and order.adapters == [], "once that has ended"


def test_a_worker_that_is_full_of_adapters_in_use_gets_no_more() -> None:
    adapters = make()
    held(adapters, ONE, TWO)
    adapters.want(THREE)
    assert adapters.waits_for_room(THREE.digest) and not adapters.waits_for_room(ONE.digest)
    assert adapters.order(1, {ONE.digest, TWO.digest}) is None and adapters.waits_for_room(THREE.digest)
    assert adapters.holds(ONE.digest) and adapters.holds(TWO.digest)
    adapters.order(1, {TWO.digest})
    assert not adapters.waits_for_room(THREE.digest), "it is on its way"


def test_no_more_than_max_loras_run() -> None:
    adapters = make(max_loras=1)
    held(adapters, ONE, TWO)
    adapters.start(ONE.digest)
    assert adapters.may_start(ONE)
    assert not adapters.may_start(TWO)
    adapters.stop(ONE.digest)
    assert adapters.may_start(TWO)


def play(core: Scheduler) -> None:
    """A load that succeeds, one that fails, names of an earlier life, a request, and an unload that waits for it."""
    params = SamplingParams(max_tokens=2).resolved(GenerationDefaults(), max_tokens=2)
    core.set_detokenizers(["d"])
    core.adapters.learn(Hello(ServiceName.GATEWAY, "g", "g", 1, "", adapters=[TWO]))
    core.add_worker("w", 5, able())
    core.adapters.load(LoadAdapter("l1", "g", "one", "/one"))
    core.adapters.load(LoadAdapter("l2", "g", "bad", "/bad"))
    ((_, order),) = core.adapters.take_orders()
    bad = AdapterFailure(Adapter("bad", path="/bad"), "r 0")
    core.adapters.held(AdaptersHeld(5, order.order, [ONE], [bad]))
    core.add(AddRequest(RequestHeader("r", "g", adapter=ONE), params, pack_tokens([1, 2]), [0]), 0.0)
    core.adapters.unload(UnloadAdapter("u", "g", "one"))
    core.schedule("w", 0.0)
    core.adapters.take_orders()


def test_names_follow_loads_and_failures_are_told() -> None:
    core = Scheduler(Policy())
    play(core)
    assert list(core.adapters.known) == ["two"]
    assert [(gateway, answer.request_id) for gateway, answer in core.adapters.take_answers()] == [("g", "l1")]
    ((_, rejection),) = core.outbound.take_rejections()
    assert (rejection.request_id, rejection.message, rejection.field) == ("l2", "r 0", "model")
    assert core.adapters.loads() == {"two": 0, "others": 1}
    core.abort("r")
    core.lose_worker("w")
    core.adapters.take_orders()
    assert [answer.request_id for _, answer in core.adapters.take_answers()] == ["u"]


def test_a_request_begins_with_the_step_after_the_one_beside_which_its_adapter_came() -> None:
    core, params = Scheduler(Policy()), SamplingParams(max_tokens=9).resolved(GenerationDefaults(), max_tokens=9)
    core.set_detokenizers(["d"])
    core.adapters.learn(Hello(ServiceName.GATEWAY, "g", "g", 1, "", adapters=[TWO]))
    core.add_worker("w", 5, able())
    worker, (replica,) = FakeWorker(able()), core.replicas.values()
    core.add(AddRequest(RequestHeader("base", "g"), params, pack_tokens([1, 2]), [0]), 0.0)
    plans = [core.schedule("w", 0.0), core.schedule("w", 0.0)]
    assert None not in plans and core.schedule("w", 0.0) is None, "two steps are in flight"
    core.add(AddRequest(RequestHeader("r", "g", adapter=TWO), params, pack_tokens([1, 2]), [0]), 0.0)
    for plan in plans:
        assert plan is not None and core.apply("w", worker.run(plan), 0.0)
    alone = core.schedule("w", 0.0)
    ((_, order),) = core.adapters.take_orders()
    assert alone is not None and core.schedule("w", 0.0) is None, "its adapter is on its way"
    core.adapters.held(AdaptersHeld(5, order.order, [TWO]))
    first = core.schedule("w", 0.0)
    assert first is not None and [row.request_id for row in first.admitted] == ["r"]
    assert len(replica.in_flight) == 2


def test_a_request_whose_adapter_cannot_be_loaded_again_fails_by_its_name() -> None:
    core, params = Scheduler(Policy()), SamplingParams(max_tokens=2).resolved(GenerationDefaults(), max_tokens=2)
    core.set_detokenizers(["d"])
    core.adapters.learn(Hello(ServiceName.GATEWAY, "g", "g", 1, "", adapters=[TWO]))
    core.add_worker("w", 5, able())
    core.add(AddRequest(RequestHeader("r", "g", adapter=TWO), params, pack_tokens([1, 2]), [0]), 0.0)
    core.schedule("w", 0.0)
    ((_, order),) = core.adapters.take_orders()
    core.adapters.held(AdaptersHeld(5, order.order, [], [AdapterFailure(TWO, "it has changed")]))
    ((_, rejection),) = core.outbound.take_rejections()
    assert rejection.message == "adapter 'two' cannot be loaded again: it has changed"
    assert rejection.code is RejectCode.NOT_FOUND and not core.requests


def test_requests_go_to_the_worker_that_has_their_adapter() -> None:
    core, params = Scheduler(Policy()), SamplingParams(max_tokens=2).resolved(GenerationDefaults(), max_tokens=2)
    core.set_detokenizers(["d"])
    core.adapters.learn(Hello(ServiceName.GATEWAY, "g", "g", 1, "", adapters=[TWO]))
    for index in range(3):
        core.add_worker(f"w{index}", 5 + index, able())
    workers = []
    for number in range(5):
        core.add(AddRequest(RequestHeader(f"r{number}", "g", adapter=TWO), params, pack_tokens([1, 2]), [0]), 0.0)
        workers.append(core.requests[f"r{number}"].sequences[0].worker)
        core.schedule(workers[-1], 0.0)
        for name, order in core.adapters.take_orders():
            core.adapters.held(AdaptersHeld(core.replicas[name].epoch, order.order, [TWO]))
        core.abort(f"r{number}")
    assert len(set(workers)) == 1, "it takes turns among equals, and the others would have to load it"


def test_requests_with_adapters_go_to_workers_that_serve_some() -> None:
    core, params = Scheduler(Policy()), SamplingParams(max_tokens=2).resolved(GenerationDefaults(), max_tokens=2)
    core.set_detokenizers(["d"])
    small = msgspec.structs.replace(capacity(num_blocks=32), max_loras=0)
    core.add_worker("plain", 5, small)
    core.add_worker("able", 6, able())
    for number in range(4):
        core.add(AddRequest(RequestHeader(f"r{number}", "g", adapter=TWO), params, pack_tokens([1, 2]), [0]), 0.0)
        core.add(AddRequest(RequestHeader(f"b{number}", "g"), params, pack_tokens([1, 2]), [0]), 0.0)
    workers = {name: request.sequences[0].worker for name, request in core.requests.items()}
    assert {workers[f"r{number}"] for number in range(4)} == {"able"} and "plain" in workers.values()
    core.retire_worker("able")
    assert {s.request.request_id for s in core.unassigned} == {f"r{number}" for number in range(4)}
    core.add(AddRequest(RequestHeader("late", "g", adapter=TWO), params, pack_tokens([1, 2]), [0]), 0.0)
    ((_, refused),) = core.outbound.take_rejections()
    assert (refused.request_id, refused.code, refused.field) == ("late", RejectCode.NOT_FOUND, "model")
    patience = core.policy.resume_timeout
    core.expire(10.0)
    assert len(core.expire(11.0 + patience)) == 4 and not core.unassigned
    assert all(one.message.endswith("or none serves adapters") for _, one in core.outbound.take_rejections())


def test_a_recording_replays_them(tmp_path: Path) -> None:
    memory = Memory()
    play(RecordedScheduler(Policy(), memory))
    memory.file.seek(0)
    replayed = replay(memory.file)
    assert replayed.difference is None
    assert (replayed.num_plans, replayed.num_requests) == (1, 1)


def test_a_load_is_read_by_one_worker_and_by_another_where_that_is_lost() -> None:
    core = Scheduler(Policy())
    for index in range(2):
        core.add_worker(f"w{index}", 5 + index, able())
    core.adapters.load(LoadAdapter("l", "g", "one", "/one"))
    before, ((first, order),), after = core.adapters.has_orders, core.adapters.take_orders(), core.adapters.has_orders
    assert [adapter.path for adapter in order.adapters] == ["/one"]
    assert (before, after) == (True, False) and core.adapters.take_orders() == [], "it is under way"
    core.adapters.load(LoadAdapter("other", "g", "two", "/two"))
    ((second, _),) = core.adapters.take_orders()
    assert second != first, "each load goes to the worker with the fewest, those on their way among them"
    core.adapters.held(AdaptersHeld(core.replicas[first].epoch, order.order, [ONE]))
    assert [answer.adapter for _, answer in core.adapters.take_answers()] == [ONE]
    assert core.adapters.take_orders() == [], "it stays there"
    core.lose_worker(second)
    ((where, order),) = core.adapters.take_orders()
    assert where == first and [adapter.path for adapter in order.adapters] == ["/one", "/two"]
    core.adapters.load(LoadAdapter("l", "g", "one", "/one"))
    assert core.adapters.take_orders() == [], "its next order follows the answer to this one"
    core.lose_worker(first)
    core.add_worker("last", 9, able(num_held=4))
    ((where, order),) = core.adapters.take_orders()
    assert where == "last" and {adapter.path for adapter in order.adapters} == {"/one", "/two"}
    core.adapters.held(AdaptersHeld(core.replicas[where].epoch, order.order, [ONE, TWO]))
    assert {answer.adapter for _, answer in core.adapters.take_answers()} == {ONE, TWO}
    core.lose_worker(where)
    assert not core.adapters.has_orders, "it is over"


def test_a_load_is_ordered_again_where_the_link_to_its_worker_begins_anew() -> None:
    core = Scheduler(Policy())
    core.add_worker("w0", 5, able())
    core.adapters.load(LoadAdapter("l", "g", "one", "/one"))
    orders, before = core.adapters.take_orders(), core.adapters.has_orders
    core.lose_worker("w0")
    core.add_worker("w0", 9, able())
    assert (len(orders), before, core.adapters.has_orders) == (1, False, True)
    ((_, order),) = core.adapters.take_orders()
    assert order.epoch == 9 and [adapter.path for adapter in order.adapters] == ["/one"]
    core.adapters.held(AdaptersHeld(9, order.order, [ONE]))
    assert [answer.adapter for _, answer in core.adapters.take_answers()] == [ONE]


def test_what_cannot_be_loaded_or_unloaded_is_refused_in_words() -> None:
    core = Scheduler(Policy())
    core.adapters.load(LoadAdapter("none", "g", "one", "/one"))
    core.adapters.unload(UnloadAdapter("unknown", "g", "one"))
    core.add_worker("w", 5, able(max_loras=0))
    core.adapters.load(LoadAdapter("unable", "g", "one", "/one"))
    found = [(one.request_id, one.code, one.field) for _, one in core.outbound.take_rejections()]
    assert found == [
        ("none", RejectCode.UNAVAILABLE, ""),
        ("unknown", RejectCode.NOT_FOUND, "lora_name"),
        ("unable", RejectCode.INVALID_ARGUMENT, "model"),
    ]
    core.add_worker("able", 6, able())
    core.adapters.load(LoadAdapter("able", "g", "one", "/one"))
    assert not core.outbound.take_rejections() and core.adapters.take_orders()[0][0] == "able"


def test_a_name_that_gets_another_content_gives_the_earlier_one_up() -> None:
    core = Scheduler(Policy())
    core.add_worker("w", 5, able())
    version = core.adapters.version
    for number, content in enumerate((ONE, Adapter("one", digest="new", path="/one"))):
        core.adapters.load(LoadAdapter(f"l{number}", "g", "one", "/one"))
        ((_, order),) = core.adapters.take_orders()
        core.adapters.held(AdaptersHeld(5, order.order, [*order.adapters[:-1], content]))
        assert core.adapters.known == {"one": content} and core.adapters.version == version + number + 1
    ((_, order),) = core.adapters.take_orders()
    assert [adapter.digest for adapter in order.adapters] == ["new"]


def test_a_load_is_not_answered_with_what_requests_had_read_again_before_it_came() -> None:
    core, params = Scheduler(Policy()), SamplingParams(max_tokens=2).resolved(GenerationDefaults(), max_tokens=2)
    core.set_detokenizers(["d"])
    core.adapters.learn(Hello(ServiceName.GATEWAY, "g", "g", 1, "", adapters=[ONE]))
    core.add_worker("w", 5, able())
    core.add(AddRequest(RequestHeader("r", "g", adapter=ONE), params, pack_tokens([1, 2]), [0]), 0.0)
    core.schedule("w", 0.0)
    ((_, again),) = core.adapters.take_orders()
    core.adapters.load(LoadAdapter("l", "g", "one", "/one"))  # other files lie there since
    ((_, load),) = core.adapters.take_orders()
    core.adapters.held(AdaptersHeld(5, again.order, [ONE]))
    assert core.replicas["w"].adapters.holds(ONE.digest) and core.adapters.take_answers() == []
    news = Adapter("one", "new", "/one")
    core.adapters.held(AdaptersHeld(5, load.order, [ONE, news]))
    assert [answer.adapter for _, answer in core.adapters.take_answers()] == [news]
    assert core.adapters.known == {"one": news}


def test_what_is_on_its_way_takes_room_too() -> None:
    adapters = make(num_held=2)
    held(adapters, ONE)
    adapters.want(TWO)
    assert not adapters.waits_for_room(TWO.digest)
    assert adapters.order(1, {ONE.digest}) is not None
    adapters.want(THREE)
    assert adapters.waits_for_room(THREE.digest)


def test_answers_that_a_replay_takes_are_gone() -> None:
    core = Scheduler(Policy())
    core.add_worker("w", 5, able())
    core.adapters.load(LoadAdapter("l", "g", "one", "/one"))
    ((_, order),) = core.adapters.take_orders()
    core.adapters.held(AdaptersHeld(5, order.order, [ONE]))
    drain(core)
    assert core.adapters.take_answers() == []


def test_tokens_that_a_replay_takes_are_gone() -> None:
    world = World()
    world.add("r", [1, 2, 3])
    plan = world.scheduler.schedule("w0", 1.0)
    assert plan is not None and world.scheduler.apply("w0", world.workers["w0"].run(plan), 2.0)
    drain(world.scheduler)
    assert world.scheduler.outbound.take_batches() == {} and not world.scheduler.journal.take()
