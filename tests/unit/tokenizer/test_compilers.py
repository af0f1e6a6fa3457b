"""Grammars compiled in confined children: what they become, what is refused and how fast, and what it costs others."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from scripts.bench.misuse.hostile import hostile
from services.tokenizer.confined import children
from services.tokenizer.confined.children import LONGEST
from services.tokenizer.confined.compiler import compile_one
from services.tokenizer.confined.compilers import CompilerPool
from services.tokenizer.confined.frames import Compilation, CompileJob
from shared.automata.compiling import Compiler
from shared.errors import RejectCode, RequestError
from shared.processes.idle_time import LEAST_URGENT
from shared.processes.proc import TICK
from shared.requests.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, Grammar, GrammarKind

K = GrammarKind


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[CompilerPool]:
    made = CompilerPool()
    yield made
    await made.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (K.JSON_OBJECT, ""),
        (K.JSON_SCHEMA, '{"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "null"}}}'),
        (K.JSON_SCHEMA, "true"),
        (K.REGEX, "(a+)+b"),
        (K.CHOICE, '["a\\"b\\n", "\u00e9"]'),
        (K.GRAMMAR, "start: /[0-9]+/ | start start"),
        (K.GRAMMAR, 'root ::= "a" b\nb ::= [0-9]+'),
    ],
)
async def test_every_kind_is_compiled(pool: CompilerPool, kind: GrammarKind, text: str) -> None:
    compiled = await pool.compile(Grammar(kind, text, "wish"))
    assert compiled.kind is GrammarKind.COMPILED and compiled.field == "wish" and compiled.text
    assert await pool.compile(Grammar(kind, text, "wish")) == compiled


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (K.JSON_SCHEMA, "{", "is not JSON"),
        (K.JSON_SCHEMA, "[]", "must be a JSON schema"),
        (K.JSON_SCHEMA, "false", "allows some value"),
        (K.JSON_SCHEMA, '{"type": "strang"}', "cannot be followed"),
        (K.JSON_SCHEMA, '{"type": "object", "dependencies": {"a": ["b"]}}', "dependencies"),
        (K.JSON_SCHEMA, '{"$ref": "https://elsewhere.example/x"}', "cannot be followed"),
        (K.JSON_SCHEMA, '{"$ref": "#"}', "refers to itself before any text"),
        (K.JSON_SCHEMA, '{"allOf": [{"$ref": "#"}]}', "refers to itself before any text"),
        (
            K.JSON_SCHEMA,
            '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
            "leads back to itself",
        ),
        (K.GRAMMAR, "start: start", "refers to itself before any text"),
        (K.REGEX, "(", "unclosed group"),
        (K.REGEX, r"(a)\1", "backreferences are not supported"),
        (K.REGEX, "(?=a)b", "look-ahead"),
        (K.CHOICE, "[]", "from 1 to"),
        (K.CHOICE, "[1]", "list of strings"),
        (K.CHOICE, json.dumps(["x"] * (MAX_CHOICES + 1)), "from 1 to"),
        (K.GRAMMAR, "start: nowhere", "cannot be followed"),
        (K.GRAMMAR, "root ::= (", "GBNF"),
        (K.GRAMMAR, "", "must not be empty"),
        (K.COMPILED, "start: /a/", "cannot be given compiled"),
        (K.REGEX, "x" * (1 << 20), f"MAX_GRAMMAR_BYTES={MAX_GRAMMAR_BYTES}"),
    ],
)
async def test_what_is_none_is_refused_by_name(pool: CompilerPool, kind: GrammarKind, text: str, words: str) -> None:
    for _ in range(2):  # what is remembered too
        with pytest.raises(RequestError, match=words) as caught:
            await pool.compile(Grammar(kind, text, "guided_regex"))
        assert caught.value.field == "guided_regex" and str(caught.value).startswith("guided_regex ")
        assert caught.value.code is RejectCode.INVALID_ARGUMENT


KINDS = {"regex": K.REGEX, "json_schema": K.JSON_SCHEMA, "grammar": K.GRAMMAR, "choice": K.CHOICE}


@pytest.mark.parametrize("name", hostile(0))
async def test_what_is_hostile_has_an_answer(pool: CompilerPool, name: str) -> None:
    """Within two seconds on a machine that has time, which scripts/bench_structured measures."""
    ((kind, value),) = hostile(0)[name].items()
    grammar = Grammar(KINDS[kind], value if isinstance(value, str) else json.dumps(value), "f")
    pool.patience = pool.timeout = 60.0
    try:
        compiled = await pool.compile(grammar, tenant=name)
    except RequestError as error:
        assert error.field == "f" and error.code is RejectCode.INVALID_ARGUMENT and len(str(error)) < 600
    else:
        assert compiled.kind is K.COMPILED


async def test_an_endless_one_is_killed_and_others_are_served() -> None:
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        (child,) = pool._children
        child.kill()
        with pytest.raises(RequestError, match="to compile"):
            await pool.compile(Grammar(K.REGEX, "a", "f"))
        pool.patience = 20.0
        assert (await pool.compile(Grammar(K.REGEX, "b", "f"), tenant="other")).text
        assert pool.num_killed == 1
        with pytest.raises(RequestError, match="to compile"):
            await pool.compile(Grammar(K.REGEX, "a", "f"))
        assert (await pool.compile(Grammar(K.REGEX, "a", "f"), allowance=30.0)).text, "of a stream under way"
        assert (await pool.compile(Grammar(K.REGEX, "a", "f"))).text
    finally:
        await pool.close()


async def test_a_request_waits_for_a_compiler_until_there_is_one() -> None:
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        child = pool._idle.get_nowait()
        new = asyncio.create_task(pool.compile(Grammar(K.REGEX, "a", "f")))
        under_way = asyncio.create_task(pool.compile(Grammar(K.REGEX, "b", "f"), allowance=30.0))
        await asyncio.wait({new, under_way}, timeout=1.5 * pool.timeout)
        assert not new.done() and not under_way.done()
        pool._idle.put_nowait(child)
        assert (await new).text and (await under_way).text
        assert not pool._new.locked() and not pool._queue.locked()
    finally:
        await pool.close()


@pytest.mark.parametrize(("patience", "seconds"), [(0.3, math.inf), (30.0, 0.3)])
async def test_waiting_for_a_compiler_is_bounded(patience: float, seconds: float) -> None:
    pool = CompilerPool(num_compilers=1, patience=patience)
    try:
        pool.patience = 20.0
        await pool.compile(Grammar(K.JSON_OBJECT))
        pool.patience = patience
        child = pool._idle.get_nowait()
        for allowance in (1.0, 30.0):
            with pytest.raises(RequestError, match="waited for") as caught:
                await pool.compile(Grammar(K.REGEX, "a", "f"), allowance, seconds=seconds)
            assert caught.value.code is RejectCode.RESOURCE_EXHAUSTED and caught.value.retry_after_ms > 0
        pool._idle.put_nowait(child)
        assert (await pool.compile(Grammar(K.REGEX, "a", "f"))).text, "who gave up has left its place"
    finally:
        await pool.close()


async def test_many_that_wait_for_one_format_have_it_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = quick(monkeypatch, {})
    together = [pool.compile(Grammar(K.REGEX, "same", "f"), tenant=f"t{number}") for number in range(20)]
    assert {grammar.text for grammar in await asyncio.gather(*together)} == {"text"}
    assert asked == ["same"]


async def test_many_costly_formats_of_one_tenant_are_before_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = quick(monkeypatch, {"costly": 0.2})
    hostile = [
        asyncio.create_task(pool.compile(Grammar(K.REGEX, f"costly {n}", "f"), 1.0, "hostile")) for n in range(9)
    ]
    await asyncio.sleep(0)
    others = [asyncio.create_task(pool.compile(Grammar(K.REGEX, f"real {n}", "f"), 1.0, f"t{n}")) for n in range(3)]
    under_way = asyncio.create_task(pool.compile(Grammar(K.REGEX, "real 9", "f"), 30.0, "hostile"))
    assert all(await asyncio.gather(*others, under_way))
    refused = [
        error for error in await asyncio.gather(*hostile, return_exceptions=True) if isinstance(error, RequestError)
    ]
    assert asked[0] == "costly 0" and asked[1] == "real 9", "a stream under way is next"
    assert asked[2:] == ["real 0", "real 1", "real 2"], "a tenant in debt is behind those that are not"
    assert len(refused) == 8 and all("must wait" in str(error) for error in refused)


def quick(monkeypatch: pytest.MonkeyPatch, took: dict[str, float]) -> tuple[CompilerPool, list[str]]:
    """A pool with one child that answers in the next turn of the loop, having had a processor for as long as `took`
    says of a text's first word; and what it was asked."""
    pool, asked = CompilerPool(num_compilers=1), list[str]()

    async def work(child: object, job: CompileJob, seconds: float, longest: float) -> Compilation:
        assert job.grammar is not None
        asked.append(job.grammar.text)
        await asyncio.sleep(0)
        pool._idle.put_nowait(child)  # type: ignore[arg-type]
        return Compilation("text", seconds=took.get(job.grammar.text.split()[0], 0.005))

    monkeypatch.setattr(pool, "work", work)
    monkeypatch.setattr(pool, "started", lambda: asyncio.sleep(0))
    pool._idle.put_nowait(object())  # type: ignore[arg-type]
    return pool, asked


