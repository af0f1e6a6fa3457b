"""Grammars compiled in confined children: what they become, what is refused and how fast, and what it costs others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.tokenizer.compilers import CompilerPool
from services.tokenizer.frames import CompileJob
from shared.errors import RejectCode, RequestError
from shared.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, Grammar, GrammarKind

K = GrammarKind


def nested(depth: int, key: str = "oneOf") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {key: [schema, {"type": "array", "items": schema}]}
    return schema


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
        (K.JSON_SCHEMA, "false", "something fits"),
        (K.JSON_SCHEMA, '{"type": "strang"}', "cannot be followed"),
        (K.JSON_SCHEMA, '{"type": "object", "dependencies": {"a": ["b"]}}', "dependencies"),
        (K.JSON_SCHEMA, '{"$ref": "https://elsewhere.example/x"}', "cannot be followed"),
        (K.REGEX, "(", "regex"),
        (K.REGEX, r"(a)\1", "cannot be followed"),
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


HOSTILE = [
    Grammar(K.REGEX, "(a+)+" * 900 + "b", "f"),
    Grammar(K.REGEX, "(.{1,1000}){1,1000}x", "f"),
    Grammar(K.REGEX, "((a{0,1000}){0,1000}){0,1000}b", "f"),
    Grammar(K.REGEX, r"(\p{L}|\p{N}){1,30000}" * 20, "f"),
    Grammar(K.JSON_SCHEMA, json.dumps(nested(10)), "f"),
    Grammar(K.JSON_SCHEMA, json.dumps(nested(9, "anyOf")), "f"),
    Grammar(K.JSON_SCHEMA, json.dumps(nested(9, "allOf")), "f"),
    Grammar(K.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000, "f"),
    Grammar(K.JSON_SCHEMA, json.dumps({"enum": [f"{i:x}" * 5 for i in range(5000)]}), "f"),
    Grammar(K.JSON_SCHEMA, json.dumps({"properties": {f"k{i}": {"pattern": f"(a|b)*a.{{{i}}}"} for i in range(900)}})),
    Grammar(K.GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "f"),
    Grammar(K.GRAMMAR, "start: x0\n" + "".join(f"x{i}: x{i + 1} x{i + 1}\n" for i in range(2000)) + 'x2000: "a"', "f"),
    Grammar(K.GRAMMAR, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "f"),
    Grammar(K.CHOICE, json.dumps([f"{i}" * 3 for i in range(4096)]), "f"),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(HOSTILE)))
async def test_what_is_hostile_has_an_answer_in_two_seconds(pool: CompilerPool, place: int) -> None:
    grammar = HOSTILE[place]
    started = time.monotonic()
    try:
        compiled = await pool.compile(grammar)
    except RequestError as error:
        assert error.field == grammar.field and error.code is RejectCode.INVALID_ARGUMENT
        assert len(str(error)) < 600
    else:
        assert compiled.kind is K.COMPILED
    assert time.monotonic() - started < 20  # on any machine; two seconds on one that has time


async def test_an_endless_one_is_killed_and_others_are_served() -> None:
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        (child,) = pool._children
        child.kill()
        with pytest.raises(RequestError, match="to compile"):
            await pool.compile(Grammar(K.REGEX, "a", "f"))
        pool.patience = 20.0
        assert (await pool.compile(Grammar(K.REGEX, "b", "f"))).text
        assert pool.num_killed == 1
        with pytest.raises(RequestError, match="to compile"):
            await pool.compile(Grammar(K.REGEX, "a", "f"))
    finally:
        await pool.close()


async def test_waiting_for_a_compiler_is_bounded() -> None:
    pool = CompilerPool(num_compilers=1)
    try:
        await pool.compile(Grammar(K.JSON_OBJECT))
        child = pool._idle.get_nowait()
        with pytest.raises(RequestError) as caught:
            await pool.compile(Grammar(K.REGEX, "a", "f"))
        assert caught.value.code is RejectCode.RESOURCE_EXHAUSTED and caught.value.retry_after_ms > 0
        pool._idle.put_nowait(child)
        assert (await pool.compile(Grammar(K.REGEX, "a", "f"))).text
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
