"""The poison corpus: requests that killed, hung or misled servers elsewhere, and what each must end with here.

The classes come from published advisories and reports of this field's servers: numbers out of range and no numbers at
all, ids outside the vocabulary, counts that multiply, sizes, encodings, roles and templates, names that are paths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.pageant.v1 import control_pb2, inference_pb2

NAN, INF = float("nan"), float("inf")
VOCAB_SIZE, MAX_MODEL_LEN = 4096, 1024  # of the bundled model
INVALID = grpc.StatusCode.INVALID_ARGUMENT
ROLE = "chat.messages[0].role"
INFERENCE, CONTROL = "/pageant.v1.Inference/", "/pageant.v1.Control/"


@dataclass(frozen=True)
class Poison:
    """One call: the bytes of its message, and the status and the field's name that it must end with."""

    name: str
    message: bytes
    code: grpc.StatusCode = INVALID
    field: str = ""
    method: str = INFERENCE + "Generate"
    streams: bool = True
    metadata: tuple[tuple[str, str], ...] = ()
    timeout: float = 60.0


def ask(text: str | None = "Once upon a time", **sampling: Any) -> Any:
    request = inference_pb2.GenerateRequest()
    if text is not None:
        request.text = text
    for name, value in sampling.items():
        if name == "logit_bias":
            request.sampling.logit_bias.update(value)
        elif name == "allowed_token_ids":
            request.sampling.allowed_token_ids.ids.extend(value)
            request.sampling.allowed_token_ids.SetInParent()
        elif name == "bad_words_token_ids":
            for ids in value:
                request.sampling.bad_words_token_ids.add(ids=ids)
        elif isinstance(value, list):
            getattr(request.sampling, name).extend(value)
        else:
            setattr(request.sampling, name, value)
    return request


def of_sampling(name: str, *values: Any, blamed: str = "", **others: Any) -> list[Poison]:
    """One poison for each value of a parameter, which the status must name."""
    return [
        Poison(
            f"{name}={str(value)[:20]}{beside(others)}",
            ask(**{name: value}, **others).SerializeToString(),
            INVALID,
            blamed or name,
        )
        for value in values
    ]


def beside(others: dict[str, Any]) -> str:
    return f" beside {', '.join(others)}" if others else ""


def of_token_ids(name: str, ids: list[int], blamed: str = "prompt") -> Poison:
    request = ask(None)
    request.token_ids.ids.extend(ids)
    request.token_ids.SetInParent()
    return Poison(f"token_ids {name}", request.SerializeToString(), INVALID, blamed)


def of_chat(name: str, *messages: tuple[str, str], code: grpc.StatusCode = INVALID, blamed: str = "chat") -> Poison:
    request = ask(None)
    request.chat.SetInParent()
    for role, content in messages:
        request.chat.messages.add(role=role, content=content)
    return Poison(f"chat {name}", request.SerializeToString(), code, blamed)


def of_raw(name: str, data: bytes) -> Poison:
    return Poison(f"bytes {name}", data, INVALID, "message")


def other(name: str, message: Any, method: str, code: grpc.StatusCode = INVALID, blamed: str = "") -> Poison:
    return Poison(name, message.SerializeToString(), code, blamed, method, streams=False)


def corpus() -> list[Poison]:
    """All of them; some are megabytes, so they are made when they are wanted."""
    return [*numbers(), *counts(), *tokens(), *strings(), *prompts(), *encodings(), *other_calls()]


def numbers() -> list[Poison]:
    return [
        *of_sampling("temperature", NAN, INF, -INF, -1.0, 2.5),
        *of_sampling("top_p", NAN, 0.0, 1.5, -0.1),
        *of_sampling("top_k", -2, -(2**31)),
        *of_sampling("min_p", NAN, -0.1, 1.1),
        *of_sampling("frequency_penalty", NAN, 3.0),
        *of_sampling("presence_penalty", INF, -3.0),
        *of_sampling("repetition_penalty", NAN, INF, 0.0, -1.0, 1e-300, 1e300),
    ]


def counts() -> list[Poison]:
    return [
        *of_sampling("n", 0, -1, 65, 2**31 - 1),
        *of_sampling("n", 2, temperature=0.0),
        *of_sampling("n", 2**31 - 1, logprobs=20, max_tokens=1000),
        *of_sampling("max_tokens", 0, -1),
        *of_sampling("min_tokens", -1, 101, max_tokens=100),
        *of_sampling("logprobs", 21, -1, -2, 2**31 - 1),
        *of_sampling("prompt_logprobs", 21, -1, 2**31 - 1),
    ]


def tokens() -> list[Poison]:
    outside = (-1, VOCAB_SIZE, 2**31 - 1, -(2**31))
    return [
        *of_sampling("stop_token_ids", *([i] for i in outside[:2]), [1] * 1025),
        *of_sampling("logit_bias", {-1: 1.0}, {VOCAB_SIZE: 1.0}, {5: NAN}, dict.fromkeys(range(1025), 1.0)),
        *of_sampling("allowed_token_ids", [], [VOCAB_SIZE], [-1], [0] * (VOCAB_SIZE + 1)),
        *of_sampling(
            "bad_words_token_ids", [[]], [[VOCAB_SIZE]], [[-1]], [[2**31 - 1]], [[1] * 257], blamed="bad_words"
        ),
        *(of_token_ids(f"with {i}", [1, 2, i]) for i in outside),
        of_token_ids("empty", []),
        of_token_ids("too many", [1] * (MAX_MODEL_LEN + 1)),
        of_token_ids("a million", [1] * 1_000_000),
    ]


