"""Run by the Python of an environment that has langchain-openai and instructor: calls of tools as both make them.

python calls.py URL MODEL NUM_CALLS: prints one JSON line, {case: [[finish reason, completion tokens], ...]}.
python calls.py record: prints what both send, without messages, as `clients.json` has it (tests/unit/gateway).
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import httpx
import instructor
import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "Tell me about a fox"
MAX_TOKENS = 60


class Address(BaseModel):
    """where"""

    street: Literal["High", "Low"]
    number: int = Field(ge=1, le=99)


class User(BaseModel):
    """A user"""

    age: int | None = Field(default=None, ge=0, le=99)
    mood: Literal["good", "bad"] = "good"
    address: Address


@tool
def add_user(address: Address) -> str:
    """Add a user"""
    return str(address)


class Kept(httpx.BaseTransport):
    """Keeps what is sent and what is answered; with no server, nothing is."""

    def __init__(self, *, is_real: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self._real = httpx.HTTPTransport() if is_real else None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.read()))
        if self._real is None:
            return httpx.Response(400, json={"error": {"message": "there is no server here"}})
        answer = self._real.handle_request(request)
        answer.read()
        self.answers.append(answer.json())
        return answer


def cases(url: str, model: str, kept: Kept, **given: Any) -> dict[str, Any]:
    """By name, a function that asks with a seed."""
    http = httpx.Client(transport=kept, timeout=60)
    chain = ChatOpenAI(model=model, api_key="none", base_url=url, http_client=http, max_retries=0, **given)
    tools = chain.bind_tools([add_user], tool_choice="any", parallel_tool_calls=False)  # or it may call 16 times
    fields = chain.with_structured_output(User, method="function_calling")
    client = openai.OpenAI(api_key="none", base_url=url, http_client=http, max_retries=0)
    teacher = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    ask: list[Any] = [{"role": "user", "content": QUESTION}]
    return {
        "langchain tool": lambda seed: tools.invoke(QUESTION, seed=seed),
        "langchain class": lambda seed: fields.invoke(QUESTION, seed=seed),
        "instructor class": lambda seed: teacher.chat.completions.create(
            model=model, response_model=User, messages=ask, max_retries=0, seed=seed, **given
        ),
    }


def record() -> dict[str, Any]:
    found = {}
    kept = Kept(is_real=False)
    for name, ask in cases("http://127.0.0.1/v1", "tiny", kept).items():
        try:
            ask(1)
        except Exception:
            body = kept.sent[-1]
            found[name] = {key: body[key] for key in body if key not in ("messages", "model", "seed")}
    return found


def measure(url: str, model: str, num_calls: int) -> dict[str, Any]:
    kept, found = Kept(is_real=True), {}
    for name, ask in cases(url, model, kept, max_tokens=MAX_TOKENS, temperature=1.0).items():
        ends = []
        for seed in range(num_calls):
            try:
                answer = ask(seed)
                is_read = bool(answer.tool_calls) if name == "langchain tool" else isinstance(answer, User)
            except Exception as error:
                is_read = False
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            told = kept.answers[-1]
            reason = told["choices"][0]["finish_reason"] if "choices" in told else str(told)
            ends.append([reason, told.get("usage", {}).get("completion_tokens"), is_read])
        found[name] = ends
    return found


if __name__ == "__main__":
    if sys.argv[1] == "record":
        print(json.dumps(record(), indent=1))
    else:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
