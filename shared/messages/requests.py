"""Requests on their way in: gateway -> tokenizer -> scheduler."""

from __future__ import annotations

from shared.errors import RejectCode
from shared.messages.adapters import Adapter
from shared.messages.base import Message
from shared.messages.latency import LatencyBreakdown
from shared.requests.sampling import SamplingParams


class ToolCall(Message, frozen=True):
    """A function that an assistant has called; `arguments` is JSON as it was written, well formed or not."""

    id: str
    name: str
    arguments: str


class ChatMessage(Message, frozen=True):
    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""  # of a tool's message: the call that it answers
    tool_calls: list[ToolCall] = []
    reasoning: str = ""


class ChatOptions(Message, frozen=True):
    """What a chat is rendered with beside its messages; JSON stays text until the template needs it."""

    tools: str = ""  # a JSON array of function definitions; empty: none
    template_args: str = ""  # a JSON object of further variables of the template
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the last message is not closed: generation goes on within it
    opening: str = ""  # how the assistant's message begins: text that follows what the template wrote


class RequestHeader(Message, frozen=True):
    """What travels with a request through every service; made by the gateway."""

    request_id: str  # made by the server, unique; the client's own id is `label`
    gateway: str  # address of the gateway's inbox
    trace_id: str = ""  # 32 hex digits, W3C trace context
    label: str = ""
    tenant: str = ""
    priority: int = 0  # smaller runs earlier
    arrival_time: float = 0.0  # Unix seconds at the gateway
    deadline: float | None = None  # seconds of the steady clock of the process that has it (shared/clocks/deadlines.py)
    cache_salt: str = ""  # derived from the tenant by the server, never by the client
    is_kept: bool = False  # its id is made from an idempotency key: its client may ask for it again
    parent_span_id: str = ""  # 16 hex digits: the caller's span, by W3C trace context
    sent_time: float = 0.0  # Unix seconds at the client, where it said so and that can be; nothing is decided by it
    time_left: float | None = None  # seconds until the deadline, when this was sent
    is_background: bool = False  # computed only where no other request is there
    adapter: Adapter | None = None  # None: the base model
    retention: float = 0.0  # seconds for which its cached blocks are kept before others, within its tenant's share
    is_gathered: bool = False  # its client reads the output at its end: tokens are sent on in groups


class TokenizeRequest(Message, frozen=True):
    """Generate from exactly one of `text`, `chat` and `token_ids` (packed int32)."""

    header: RequestHeader
    params: SamplingParams
    text: str | None = None
    chat: list[ChatMessage] | None = None
    token_ids: bytes | None = None
    sent_token_ids: list[bytes] = []  # on resume: per sequence, tokens the client has already
    sent_text_lengths: list[int] = []  # on resume: per sequence, characters the client has already
    chat_options: ChatOptions | None = None
    is_resumed: bool = False  # a scheduler had taken it already
    sent_finished: list[
        bool
    ] = []  # on resume: per sequence, whether it has come to its end: nothing more is made of it
    latency: LatencyBreakdown | None = None  # None: its time is not tracked
    fingerprint: str = ""  # on resume: name of that of the worker that began it


class EncodeRequest(Message, frozen=True):
    """Only tokenize (the Tokenize RPC)."""

    request_id: str
    gateway: str
    text: str | None = None
    chat: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    chat_options: ChatOptions | None = None
    tenant: str = ""


class DecodeRequest(Message, frozen=True):
    """Only detokenize (the Detokenize RPC)."""

    request_id: str
    gateway: str
    token_ids: bytes
    skip_special_tokens: bool = True
    tenant: str = ""


class PiecesRequest(Message, frozen=True):
    """Asks for the bytes of each token by itself.  Answered by PiecesResult."""

    request_id: str
    gateway: str
    token_ids: bytes
    as_written: bool = False  # the tokens as the vocabulary writes them, in place of the bytes that they stand for


class PiecesResult(Message, frozen=True):
    request_id: str
    pieces: list[bytes]  # parallel to the ids asked for; not always whole characters


class DescribeRequest(Message, frozen=True):
    """Asks what tokenizer and chat template the model has.  Answered by DescribeResult."""

    request_id: str
    gateway: str
    texts: list[str] = []  # whose token ids are asked for too, special tokens by their names


class DescribeResult(Message, frozen=True):
    request_id: str
    config: str  # tokenizer_config.json as JSON text, with `chat_template` as it is used
    token_ids: list[list[int]] = []  # of the texts that were asked for


class EncodeResult(Message, frozen=True):
    request_id: str
    token_ids: bytes


class DecodeResult(Message, frozen=True):
    request_id: str
    text: str


class AddRequest(Message, frozen=True):
    """A tokenized request; `params` are resolved (no None but seed, logprobs, allowed tokens)."""

    header: RequestHeader
    params: SamplingParams
    prompt_token_ids: bytes
    eos_token_ids: list[int] = []
    sent_token_ids: list[bytes] = []
    sent_text_lengths: list[int] = []
    tokenized_time: float = 0.0
    is_resumed: bool = False
    sent_finished: list[bool] = []
    latency: LatencyBreakdown | None = None
    fingerprint: str = ""  # on resume: name of that of the worker that began it


HAS_EVERYTHING = "finished"


class AbortRequest(Message, frozen=True):
    """Forget a request, known or not; along the same FIFO path as its request, so it cannot overtake it.

    A gateway sends it for every accepted request: with the reason HAS_EVERYTHING where its client has all output.
    """

    request_id: str
    reason: str = "cancelled"
    gateway: str = ""  # the sender; an abort from a gateway that no longer has the request is ignored


class AttachRequest(Message, frozen=True):
    """Gateway -> scheduler: the client of a kept request asks for it again, here.  All of its output is sent again.

    Answered by RequestRejected (NOT_FOUND) where the scheduler no longer has the request.
    """

    request_id: str
    gateway: str
    deadline: float | None = None  # of the new call
    latency: LatencyBreakdown | None = None
    time_left: float | None = None  # seconds until that, when this was sent


class RequestRejected(Message, frozen=True):
    """A request ended by an error, from any service to its gateway."""

    request_id: str
    code: RejectCode
    message: str
    field: str = ""
    retry_after_ms: int = 0
    reason: str = ""
