"""Real JSON schemas on a model with random weights: whatever ends by itself parses and fits its schema.

Every 16th of them; PAGEANT_TEST_SCHEMAS=all does all 320, which takes minutes and prints a table."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from services.scheduler.state.policy import Policy
from shared.automata.compiling import Compiler
from shared.automata.limits import GrammarError
from shared.messages import FinishReason
from shared.requests.grammar import Grammar, GrammarKind
from shared.text.tokenization import load_tokenizer
from tests.integration.engine import MODEL, Ask, Engine, ask
from tests.integration.outputs.schemas import NamedSchema, bounded, read_schemas

EVERY = 1 if os.environ.get("PAGEANT_TEST_SCHEMAS") == "all" else 16
AT_ONCE = 32
MAX_TOKENS = 700
MAX_UNSUPPORTED = 0.1


def compiled(schema: NamedSchema) -> Grammar | str:
    """Or why it is not supported."""
    text = json.dumps(bounded(schema.schema))
    try:
        return Grammar(GrammarKind.COMPILED, Compiler().compile(Grammar(GrammarKind.JSON_SCHEMA, text)))
    except GrammarError as error:
        return str(error)


def asked(schema: NamedSchema, seed: int) -> Ask | None:
    grammar = compiled(schema)
    if isinstance(grammar, str):
        print(f"unsupported: {schema.name}: {grammar[:100]}")
        return None
    return ask([5, 6, 7], grammar=grammar, seed=seed, temperature=1.0, ignore_eos=False, max_tokens=MAX_TOKENS)


def check(schema: NamedSchema, text: str) -> None:
    found = json.loads(text)
    validator = jsonschema.validators.validator_for(schema.schema, jsonschema.Draft202012Validator)
    errors = [error.message for error in validator(schema.schema).iter_errors(found)]
    assert not errors, (schema.name, text, errors)


@pytest.mark.data
@pytest.mark.timeout(3000)
def test_what_ends_fits_its_schema(data_dir: Path) -> None:
    tokenizer, endings = load_tokenizer(MODEL), Counter[str]()
    engine = Engine(Policy(), load_format="dummy", kernels="native", num_blocks=2048)
    schemas = read_schemas(data_dir)[::EVERY]
    for start in range(0, len(schemas), AT_ONCE):
        some = [(one, asked(one, start + place)) for place, one in enumerate(schemas[start : start + AT_ONCE])]
        supported = [(one, wish) for one, wish in some if wish is not None]
        endings["unsupported"] += len(some) - len(supported)
        ids = [engine.add(wish) for _, wish in supported]
        engine.run()
        refused = {rejection.request_id: rejection.message for rejection in engine.rejected}
        for (schema, _), request_id in zip(supported, ids, strict=True):
            if request_id in refused:  # in the middle, where it became too much
                print(f"unsupported: {schema.name}: {refused[request_id]}")
                endings["unsupported"] += 1
                continue
            output = engine.outputs[request_id, 0]
            endings[str(output.finish_reason)] += 1
            if output.finish_reason is FinishReason.STOP:
                check(schema, tokenizer.decode(output.token_ids))
    print(f"{len(schemas)} schemas: {dict(endings)}, masks late {engine.counters.num_late_masks}")
    assert endings["unsupported"] < MAX_UNSUPPORTED * len(schemas) + 1
    assert endings[str(FinishReason.STOP)] > len(schemas) / 2, "most come to an end"
