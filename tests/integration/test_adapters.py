"""Adapters between the scheduler's core and real workers: which worker holds which, which requests wait for one, and
which blocks are never shared.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from scripts.bench.common.adapters import write_adapter
from services.scheduler.blocks.prefix_cache import root_hash
from services.scheduler.state.policy import Policy
from shared.messages import Adapter, UnloadAdapter
from tests.integration.engine import MODEL, Ask, Engine, ask, token_ids

PROMPT = [5 + index % 7 for index in range(40)]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [write_adapter(MODEL, directory / f"a{seed}", seed=seed, scale=0.2) for seed in range(5)]


def using(adapter: Adapter | None, *, prompt: list[int] = PROMPT, max_tokens: int = 24) -> Ask:
    return msgspec.structs.replace(ask(prompt, max_tokens=max_tokens, temperature=1.0), adapter=adapter)


def said(engine: Engine, asks: list[Ask]) -> Tokens:
    return [tokens for (tokens,) in token_ids(engine.generate(asks))]


def test_keys_and_values_of_one_adapter_are_never_another_s(paths: list[Path]) -> None:
    """The same prompt under each, one after the other: a hit of another adapter's blocks would change the tokens."""
    engine = Engine(max_loras=4)
    adapters = [None, *(engine.load_adapter(path.name, path) for path in paths[:3])]
    cold = [said(Engine(Policy(enable_prefix_caching=False), adapters=()), [using(None)])[0]]
    for path in paths[:3]:
        alone = Engine(Policy(enable_prefix_caching=False))
        cold += said(alone, [using(alone.load_adapter("a", path))])
    assert len({tuple(tokens) for tokens in cold}) == 4, "each says something else"
    for _ in range(2):
        assert [said(engine, [using(adapter)])[0] for adapter in adapters] == cold
    assert engine.counters.num_prefix_cache_hits == 4 * 32, "the second time each finds its own, and only that"


def test_an_adapter_and_a_salt_are_not_another_salt_alone() -> None:
    digest = "ab" * 16
    roots = {root_hash("t"), root_hash("t", digest), root_hash("", digest), root_hash("t" + digest), root_hash("")}
    assert len(roots) == 5


def test_other_content_under_the_same_name_is_not_served_stale(paths: list[Path], tmp_path: Path) -> None:
    engine, place = Engine(), tmp_path / "changing"
    shutil.copytree(paths[0], place)
    first = engine.load_adapter("changing", place)
    before = said(engine, [using(first)])
    shutil.copytree(paths[1], place, dirs_exist_ok=True)
    second = engine.load_adapter("changing", place)
    assert second.digest != first.digest
    alone = Engine()
    assert said(engine, [using(second)]) == said(alone, [using(alone.load_adapter("a", paths[1]))]) != before
    assert engine.core.replicas["w0"].adapters.held == [second], "no request can ask for the first one any more"


def test_at_most_max_loras_run_and_others_do_not_block_the_base(paths: list[Path]) -> None:
    engine = Engine(max_loras=2, max_cpu_loras=5)
    adapters = [engine.load_adapter(path.name, path) for path in paths]
    asks = [using(adapter, prompt=[7 + index] * 20) for index, adapter in enumerate(adapters)]
    ids = [engine.add(one) for one in [*asks, *asks]]
    base = engine.add(using(None, prompt=[50] * 20))
    most = 0
    while engine.step():
        running = engine.core.replicas["w0"].running
        most = max(most, len({sequence.request.adapter for sequence in running} - {""}))
        if base in engine.core.requests:
            left = sum(one in engine.core.requests for one in ids)
    assert left >= 6, "the base's came last, and did not wait for adapters"
    assert most == 2
    assert not engine.rejected
    outputs = [engine.outputs[one, 0].token_ids for one in ids]
    assert outputs[:5] == outputs[5:]
    assert outputs[:5] == [said(engine, [one])[0] for one in asks]


