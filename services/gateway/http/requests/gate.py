"""What the HTTP endpoints ask of the gateway: the same admission, streams and questions that gRPC's servicers use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request

from services.gateway.access.auth import Access
from services.gateway.access.header import CallMetadata, make_header, seeded
from services.gateway.generation.checks import MAX_TOKENS_PER_MESSAGE, check_label, packed_prompt
from services.gateway.generation.models import ServedModels
from services.gateway.generation.service import GenerationService
from services.gateway.generation.tasks import all_or_none
from services.gateway.http.requests.caching import with_cache_hints
from services.gateway.http.requests.formats import AnswerFormats
from services.gateway.http.requests.reading import Bodies, arrival, field_error, seconds_left
from services.gateway.http.requests.returning import key_of
from services.gateway.http.requests.vocabulary import TokenNames
from services.gateway.streams.stream import Position, Stream, StreamDelta
from shared.config import Settings
from shared.messages import (
    ChatMessage,
    ChatOptions,
    RequestHeader,
    TokenizeRequest,
)
from shared.requests.sampling import SamplingParams

CALLER = "pageant.caller"  # in the scope of a request that the gateway makes itself; no client writes there

Consumer = Callable[[int, Stream, list[StreamDelta]], Awaitable[None]]


class Gate:
    """Every request of every endpoint passes here, and none has another way to the service."""

    def __init__(
        self, service: GenerationService, access: Access, settings: Settings, models: ServedModels | None = None
    ) -> None:
        """`models`: of the gate that all requests come to, which begins with the first model's; others have none."""
        self.service = service
        self.models = models or ServedModels(service)
        self._gates: dict[GenerationService, Gate] = {}  # of the other models, once they were asked for
        self.access = access
        self.settings = settings
        self.bodies = Bodies(settings.gateway.max_request_bytes)
        self.vocabulary = TokenNames(service.questions.pieces)
        self.formats = AnswerFormats(settings.gateway, service.questions.describe)

    @property
    def closes_formats(self) -> bool:
        """Whether objects of a JSON schema that an answer is held to have only the properties that it names."""
        return self.settings.gateway.closed_objects == "all"

    def names_ids(self, wanted: bool | None) -> bool:
        """Whether log-probabilities name tokens by their ids; `wanted`: as a request has it."""
        return self.settings.gateway.return_tokens_as_token_ids if wanted is None else wanted

    @property
    def max_model_len(self) -> int:
        """Tokens; 0 while no worker has said it."""
        return self.service.deployment.roster.max_model_len

    @property
    def labels(self) -> list[str]:
        """That the model gives scores to; empty where it generates, or no worker has said it."""
        capacity = self.service.deployment.roster.model
        return [] if capacity is None else capacity.labels

    @property
    def _max_input_length(self) -> int:
        return self.service.deployment.roster.max_input_length or MAX_TOKENS_PER_MESSAGE

    def caller(self, request: Request) -> CallMetadata:
        """The gateway names the caller for the lines of batches; for all other requests the headers do."""
        known: CallMetadata | None = request.scope.get(CALLER)
        return self.access.caller(request.headers.items()) if known is None else known

    def choose(self, name: str | None) -> Gate:
        """The gate of the model that has this name, or has an adapter of this name that is loaded or can be.  Raises
        RequestError where there is none."""
        service = self.models.of(name or "")
        if service is self.service:
            return self
        if service not in self._gates:
            present = set(self.models)
            self._gates = {one: gate for one, gate in self._gates.items() if one in present}
            self._gates[service] = Gate(service, self.access, service.settings)
        return self._gates[service]

    def abort(self, request_id: str, tenant: str) -> None:
        """End a tenant's own generation, of whichever model."""
        for service in self.models:
            service.abort(request_id=request_id, tenant=tenant, own_only=True)

    def check_operator(self, request: Request) -> None:
        self.access.check_operator(self.access.caller(request.headers.items()))

    def model_name(self, name: str | None) -> str:
        """What answers call the model that a request names."""
        adapter = self.service.adapters.of(name or "")
        return self.settings.engine.model_name if adapter is None else adapter.name

    def header(
        self, request: Request, *, label: str | None = None, priority: int | None = None, place: int = 0
    ) -> RequestHeader:
        """The header of one generation for this caller; its label is the client's own id, for logs and Abort.  `place`:
        of its prompt, where a request has several."""
        label = label or request.headers.get("x-request-id", "")
        check_label(label)
        header = make_header(
            self.caller(request),
            gateway=self.service.address,
            label=label,
            priority=priority or 0,
            now=arrival(request),
            remaining=seconds_left(request),
            key=key_of(request, place),
            adapter=self.service.adapters.of(getattr(request.state.body, "model", None) or ""),
            is_gathered=not getattr(request.state.body, "stream", False),
        )
        request.state.load_reports = self.service.load_reports  # for the answer's headers
        return with_cache_hints(header, request.state.body)

    def seeded(self, params: SamplingParams, request: Request, header: RequestHeader, place: int = 0) -> SamplingParams:
        """With a seed; under a key always with the same."""
        return seeded(params, header.tenant, key_of(request, place))

    def pack(self, token_ids: Sequence[int]) -> bytes:
        """A prompt's ids for the wire."""
        return packed_prompt(token_ids, self._max_input_length)

    def up_to_the_end(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """With the rest of the context for the output, as a chat has it that does not say how much it wants."""
        if params.max_tokens is not None or not self.max_model_len:
            return params
        return msgspec.structs.replace(params, max_tokens=max(1, self.max_model_len - num_prompt_tokens))

    def truncate(self, token_ids: list[int], limit: int | None, side: str | None = None) -> list[int]:
        """The end of a prompt: `limit` tokens, -1 for as many as a prompt may have; None for all of it.  `side`: where
        it is cut, left or right."""
        if limit is None:
            return token_ids
        if limit < -1 or limit == 0:
            raise field_error("truncate_prompt_tokens", f"must be positive or -1, got {limit}")
        if self.max_model_len and limit > self.max_model_len:
            raise field_error("truncate_prompt_tokens", f"is {limit}, more than max_model_len={self.max_model_len}")
        kept = self._max_input_length if limit < 0 else limit
        return token_ids[:kept] if side == "right" else token_ids[-kept:]

    # -- generations

    async def run(
        self, requests: Sequence[TokenizeRequest], consume: Consumer, has: Sequence[Sequence[Position]] | None = None
    ) -> list[Stream]:
        """Generate for all requests at once; `consume` gets each one's place and its output as it comes.

        `has`: what of each a client has that comes back.  The first that is refused or fails ends all, with its
        RequestError.
        """
        streams: dict[int, Stream] = {}
        works = [
            self._run(place, request, consume, streams, None if has is None else has[place])
            for place, request in enumerate(requests)
        ]
        if len(works) == 1:
            await works[0]
        else:
            await all_or_none(works)
        return [streams[place] for place in range(len(requests))]

    async def _run(
        self,
        place: int,
        request: TokenizeRequest,
        consume: Consumer,
        streams: dict[int, Stream],
        has: Sequence[Position] | None,
    ) -> None:
        async def deliver(stream: Stream) -> None:
            streams[place] = stream
            while deltas := await stream.take():
                await consume(place, stream, deltas)
            if stream.latency is not None:
                stream.latency.close()

        await self.service.generate(request, deliver, has=has)

    # -- questions

    async def encode(
        self,
        request: Request,
        *,
        text: str | None = None,
        chat: list[ChatMessage] | None = None,
        options: ChatOptions | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text or a chat."""
        return await self.service.questions.encode(
            self.caller(request).tenant,
            text=text,
            chat=chat,
            options=options,
            add_special_tokens=add_special_tokens,
        )

    async def decode(self, request: Request, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        tenant = self.caller(request).tenant
        return await self.service.questions.decode(tenant, token_ids, skip_special_tokens=skip_special_tokens)

    async def written(self, token_ids: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        each = list(dict.fromkeys(token_ids))
        pieces = dict(zip(each, await self.service.questions.pieces(each, as_written=True), strict=True))
        return [pieces[token_id].decode() for token_id in token_ids]
