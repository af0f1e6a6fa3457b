"""One connection to a gateway: generations whole or streamed, the tokenizer, and what is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, Self

import grpc

from protos.pageant.v1 import inference_pb2, inference_pb2_grpc
from shared.client.answers import (
    CallError,
    Delta,
    Generation,
    ModelCard,
    call_error,
    gather,
    read_delta,
    status_error,
)

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # its stubs lack it
Chat = Iterable[tuple[str, str]]  # (role, content)


class GenerationStream:
    """A generation under way.  Leaving its `async with`, or `cancel`, stops it at the server too."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next piece of any sequence.  Raises CallError where the request is refused, fails or is cancelled."""
        proto = await _answer(self._call.read())
        if proto is END:
            await self._check_end()
            raise StopAsyncIteration
        return read_delta(proto)

    async def request_id(self) -> str:
        """The server's name of this generation: it is in every log line about it.  Comes at once."""
        metadata: dict[str, Any] = dict(await self._call.initial_metadata() or ())
        return str(metadata.get("x-request-id", ""))

    def cancel(self) -> None:
        """Stop; nothing where it has ended."""
        self._call.cancel()

    async def _check_end(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise status_error(code.name, await self._call.details(), await self._call.trailing_metadata())


class Client:
    """A client of one gateway; made and used within one event loop.

    `api_key` where the gateway needs one, `tenant` where it needs none, `credentials` for TLS.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tenant: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        self._channel: Any
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        given = {"authorization": f"Bearer {api_key}" if api_key else "", "x-tenant": tenant}
        self._metadata = tuple((name, value) for name, value in given.items() if value)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is under way."""
        await self._channel.close()

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Iterable[int] | None = None,
        chat: Chat | None = None,
        label: str = "",
        priority: int = 0,
        return_token_ids: bool = False,
        explain: bool = False,
        gather: bool = False,
        timeout: float | None = None,
        **sampling: Any,
    ) -> GenerationStream:
        """Generate from one of `prompt`, `token_ids` and `chat`; `timeout` in seconds.  With `explain` the last delta
        says where the time went.  With `gather` tokens behind the first come in groups, which costs the services less.

        `sampling` has the names of `pageant.v1.SamplingParams`: temperature, max_tokens, n, stop, seed, logprobs ...
        """
        request = inference_pb2.GenerateRequest(
            label=label,
            priority=priority,
            explain=explain,
            sampling=sampling_proto(sampling),
            stream=inference_pb2.StreamOptions(return_token_ids=return_token_ids, gather=gather),
        )
        if prompt is not None:
            request.text = prompt
        if token_ids is not None:
            request.token_ids.ids.extend(token_ids)
            request.token_ids.SetInParent()
        if chat is not None:
            request.chat.CopyFrom(chat_proto(chat))
        return GenerationStream(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    async def generate(self, prompt: str | None = None, **options: Any) -> Generation:
        """The whole of what `stream` would give.  Raises CallError."""
        async with self.stream(prompt, **{"gather": True} | options) as stream:
            deltas = [delta async for delta in stream]
            return gather(await stream.request_id(), deltas, max(1, options.get("n", 1)))

    async def tokenize(self, prompt: str | None = None, *, chat: Chat | None = None, special: bool = True) -> list[int]:
        """Token ids of a text or a chat; without `special`, no special tokens are added to a text."""
        request = inference_pb2.TokenizeRequest(add_special_tokens=special)
        if prompt is not None:
            request.text = prompt
        if chat is not None:
            request.chat.CopyFrom(chat_proto(chat))
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = (await self._call(self._stub.Detokenize, request)).text
        return text

    async def embed(
        self, inputs: Iterable[str | Iterable[int]], *, pooling: str = "last", normalize: bool = True
    ) -> list[list[float]]:
        """One vector for each text or list of token ids; `pooling` is "last" or "mean".  Raises CallError."""
        request = inference_pb2.EmbedRequest(normalize=normalize, pooling=f"POOLING_{pooling.upper()}")
        for one in inputs:
            ids = None if isinstance(one, str) else inference_pb2.TokenIds(ids=one)
            request.inputs.add(**({"text": one} if ids is None else {"token_ids": ids}))
        return [list(vector.values) for vector in (await self._call(self._stub.Embed, request)).embeddings]

    async def models(self) -> list[ModelCard]:
        """What is served here."""
        answer = await self._call(self._stub.ListModels, inference_pb2.ListModelsRequest())
        return [
            ModelCard(model.name, model.max_model_len, model.max_input_length, model.vocab_size)
            for model in answer.models
        ]

    async def _call(self, method: Any, request: Any) -> Any:
        return await _answer(method(request, metadata=self._metadata))


async def _answer(call: Awaitable[Any]) -> Any:
    """What a call answers.  Raises CallError, also where the call is cancelled on this side while its task goes on."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise call_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CallError("CANCELLED", "the call was cancelled on this side") from None


def chat_proto(chat: Chat) -> Any:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in chat]
    return inference_pb2.ChatMessages(messages=messages)


def sampling_proto(sampling: dict[str, Any]) -> Any:
    """Keyword arguments as `pageant.v1.SamplingParams`; TypeError or ValueError where there is no such field."""
    given = dict(sampling)
    if (allowed := given.pop("allowed_token_ids", None)) is not None:
        given["allowed_token_ids"] = inference_pb2.TokenIds(ids=allowed)
    if (words := given.pop("bad_words_token_ids", None)) is not None:
        given["bad_words_token_ids"] = [inference_pb2.TokenIds(ids=ids) for ids in words]
    if (beam := given.pop("beam_search", None)) is not None:
        given["beam_search"] = inference_pb2.BeamSearch(**beam)
    if (grammar := given.pop("grammar", None)) is not None:
        given["grammar"] = inference_pb2.Grammar(**_with_choices(grammar))
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return inference_pb2.SamplingParams(**given)


def _with_choices(grammar: dict[str, Any]) -> dict[str, Any]:
    """`choice` is given as a list."""
    if "choice" in grammar:
        return grammar | {"choice": inference_pb2.Choices(texts=grammar["choice"])}
    return grammar
