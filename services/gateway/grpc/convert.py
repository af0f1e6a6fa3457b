"""Protocol buffers on the client's side, messages on ours: pure functions from one to the other."""

from __future__ import annotations

from typing import Any

import msgspec

from protos.pageant.v1 import control_pb2, inference_pb2
from services.gateway.generation.checks import named_tokens, packed_prompt
from services.gateway.generation.embedding import Embedded
from services.gateway.streams.stream import Position, StreamDelta
from shared.errors import RequestError
from shared.messages import (
    ChatMessage,
    FinishReason,
    Load,
    RequestHeader,
    Roster,
    TokenizeRequest,
    TokenLogprobs,
)
from shared.requests.beam import Beam, EarlyStopping
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.pooling import Pooling, PoolingKind
from shared.requests.sampling import SamplingParams
from shared.tracing.explanation import Explanation

FINISH_REASONS: dict[FinishReason, Any] = {
    reason: inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
EARLY_STOPPING = {inference_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{one.name}"): one for one in EarlyStopping}
POOLING = {inference_pb2.Pooling.Value(f"POOLING_{kind.name}"): kind for kind in PoolingKind}
GRAMMARS = {str(kind): kind for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.GRAMMAR)}

# Fields whose presence means "given"; anything else keeps the default of SamplingParams.
OPTIONAL = (
    "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_tokens", "max_tokens", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "seed", "n",
    "logprobs", "prompt_logprobs", "detokenize", "speculate",
)  # fmt: skip
REPEATED = ("bad_words", "stop", "stop_token_ids")


def sampling_from_proto(proto: Any) -> SamplingParams:
    """A `pageant.v1.SamplingParams` as ours; ranges are checked by the scheduler's admission, not here."""
    given: dict[str, Any] = {name: getattr(proto, name) for name in OPTIONAL if proto.HasField(name)}
    given |= {name: list(getattr(proto, name)) for name in REPEATED}
    if proto.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = list(proto.allowed_token_ids.ids)
    given["logit_bias"] = dict(proto.logit_bias)
    if named := named_tokens(proto.logprob_token_ids, has_logprobs=proto.HasField("logprobs")):
        given |= {"logprobs": len(named), "logprob_token_ids": named}
    if proto.HasField("beam_search"):
        given["beam"] = beam_from_proto(proto.beam_search)
    if proto.HasField("grammar"):
        given["grammar"] = grammar_from_proto(proto.grammar)
    given["bad_words_token_ids"] = [list(word.ids) for word in proto.bad_words_token_ids]
    return SamplingParams(**given)


def beam_from_proto(proto: Any) -> Beam:
    penalty = proto.length_penalty if proto.HasField("length_penalty") else 1.0
    if (early_stopping := EARLY_STOPPING.get(proto.early_stopping)) is None:
        raise RequestError(f"early_stopping is the unknown value {proto.early_stopping}", field="early_stopping")
    return Beam(proto.width, penalty, early_stopping)


def grammar_from_proto(proto: Any) -> Grammar:
    kind = proto.WhichOneof("kind")
    if kind == "choice":
        return Grammar(GrammarKind.CHOICE, msgspec.json.encode(list(proto.choice.texts)).decode())
    if kind == "json_object" and proto.json_object:
        return Grammar(GrammarKind.JSON_OBJECT)
    if kind not in GRAMMARS:
        raise RequestError("grammar must have a kind", field="grammar")
    return Grammar(GRAMMARS[kind], getattr(proto, kind))


def tokenize_request(proto: Any, header: RequestHeader, params: SamplingParams, max_tokens: int) -> TokenizeRequest:
    """The request to a tokenizer, from a `GenerateRequest` or an `EmbedInput`; `params` have a seed."""
    kind = proto.WhichOneof("input")
    if kind == "text":
        return TokenizeRequest(header, params, text=proto.text)
    if kind == "chat":
        return TokenizeRequest(header, params, chat=chat_messages(proto.chat))
    if kind == "token_ids":
        return TokenizeRequest(header, params, token_ids=packed_prompt(proto.token_ids.ids, max_tokens))
    raise no_input(proto)


def positions(proto: Any) -> list[Position] | None:
    """What a client that comes back has of each sequence; None where it asks for the first time."""
    if not proto.HasField("resume"):
        return None
    if not proto.idempotency_key:
        raise RequestError("resume needs the idempotency_key of the first call", field="idempotency_key")
    found = [Position(given.num_tokens, given.num_chars) for given in proto.resume.positions]
    if any(position.num_tokens < 0 or position.num_chars < 0 for position in found):
        raise RequestError("resume must not have negative positions", field="resume")
    if len(found) > max(1, proto.sampling.n):
        raise RequestError(f"resume has {len(found)} positions, more than n", field="resume")
    return found


def chat_messages(chat: Any) -> list[ChatMessage]:
    if not chat.messages:
        raise RequestError("chat must contain at least one message", field="chat")
    return [ChatMessage(message.role, message.content) for message in chat.messages]


def no_input(proto: Any) -> RequestError:
    kinds = ", ".join(field.name for field in proto.DESCRIPTOR.oneofs_by_name["input"].fields)
    return RequestError(f"input must be given, one of: {kinds}", field="input")


def generate_response(request_id: str, delta: StreamDelta, *, with_token_ids: bool, fingerprint: str = "") -> Any:
    """One message of the stream."""
    response = inference_pb2.GenerateResponse()  # set one by one: the constructor takes a third more time
    response.request_id, response.index, response.text = request_id, delta.index, "".join(delta.text)
    response.system_fingerprint = fingerprint
    if with_token_ids:
        response.token_ids.extend(delta.token_ids)
    if delta.logprobs or delta.prompt_logprobs:
        response.logprobs.extend(map(logprobs_to_proto, delta.logprobs))
        response.prompt_logprobs.extend(map(logprobs_to_proto, delta.prompt_logprobs))
    if (end := delta.end) is not None and end.finish_reason is not None:
        response.finish_reason = FINISH_REASONS[end.finish_reason]
        response.stop_reason = end.stop_reason
        response.usage.prompt_tokens = end.num_prompt_tokens
        response.usage.completion_tokens = end.num_output_tokens
        response.usage.cached_tokens = end.num_cached_tokens
        response.usage.num_draft_tokens = end.num_draft_tokens
        response.usage.num_accepted_tokens = end.num_accepted_tokens
    return response


def pooling_from_proto(proto: Any) -> Pooling:
    kind = POOLING.get(proto.pooling)
    if kind is None:
        raise RequestError(f"pooling is the unknown value {proto.pooling}", field="pooling")
    return Pooling(kind, proto.normalize if proto.HasField("normalize") else True)


def embed_response(embedded: list[Embedded]) -> Any:
    response = inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=one.values()) for one in embedded]
    )
    response.usage.prompt_tokens = sum(one.num_tokens for one in embedded)
    response.usage.cached_tokens = sum(one.num_cached_tokens for one in embedded)
    return response


