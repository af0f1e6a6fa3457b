"""Output that is held to a format: it keeps to it, and its tokens are those of the solo run whatever happens to it.

Each test also checks that the thing it is about did happen."""

from __future__ import annotations

import random
import re
from functools import cache, partial

import msgspec
import pytest

from engine.execution.constraints.row_automata import Held
from engine.sampling.processing import Flags
from services.scheduler.state.policy import Policy
from shared.automata.compiling import Compiler
from shared.messages import FinishReason
from shared.requests.grammar import Grammar, GrammarKind
from shared.text.tokenization import ModelTokenizer, load_tokenizer
from tests.integration.drafts.test_speculation import DRAFT, Guesser
from tests.integration.engine import MODEL, Ask, Engine, Output, ask, token_ids
from tests.integration.test_equivalences import Make, Tokens, asks

SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer",
"minimum": 0, "maximum": 130}, "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}},
"required": ["name", "age", "tags"], "additionalProperties": false}"""


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    age: int
    tags: list[str]


GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, SCHEMA),
    Grammar(GrammarKind.REGEX, r"[a-z]{3,9}( [a-z]{2,5}){2}\."),
    Grammar(GrammarKind.CHOICE, '["once upon a time", "the end", "once more"]'),
    Grammar(GrammarKind.GRAMMAR, 'start: "(" inner ")"\ninner: /[0-9]{1,4}/ | start'),
    Grammar(GrammarKind.GRAMMAR, 'root ::= word ("," word){2}\nword ::= [a-c] [a-c]?'),
)


@pytest.fixture(scope="module", params=["native", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """Engines that compute with these kernels; a small model where they are slow."""
    return partial(Engine, kernels=request.param, model=str(MODEL if request.param == "native" else DRAFT))


@cache
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(MODEL)


def compiled(grammar: Grammar) -> Grammar:
    return Grammar(GrammarKind.COMPILED, Compiler().compile(grammar), grammar.field)


def held(prompt: list[int], grammar: Grammar, **params: object) -> Ask:
    return ask(prompt, **{"grammar": compiled(grammar), "max_tokens": 60, "ignore_eos": False, **params})


@cache
def held_asks() -> tuple[Ask, ...]:
    """Every kind of grammar with every kind of sampling."""
    rng = random.Random(3)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True},
        {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3, "min_tokens": 5},
        {"temperature": 0.9, "logprobs": 2, "bad_words_token_ids": [[70]]},
    ]
    return tuple(
        held([rng.randrange(4, 4000) for _ in range(rng.choice([1, 17, 40, 90]))], grammar, seed=seed, **kind)
        for seed, (grammar, kind) in enumerate((grammar, kind) for grammar in GRAMMARS for kind in kinds)
    )


@cache
def solo(make: Make) -> Tokens:
    engine = make(Policy(enable_prefix_caching=False))
    return [token_ids(engine.generate([one]))[0] for one in held_asks()]


def text_of(output: Output) -> str:
    return tokenizer().decode(output.token_ids)


def fits(grammar: Grammar, text: str) -> bool:
    place = GRAMMARS.index(grammar)
    if place == 0:
        return isinstance(msgspec.json.decode(text, type=Person), Person)
    if place == 2:
        return text in msgspec.json.decode(grammar.text, type=list[str])
    if place == 3:
        return re.fullmatch(r"(\(*)[0-9]{1,4}(\)*)", text) is not None and text.count("(") == text.count(")") > 0
    return re.fullmatch(grammar.text if place == 1 else r"[a-c]{1,2}(,[a-c]{1,2}){2}", text) is not None


def test_what_ends_keeps_to_its_grammar(make: Make) -> None:
    engine = make(Policy(max_num_batched_tokens=4096))
    outputs = engine.generate(list(held_asks()))
    stopped = dict.fromkeys(GRAMMARS, 0)
    for index, request in enumerate(outputs):
        grammar = GRAMMARS[index // 5]
        for output in request:
            if output.finish_reason is FinishReason.STOP:
                assert fits(grammar, text_of(output)), (grammar, text_of(output))
                stopped[grammar] += 1
    assert min(stopped.values()) >= 3, "of every kind some came to their end"


def test_batched_with_others_equals_solo(make: Make) -> None:
    engine = make(Policy(max_num_batched_tokens=64))
    plain = token_ids(make(Policy()).generate(list(asks())))
    both = token_ids(engine.generate([*held_asks(), *asks()]))
    assert both == [*solo(make), *plain]


def test_preempted_and_lost_equals_solo(make: Make) -> None:
    engine = make(Policy(), workers=2, num_blocks=20, max_model_len=256)
    ids = [engine.add(one) for one in held_asks()]
    for step in range(30):
        engine.step()
        if step == 12:
            engine.lose("w1")
    engine.run()
    assert not engine.rejected
    assert token_ids(engine.outputs_of(ids, held_asks())) == solo(make)
    assert engine.counters.num_preemptions >= 3 and engine.counters.num_worker_losses == 1


def test_late_masks_change_no_token_and_delay_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who samples late takes the same tokens; who is beside it has one in each of its steps."""
    rng, on_time = random.Random(9), Held.allowed

    def allowed(self: Held, draft_token_ids: list[int]) -> Flags | None:
        return None if rng.random() < 0.4 else on_time(self, draft_token_ids)

    expected, beside = solo(make), ask([5, 6, 7], max_tokens=80)
    (other,) = token_ids(make(Policy()).generate([beside]))
    monkeypatch.setattr(Held, "allowed", allowed)
    engine = make(Policy(max_num_batched_tokens=4096))
    first = engine.add(beside)
    for _ in range(3):
        engine.step()
    ids = [engine.add(one) for one in held_asks()]
    while engine.outputs[first, 0].finish_reason is None:
        known = len(engine.outputs[first, 0].token_ids)
        engine.step()
        assert len(engine.outputs[first, 0].token_ids) - known == 2 or engine.outputs[first, 0].finish_reason
    engine.run()
    assert [engine.outputs[first, 0].token_ids] == other
    assert token_ids(engine.outputs_of(ids, held_asks())) == expected
    assert engine.counters.num_late_masks > 100


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_drafts_are_cut_where_they_break_the_grammar(make: Make, acceptance: str) -> None:
    policy = Policy(num_draft_tokens=4, acceptance=acceptance, max_num_batched_tokens=4096)
    engine = make(policy, draft=DRAFT)
    engine.join_draft("draft")
    outputs = engine.generate(list(held_asks()))
    if acceptance == "coupled":
        assert token_ids(outputs) == solo(make)
    ended = [(i // 5, o) for i, request in enumerate(outputs) for o in request if o.finish_reason is FinishReason.STOP]
    assert all(fits(GRAMMARS[place], text_of(output)) for place, output in ended) and len(ended) > 15
    assert engine.counters.num_accepted_tokens > 0


def test_wild_drafts_and_late_masks_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, on_time = random.Random(9), Held.allowed
    expected = solo(make)

    def allowed(self: Held, draft_token_ids: list[int]) -> Flags | None:
        return None if rng.random() < 0.3 else on_time(self, draft_token_ids)

    monkeypatch.setattr(Held, "allowed", allowed)
    engine = make(Policy(num_draft_tokens=3, max_num_batched_tokens=4096), draft=DRAFT)
    engine.join_draft("guesser", Guesser())
    assert token_ids(engine.generate(list(held_asks()))) == expected
    assert engine.counters.num_draft_tokens > 100 and engine.counters.num_late_masks > 50


def test_a_prefix_that_is_cached_and_resumed(make: Make) -> None:
    """The same requests once more, with their prompts in the cache."""
    engine = make(Policy())
    engine.generate(list(held_asks()))
    hits = engine.counters.num_prefix_cache_hits
    assert token_ids(engine.generate(list(held_asks()))) == solo(make)
    assert engine.counters.num_prefix_cache_hits > hits


def test_a_finished_grammar_ends_the_output_whatever_else_is_asked(make: Make) -> None:
    choice = Grammar(GrammarKind.CHOICE, '["the end"]')
    engine = make(Policy())
    wishes: list[dict[str, object]] = [{"ignore_eos": True}, {"min_tokens": 30}, {"logit_bias": {0: -100.0, 3: -100.0}}]
    for (output,) in engine.generate([held([9], choice, **wish) for wish in wishes]):
        assert (text_of(output), output.finish_reason) == ("the end", FinishReason.STOP)


def test_where_other_constraints_leave_nothing_the_grammar_wins(make: Make) -> None:
    every = [[token] for token in range(4096) if tokenizer().decode([token])[:1] == "("]
    grammar = Grammar(GrammarKind.REGEX, r"\([a-z]{1,9}\)")
    asked = [held([9], grammar, bad_words_token_ids=every, temperature=temperature) for temperature in (0.0, 1.0)]
    for (output,) in make(Policy()).generate(asked):
        assert re.fullmatch(grammar.text, text_of(output))


def test_a_grammar_that_is_too_much_ends_its_request_alone(make: Make) -> None:
    engine = make(Policy())
    grammar = Grammar(GrammarKind.COMPILED, "start: /(.{1,1000}){1,1000}x/", "guided_regex")
    engine.add(ask([9], grammar=grammar))
    other = engine.add(ask([5, 6, 7]))
    engine.run()
    assert [rejection.field for rejection in engine.rejected] == ["guided_regex"]
    assert len(engine.outputs[other, 0].token_ids) == 24