def strings() -> list[Poison]:
    return [
        *of_sampling("stop", [""], ["x"] * 65, ["x" * 1025]),
        *of_sampling("stop", ["x"], detokenize=False),
        *of_sampling("bad_words", [""], ["x"] * 257, ["x" * 257]),
    ]


def prompts() -> list[Poison]:
    label, model, path = ask(), ask(), ask()
    label.label, model.model, path.model = "x" * 257, "another", "../../etc/passwd"
    return [
        Poison("text empty", ask("").SerializeToString(), INVALID, "prompt"),
        Poison("text of a megabyte", ask("a b " * 250_000).SerializeToString(), INVALID, "prompt"),
        Poison("text of 5 megabytes", ask("x" * 5_000_000).SerializeToString(), INVALID, "prompt"),
        Poison("text of foxes", ask("🦊" * 100_000).SerializeToString(), INVALID, "prompt"),
        Poison("text of 33 megabytes", ask("x" * 34_000_000).SerializeToString(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        Poison("no input", ask(None).SerializeToString(), INVALID, "input"),
        Poison("label", label.SerializeToString(), INVALID, "label"),
        Poison("model unknown", model.SerializeToString(), grpc.StatusCode.NOT_FOUND, "model"),
        Poison("model as a path", path.SerializeToString(), grpc.StatusCode.NOT_FOUND, "model"),
        of_chat("empty"),
        of_chat("of a role of two words", ("wise wizard", "hi"), blamed=ROLE),
        of_chat("of a role without end", ("x" * 1_000_000, "hi"), blamed=ROLE),
        of_chat("of a role that is a template", ("{{ self }}", "hi"), blamed=ROLE),
        of_chat("of 5 megabytes", ("user", "x" * 5_000_000)),
        of_chat("of many messages", *[("user", "hello there")] * 20_000),
        Poison("deadline passed", ask().SerializeToString(), grpc.StatusCode.DEADLINE_EXCEEDED, timeout=0.0),
        Poison("tenant", ask().SerializeToString(), INVALID, "x-tenant", metadata=(("x-tenant", "x" * 129),)),
    ]


def encodings() -> list[Poison]:
    return [
        of_raw("that are no UTF-8", b"\x1a\x04\xff\xfe\xfd\xfc"),
        of_raw("of a surrogate", b"\x1a\x03\xed\xa0\x80"),
        of_raw("torn", ask("Once upon a time").SerializeToString()[:-3]),
        of_raw("of noise", b"\xff" * 64),
        of_raw("of groups in groups", b"\x0b" * 5_000),
        of_raw("of a length that is not there", b"\x1a\xff\xff\xff\xff\x07"),
    ]


def other_calls() -> list[Poison]:
    long = inference_pb2.TokenizeRequest(text="x" * 5_000_000)
    wild = inference_pb2.TokenizeRequest(chat={"messages": [{"role": "wise wizard", "content": "x"}]})
    return [
        other("Tokenize of nothing", inference_pb2.TokenizeRequest(), INFERENCE + "Tokenize", blamed="input"),
        other("Tokenize of 5 megabytes", long, INFERENCE + "Tokenize", blamed="prompt"),
        other("Tokenize of a wise wizard", wild, INFERENCE + "Tokenize", blamed=ROLE),
        *(
            other(f"Detokenize of {i}", inference_pb2.DetokenizeRequest(token_ids=[i]), INFERENCE + "Detokenize",
                  blamed="token_ids")
            for i in (-1, VOCAB_SIZE, 2**31 - 1)
        ),
        other("Detokenize of millions", inference_pb2.DetokenizeRequest(token_ids=[1] * 2_000_000),
              INFERENCE + "Detokenize", blamed="token_ids"),
        other("Abort of no request", control_pb2.AbortRequest(), CONTROL + "Abort", blamed="target"),
        other("a method that is none", control_pb2.AbortRequest(), CONTROL + "Eval", grpc.StatusCode.UNIMPLEMENTED),
    ]  # fmt: skip


IN_DEBT = "earlier large requests of this sender were refused, so this one was refused too: retry later"


@dataclass(frozen=True)
class Ending:
    """How a call ended."""

    code: grpc.StatusCode
    blamed: str
    details: str
    headers: dict[str, Any] = field(default_factory=dict)


async def swallow(channel: Any, poison: Poison) -> Ending:
    """Make the call, and again when the gateway says so: all poison has one sender, whose large requests take turns."""
    async with asyncio.timeout(60):
        while (ending := await _call(channel, poison)).details == IN_DEBT:
            await asyncio.sleep(int(ending.headers["retry-after-ms"]) / 1000)
    return ending


async def _call(channel: Any, poison: Poison) -> Ending:
    """Make the call, its message as it is."""
    plain: Callable[[bytes], bytes] = bytes
    make = channel.unary_stream if poison.streams else channel.unary_unary
    call = make(poison.method, request_serializer=plain, response_deserializer=plain)(
        poison.message, timeout=poison.timeout, metadata=poison.metadata
    )
    try:
        if poison.streams:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        metadata: Any = error.trailing_metadata() or ()
        trailing = dict(metadata)
        return Ending(error.code(), str(trailing.get("error-field", "")), error.details() or "", trailing)
    return Ending(grpc.StatusCode.OK, "", "")
