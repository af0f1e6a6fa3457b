"""Requests over OpenAI's HTTP interface, this project's or any other server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import httpx2
import msgspec

from services.cli.bench.generator import RequestOutcome, start_header
from shared.client import ModelCard
from shared.metrics import Acceptance
from shared.packing import unpack_tokens
from shared.workload import ChatPrompt, LoadRequest, TextPrompt

SMALL_VOCABULARY = 1000  # ids that every model has; this interface does not name the vocabulary's size
DATA, DONE = "data: ", "[DONE]"


class HttpBackend:
    """Streams of server-sent events; each event with output counts as one output, with as many tokens as it names."""

    def __init__(
        self, base_url: str, sampling: dict[str, Any], *, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        """`transport` is for a server that is not there."""
        self.vocab_size = SMALL_VOCABULARY
        self._sampling = sampling
        self._model = ""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(base_url=base_url, timeout=None, limits=limits, transport=transport)

    async def close(self) -> None:
        await self._client.aclose()

    async def model(self, patience: float) -> ModelCard:
        """The first served model.  Raises click.ClickException where the server does not answer in so many seconds."""
        try:
            answer = await self._client.get("/v1/models", timeout=patience)
            answer.raise_for_status()
            model = answer.json()["data"][0]
        except (httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
            raise click.ClickException(f"{self._client.base_url}v1/models: {error!r}") from error
        self._model = model["id"]
        return ModelCard(self._model, int(model.get("max_model_len") or 0), 0, self.vocab_size)

    async def acceptance(self) -> Acceptance:
        """All zero: this interface has no such figures."""
        return Acceptance()

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        headers = dict([start_header()])
        path, body = self._message(request)
        try:
            async with self._client.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    outcome.error = f"{response.status_code}: {text[:200]}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith(DATA) and line != DATA + DONE:
                        take(msgspec.json.decode(line.removeprefix(DATA)), outcome, clock())
        except (httpx2.HTTPError, msgspec.DecodeError) as error:
            outcome.error = repr(error)

    def _message(self, request: LoadRequest) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **self._sampling,
                "max_tokens": request.max_tokens, "return_token_ids": True}  # fmt: skip
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt.text}]}
        if isinstance(prompt, TextPrompt):
            return "/v1/completions", body | {"prompt": prompt.text}
        return "/v1/completions", body | {"prompt": unpack_tokens(prompt.token_ids(self.vocab_size))}


def take(event: dict[str, Any], outcome: RequestOutcome, time: float) -> None:
    """Note one event.  Where events name no token ids, the usage at the end says how many there were in all."""
    for choice in event.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        num_tokens = len(choice.get("token_ids") or ()) or int(bool(text))
        if num_tokens:
            outcome.timeline.add(time, num_tokens)
        outcome.text += text
    if error := event.get("error"):
        outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
    if usage := event.get("usage"):
        outcome.num_prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        missing = usage.get("completion_tokens", 0) - outcome.timeline.num_tokens
        if missing > 0 and outcome.timeline.times:
            outcome.timeline.counts[-1] += missing