def explanation_to_proto(explanation: Explanation) -> Any:
    proto = inference_pb2.Explanation(
        cause=explanation.cause,
        num_ahead=explanation.num_ahead,
        num_chunks=explanation.num_chunks,
        num_preemptions=explanation.num_preemptions,
    )
    for phase, ms in explanation.phases.items():
        proto.phases.add(phase=phase, ms=ms)
    for reason, num_tokens in explanation.misses.items():
        proto.misses.add(reason=reason, tokens=num_tokens)
    if explanation.evicted_ago_ms is not msgspec.UNSET:
        proto.evicted_ago_ms = explanation.evicted_ago_ms
    return proto


def logprobs_to_proto(entry: TokenLogprobs | None) -> Any:
    """The token itself comes first in ours and apart in theirs."""
    proto = inference_pb2.TokenLogprobs()
    if entry is None or not entry.token_ids:
        return proto
    candidates = [
        inference_pb2.Candidate(token_id=token_id, logprob=logprob)
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
    ]
    proto.token.CopyFrom(candidates[0])
    proto.rank = entry.rank
    proto.top.extend(candidates[1:])
    return proto


def load_response(load: Load, num_open_streams: int) -> Any:
    """A scheduler's `Load` for the client."""
    return control_pb2.GetLoadResponse(
        workers=[
            control_pb2.WorkerLoad(**{name: getattr(worker, name) for name in WORKER_LOAD}) for worker in load.workers
        ],
        num_open_streams=num_open_streams,
        **{name: getattr(load, name) for name in LOAD},
    )


WORKER_LOAD = ("instance", "num_running", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_steps")
LOAD = (
    "num_running", "num_waiting", "kv_cache_usage", "num_preemptions", "num_prefix_cache_queries",
    "num_prefix_cache_hits", "num_chunked_prefills", "num_prompt_tokens", "num_output_tokens", "num_finished",
    "num_aborted", "num_rejected", "num_block_copies", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "num_stale_draft_tokens", "num_late_drafts", "num_accepted_tokens_per_position",
)  # fmt: skip


def model_proto(name: str, roster: Roster, parent: str = "") -> Any:
    """What is served; lengths are zero while no worker has said what it can hold."""
    model = inference_pb2.Model(name=name, max_model_len=roster.max_model_len, max_input_length=roster.max_input_length)
    model.parent = parent
    if roster.model is not None:
        model.vocab_size = roster.model.vocab_size
        model.dtype = roster.model.dtype
        model.device = roster.model.device
    model.system_fingerprint = ",".join(sorted(one.name for one in roster.fingerprints))
    return model