def test_what_was_used_least_recently_makes_room_and_comes_back(paths: list[Path]) -> None:
    engine = Engine(max_loras=1, max_cpu_loras=2)
    adapters = [engine.load_adapter(path.name, path) for path in paths[:4]]
    first = [said(engine, [using(adapter)])[0] for adapter in adapters]
    assert [said(engine, [using(adapter)])[0] for adapter in reversed(adapters)] == first[::-1]
    assert len(engine.core.replicas["w0"].adapters.held) == 2
    bank = engine.runners["w0"].adapters
    assert bank is not None
    assert len(bank.held) == 2


def test_files_that_changed_meanwhile_are_not_taken_for_what_they_were(paths: list[Path], tmp_path: Path) -> None:
    """Its requests end; the others, of the same worker, do not notice."""
    engine, place = Engine(max_loras=1, max_cpu_loras=1), tmp_path / "changing"
    shutil.copytree(paths[0], place)
    adapter = engine.load_adapter("changing", place)
    other = engine.load_adapter("other", paths[1])
    shutil.copytree(paths[2], place, dirs_exist_ok=True)
    ids = [engine.add(using(one)) for one in (adapter, other, None)]
    engine.run()
    (rejection,) = engine.rejected
    assert rejection.request_id == ids[0]
    assert "another content" in rejection.message
    assert all(len(engine.outputs[one, 0].token_ids) == 24 for one in ids[1:])


def test_a_broken_file_fails_its_own_load_alone(paths: list[Path], tmp_path: Path) -> None:
    engine = Engine()
    good = engine.load_adapter("good", paths[0])
    running = engine.add(using(good))
    shutil.copytree(paths[0], tmp_path / "broken")
    (tmp_path / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 0}', encoding="utf-8")
    with pytest.raises(LookupError, match=r"adapter_config\.json: r 0"):
        engine.load_adapter("bad", tmp_path / "broken")
    assert len(engine.outputs[running, 0].token_ids) == 24
    assert list(engine.core.adapters.known) == ["good"]


def test_unloading_waits_for_requests_under_way(paths: list[Path]) -> None:
    engine = Engine()
    adapter = engine.load_adapter("a", paths[0])
    request = engine.add(using(adapter))
    engine.step()
    engine.core.adapters.unload(UnloadAdapter("u", "g", "a"))
    engine.step()
    assert not engine.core.adapters.known
    assert engine.core.adapters.take_answers() == []
    assert engine.core.replicas["w0"].adapters.held == [adapter]
    engine.run()
    engine.step()
    assert len(engine.outputs[request, 0].token_ids) == 24
    ((gateway, answer),) = engine.core.adapters.take_answers()
    assert (gateway, answer.request_id) == ("g", "u")
    assert engine.core.replicas["w0"].adapters.held == []


def test_requests_go_where_their_adapter_is_and_a_new_worker_gets_what_is_in_use(paths: list[Path]) -> None:
    engine = Engine(workers=2)
    adapter = engine.load_adapter("a", paths[0])
    (holder,) = (name for name, replica in engine.core.replicas.items() if replica.adapters.held)
    engine.generate([using(adapter, prompt=[9 + index] * 3) for index in range(3)])
    assert {name for name, plan in engine.plans if plan.admitted} == {holder}
    wanted = said(engine, [using(adapter)])
    request = engine.add(using(adapter))
    for _ in range(4):
        engine.step()
    for name in list(engine.runners):
        engine.lose(name)
    engine.join("w9")
    engine.run()
    assert engine.outputs[request, 0].token_ids == wanted[0]
    assert engine.core.replicas["w9"].adapters.held == [adapter]


def test_where_no_adapters_are_served_requests_of_them_are_refused(paths: list[Path]) -> None:
    engine = Engine(max_loras=0)
    with pytest.raises(LookupError, match="max_loras is 0"):
        engine.load_adapter("a", paths[0])
    engine.add(using(Adapter("a", "00" * 16, str(paths[0]))))
    engine.run()
    (rejection,) = engine.rejected
    assert (rejection.field, str(rejection.code)) == ("model", "not_found")
