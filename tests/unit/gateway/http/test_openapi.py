"""/openapi.json: it describes every route, by the structs that endpoints read; what is valid by it can be read, what is
not is refused; and answers are what it says."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from scripts.documents.reference.http import routes
from services.gateway.http.openapi import describe
from services.gateway.http.openapi_operations import FORM, OPERATIONS
from shared.messages import TokenLogprobs
from tests.unit.gateway.http.client import events, http
from tests.unit.gateway.troupe import LAST

DOCUMENT = describe(OPERATIONS)
LEFT_OUT = ("/", "/page/", "/deployment")  # the page, and what is an operator's
BODIES = {(method, route): one.body for (method, route), one in OPERATIONS.items() if isinstance(one.body, type)}
ENDS = ("", "a", "é\u2028", "[DONE]", "24h", "user")
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def validator(schema: Any) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def content(method: str, path: str, status: str = "200", kind: str = "application/json") -> Any:
    """The schema of an answer."""
    return DOCUMENT["paths"][path][method.lower()]["responses"][status]["content"][kind]["schema"]


def test_every_route_is_described_with_the_body_that_its_endpoint_reads() -> None:
    found = {(method, path): kind for methods, path, kind in routes() for method in methods.split(", ")}
    served = {one for one in found if one[1] != "/" and not one[1].startswith(LEFT_OUT[1:])}
    assert set(OPERATIONS) == served
    assert {one: found[one] for one in served if found[one] is not None} == BODIES


def test_the_document_is_whole() -> None:
    assert DOCUMENT["openapi"] == "3.1.0" and DOCUMENT["info"]["version"]
    text = json.dumps(DOCUMENT)
    schemas = DOCUMENT["components"]["schemas"]
    referred = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert referred == set(schemas), "each is there, and each is used"
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            assert operation["summary"] and {"200", "default"} <= set(operation["responses"])
            named = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
            assert named == {part.split("}")[0] for part in path.split("{")[1:]}


def test_fields_without_which_a_body_cannot_be_read_are_required() -> None:
    for kind in BODIES.values():
        required = {one.encode_name for one in msgspec.structs.fields(kind) if one.required}
        assert set(DOCUMENT["components"]["schemas"][kind.__name__].get("required", ())) == required
    assert DOCUMENT["components"]["schemas"]["ChatBody"]["required"] == ["messages"]
    form = DOCUMENT["paths"]["/v1/files"]["post"]["requestBody"]["content"][FORM]["schema"]
    assert form["required"] == ["file", "purpose"]


class Bodies:
    """Random values for a schema."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def value(self, schema: Any, depth: int = 0) -> Any:
        if "$ref" in schema:
            return self.value(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(self._rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        kind = schema.get("type") or self._rng.choice(["null", "string", "object", "array", "integer"])
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(self._rng.choice([0, 1, 2]))]
        if kind == "integer":
            return self._rng.choice([schema.get("minimum", -3), 0, 1, schema.get("maximum", 7)])
        if kind == "number":
            return self._rng.choice([-0.5, 0.25, 3, math.pi])
        return {"null": None, "boolean": self._rng.random() < 0.5, "string": self._rng.choice(ENDS)}[kind]

    def _object(self, schema: Any, depth: int) -> Any:
        required, chance = schema.get("required", ()), 0.3 / (1 + depth)
        fields = {
            name: self.value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in required or self._rng.random() < chance
        }
        if isinstance(further := schema.get("additionalProperties"), dict):
            fields["7"] = self.value(further, depth + 1)
        return fields

    def broken(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same with one field less, or of another kind."""
        name = self._rng.choice(sorted(body) or ["model"])
        if self._rng.random() < 0.3:
            return {key: value for key, value in body.items() if key != name}
        return body | {name: self._rng.choice([None, True, -1.5, "a", [[{}]], {"a": []}, 2**63])}


@pytest.mark.parametrize("kind", sorted(set(BODIES.values()), key=str))
def test_what_is_valid_can_be_read_and_what_is_not_is_refused(kind: type[Any]) -> None:
    bodies, check = Bodies(random.Random(kind.__name__)), validator({"$ref": f"#/components/schemas/{kind.__name__}"})
    decoder, seen = msgspec.json.Decoder(kind), {True: 0, False: 0}
    for _ in range(300):
        body = bodies.value({"$ref": f"#/components/schemas/{kind.__name__}"})
        assert check.is_valid(body)
        for one in (body, bodies.broken(body)):
            is_valid = check.is_valid(one)
            seen[is_valid] += 1
            try:
                decoder.decode(json.dumps(one).encode())
            except msgspec.ValidationError:
                assert not is_valid, one
            else:
                assert is_valid, one
    assert seen[True] >= 300 and seen[False] >= 20


async def test_it_is_served_without_a_key_and_beneath_the_path_of_a_proxy() -> None:
    async with http(api_keys="k" * 32, root_path="/llm") as h:
        response = await h.client.get("/llm/openapi.json")
        assert response.status_code == 200 and response.headers["content-type"] == "application/json"
        assert response.json() == DOCUMENT | {"servers": [{"url": "/llm"}]}
        assert (await h.client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_generated_answers_are_as_described(path: str) -> None:
    body: dict[str, Any] = (
        HI | {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"prompt": "a", "logprobs": 1}
    )
    for stream in (False, True):
        async with http() as h:
            asked = h.post(
                path, body | {"stream": stream, "stream_options": {"include_usage": True}} if stream else body
            )
            request = await h.troupe.request()
            entry = TokenLogprobs([7, 8], [-1.0, -0.5], 2)
            h.troupe.say(request, "a", token_ids=[7], logprobs=[entry], **LAST)
            await h.answer_pieces()
            response = await asked
            if stream:
                described = content("POST", path, kind="text/event-stream")["contentSchema"]
                assert len(found := events(response.text)) >= 2
            else:
                described, found = content("POST", path), [response.json()]
            for one in found:
                validator(described).validate(one)
                assert not validator(described).is_valid(one | {"choices": {}})


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", HI | {"model": "tiny", "max_tokens": 9}),
])  # fmt: skip
async def test_whole_answers_of_other_apis_are_as_described(path: str, body: dict[str, Any]) -> None:
    async with http() as h:
        asked = h.post(path, body)
        h.troupe.say(await h.troupe.request(), "a", **LAST)
        validator(content("POST", path)).validate((await asked).json())


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ping", "/version", "/load"])
async def test_what_is_told_of_the_server_is_as_described(path: str) -> None:
    async with http() as h:
        response = await h.client.get(path)
        validator(content("GET", path, str(response.status_code))).validate(response.json())


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {}), ("/v1/messages", {}), ("/v1/embeddings", {"input": 1}), ("/v1/batches", b"{"),
    ("/tokenize", {"prompt": 1}),
])  # fmt: skip
async def test_refusals_are_as_described(path: str, body: Any) -> None:
    async with http() as h:
        response = await h.post(path, body)
        assert response.status_code == 400
        validator(content("POST", path, "default")).validate(response.json())
