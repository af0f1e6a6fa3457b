"""Requests over this project's gRPC interface."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import grpc

from protos.pageant.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.cli.bench.generator import RequestOutcome, start_header
from shared.client import ModelCard
from shared.metrics import Acceptance
from shared.packing import unpack_tokens
from shared.workload import ChatPrompt, LoadRequest, TextPrompt

OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # connections of their own, as different users have
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
NUM_CHANNELS = 8


class GrpcBackend:
    """Streams over several connections; made and closed in a running event loop.  With `explain` the server is asked
    where the time of each request went."""

    def __init__(self, address: str, sampling: dict[str, Any], *, explain: bool = False) -> None:
        self.vocab_size = 0  # until `model` was asked
        self._explain = explain
        self._sampling = sampling
        self._channels: list[Any] = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(NUM_CHANNELS)]
        stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._first, self._stubs = stubs[0], cycle(stubs)
        self._control: Any = control_pb2_grpc.ControlStub(self._channels[0])

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def model(self, patience: float) -> ModelCard:
        """The first served model, once the server answers.  Raises grpc.RpcError after `patience` seconds."""
        answer = await self._first.ListModels(inference_pb2.ListModelsRequest(), timeout=patience, wait_for_ready=True)
        served = answer.models[0]
        self.vocab_size = served.vocab_size
        return ModelCard(served.name, served.max_model_len, served.max_input_length, served.vocab_size)

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        start = start_header()
        call = next(self._stubs).Generate(self._message(request), metadata=(start,))
        parts = []
        try:
            async for response in call:
                if response.token_ids:
                    outcome.timeline.add(clock(), len(response.token_ids))
                parts.append(response.text)
                if response.HasField("usage"):
                    outcome.num_prompt_tokens = response.usage.prompt_tokens
                    outcome.num_cached_tokens = response.usage.cached_tokens
                if response.HasField("explanation"):
                    outcome.phases = {part.phase: part.ms / 1000 for part in response.explanation.phases}
        except grpc.RpcError as error:
            outcome.error = f"{error.code().name}: {error.details()}"
        outcome.text = "".join(parts)

    async def acceptance(self) -> Acceptance:
        """What speculation has yielded since the server's start; all zero without drafts."""
        load = await self._control.GetLoad(control_pb2.GetLoadRequest())
        per_position = list(load.num_accepted_tokens_per_position)
        return Acceptance(load.num_drafts, load.num_draft_tokens, load.num_accepted_tokens, per_position)

    async def num_blocks(self) -> list[int]:
        """KV blocks of each worker."""
        load = await self._control.GetLoad(control_pb2.GetLoadRequest())
        return [worker.num_blocks for worker in load.workers]

    def _message(self, request: LoadRequest) -> Any:
        options = inference_pb2.StreamOptions(return_token_ids=True)
        message = inference_pb2.GenerateRequest(stream=options, explain=self._explain)
        prompt = request.prompt
        if isinstance(prompt, TextPrompt):
            message.text = prompt.text
        elif isinstance(prompt, ChatPrompt):
            message.chat.messages.add(role="user", content=prompt.text)
        else:
            message.token_ids.ids.extend(unpack_tokens(prompt.token_ids(self.vocab_size)))
        fields = {**self._sampling, "max_tokens": request.max_tokens}
        message.sampling.CopyFrom(inference_pb2.SamplingParams(**fields))
        return message