async def test_who_was_frozen_is_not_late() -> None:
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        child = pool._idle.get_nowait()
        pool.patience = pool.timeout = 1.0
        request = asyncio.create_task(pool.compile(Grammar(K.REGEX, "a", "f")))
        await asyncio.sleep(0.01)
        time.sleep(1.1)  # the freeze
        await asyncio.sleep(0.01)
        pool._idle.put_nowait(child)
        assert (await request).text
    finally:
        await pool.close()


class Slow:
    """A child's processor time as the test says; the child itself is stopped, so that it has no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str, per_look: float) -> None:
        self.num_looks = 0
        self.state, self.per_look = state, per_look
        monkeypatch.setattr(children, "stat", self.stat)

    def stat(self, pid: int) -> list[str]:
        self.num_looks += 1
        ticks = str(round(self.num_looks * self.per_look * TICK))
        return [self.state, *["0"] * 10, ticks, "0"]


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has had of a processor is only told by Linux")
@pytest.mark.parametrize(
    ("state", "per_look", "times", "code"),
    [
        ("R", 0.0, LONGEST, RejectCode.RESOURCE_EXHAUSTED),  # kept waiting to the end
        ("R", 0.02, 2, RejectCode.RESOURCE_EXHAUSTED),  # until it had more than real ones take
        ("R", 0.1, 1, RejectCode.RESOURCE_EXHAUSTED),  # costly, but not proven to be too much
        ("R", 0.4, 1, RejectCode.INVALID_ARGUMENT),
        ("T", 0.0, 1, RejectCode.RESOURCE_EXHAUSTED),  # it does not even want to run
    ],
)
async def test_who_is_kept_from_a_processor_is_not_late(
    monkeypatch: pytest.MonkeyPatch, state: str, per_look: float, times: float, code: RejectCode
) -> None:
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        (child,) = pool._children
        child.send_signal(signal.SIGSTOP)
        pool.timeout, pool.patience = 0.2, LONGEST * 0.2
        told = Slow(monkeypatch, state, per_look)
        began = time.monotonic()
        with pytest.raises(RequestError) as caught:
            await pool.compile(Grammar(K.REGEX, "a", "f"), tenant="x")
        assert caught.value.code is code and caught.value.field == "f" and "compile" in str(caught.value)
        assert time.monotonic() - began > 0.95 * times * pool.timeout
        assert told.num_looks < 4 * (times + 1)
        monkeypatch.undo()
        pool.patience = pool.timeout = 20.0
        if code is RejectCode.RESOURCE_EXHAUSTED:
            assert caught.value.retry_after_ms >= 200
            assert (await pool.compile(Grammar(K.REGEX, "a", "f"), tenant="y")).text, "nothing is remembered"
    finally:
        await pool.close()


async def test_a_pool_that_nobody_asked_has_no_children() -> None:
    pool = CompilerPool()
    assert not pool._children
    await pool.close()
    job = CompileJob(None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await pool.ask(job)


async def test_a_pool_that_came_up_in_part_is_completed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, begin, num_begun = CompilerPool(), asyncio.create_subprocess_exec, 0

    async def every_second_fails(*command: str, **options: Any) -> asyncio.subprocess.Process:
        nonlocal num_begun
        num_begun += 1
        if num_begun % 2:
            raise OSError(errno.EMFILE, "no descriptor")
        return await begin(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", every_second_fails)
    try:
        both = await asyncio.gather(*(pool.compile(Grammar(K.JSON_OBJECT)) for _ in range(2)), return_exceptions=True)
        for refused in both:
            assert isinstance(refused, RequestError) and refused.code is RejectCode.UNAVAILABLE
        assert len(pool._children) == 1
        with pytest.raises(RequestError):
            await pool.compile(Grammar(K.JSON_OBJECT))
        assert (await pool.compile(Grammar(K.JSON_OBJECT))).text
        assert len(pool._children) == 2
    finally:
        await pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="idle time only is Linux's")
async def test_it_takes_idle_time_only(pool: CompilerPool) -> None:
    await pool.compile(Grammar(K.JSON_OBJECT))
    for child in pool._children:
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == LEAST_URGENT


@pytest.mark.skipif(sys.platform != "linux", reason="idle time only is Linux's")
async def test_who_takes_a_killed_ones_place_comes_up_in_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(children, "confine_to_idle_time", given.append)
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        assert not given, "who asks first is waiting for these"
        (child,) = pool._children
        pool._idle.get_nowait()
        pool._replace(child)
        pool.patience = 20.0
        assert (await pool.compile(Grammar(K.REGEX, "b", "f"))).text
        assert given == [next(iter(pool._children)).pid] != [child.pid]
    finally:
        await pool.close()


async def test_what_takes_too_much_of_a_processor_is_refused_by_its_limit() -> None:
    compiler = Compiler()
    job = CompileJob(Grammar(K.REGEX, "[a-z]+"), max_seconds=0.0)
    assert "the limit is 0.0" in compile_one(compiler, job).error
    assert compile_one(compiler, CompileJob(Grammar(K.REGEX, "[a-z]+"))).text


async def test_who_has_worked_for_long_rests_and_is_reaped_all_the_same() -> None:
    pool = CompilerPool(num_compilers=1)
    assert (
        pool.rest_after(Compilation("text", seconds=0.2))
        > 0.5
        > 0.05
        > pool.rest_after(Compilation("text", seconds=0.005))
    )
    await pool.compile(Grammar(K.JSON_OBJECT))
    child = pool._idle.get_nowait()
    pool.release(child, 60.0)
    pool.patience = 0.2
    with pytest.raises(RequestError) as caught:
        await pool.compile(Grammar(K.REGEX, "a", "f"))
    assert caught.value.code is RejectCode.RESOURCE_EXHAUSTED
    await pool.close()
    assert child.returncode is not None


async def test_who_had_costly_formats_compiled_waits_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = quick(monkeypatch, {"costly": 0.2})

    async def compile(text: str, tenant: str, allowance: float = 1.0) -> float:
        began = time.monotonic()
        assert (await pool.compile(Grammar(K.REGEX, text, "f"), allowance, tenant)).text
        return time.monotonic() - began

    for number in range(100):
        assert await compile(f"real {number}", "busy") < 0.4, "real ones are charged to no tenant, however many"
    await compile("costly 1", "hostile")
    began = time.monotonic()
    with pytest.raises(RequestError, match="must wait") as caught:
        await compile("real 1000", "hostile")
    assert time.monotonic() - began > 1.4, "to be refused takes its time, too"
    assert caught.value.code is RejectCode.RESOURCE_EXHAUSTED and caught.value.field == "f"
    assert 100 <= caught.value.retry_after_ms < 1500, "what is left of 24 times 0.2 s beyond two seconds"
    assert await compile("costly 1", "hostile") < 0.4, "what is known costs nothing"
    assert await compile("real 1001", "busy") < 0.4
    assert await compile("real 1002", "hostile", 30.0) < 0.4, "a stream under way has paid already"
    await asyncio.sleep(caught.value.retry_after_ms / 1000)
    assert await compile("real 1003", "hostile") < 0.4, "and then it is over"
