"""The one gate: every request from every entry point passes `check_request`, or is refused with field and limit."""

from __future__ import annotations

from services.scheduler.state.policy import Policy
from shared.errors import RejectCode, RequestError
from shared.messages import AddRequest
from shared.packing import are_below
from shared.requests.sampling import Limits, SamplingParams, check_sampling, check_token_ids

RETRY_AFTER_MS = 1000
MAX_LOGPROB_ENTRIES = 1 << 21  # of one request, over all its sequences and its prompt: some hundred megabytes


def check_request(message: AddRequest, prompt: list[int], limits: Limits, now: float) -> None:
    """Raise RequestError unless the request can be served as it stands."""
    if message.header.deadline is not None and message.header.deadline <= now:
        raise RequestError("the deadline had passed on arrival", code=RejectCode.DEADLINE_EXCEEDED)
    check_sampling(message.params, limits, len(prompt))
    check_logprobs(message.params, limits, len(prompt))
    if not are_below(message.prompt_token_ids, limits.vocab_size):
        check_token_ids("prompt", prompt, limits.vocab_size)
    check_token_ids("eos_token_ids", message.eos_token_ids, limits.vocab_size)
    if not -(2**31) <= message.header.priority < 2**31:
        raise RequestError(f"priority must be a 32-bit integer, got {message.header.priority}", field="priority")


def check_logprobs(params: SamplingParams, limits: Limits, num_prompt_tokens: int) -> None:
    """Raise RequestError where the log-probabilities, each count of which is allowed, are too many together."""
    num_tokens = min(params.max_tokens or limits.max_model_len, limits.max_model_len)
    asked = (
        ("logprobs", params.logprobs, params.n * num_tokens),
        ("prompt_logprobs", params.prompt_logprobs, num_prompt_tokens),
    )
    for field, count, num_positions in asked:
        if count is None:
            continue
        per_position = 1 + (limits.vocab_size if count == -1 else count)
        if per_position * num_positions > MAX_LOGPROB_ENTRIES:
            raise RequestError(
                f"{field} asks for {per_position} at each of {num_positions} positions, more than "
                f"{MAX_LOGPROB_ENTRIES} in all",
                field=field,
            )


def check_queue(num_queued: int, num_tokens: int, policy: Policy, *, is_background: bool) -> None:
    """Raise RequestError where the queues are full, with so many sequences of this kind, and their tokens."""
    setting = "max_num_queued_background_reqs" if is_background else "max_num_queued_reqs"
    if num_queued >= (most := getattr(policy, setting)):
        raise _overloaded(f"{num_queued} sequences are waiting, {setting}={most}")
    if num_tokens >= (most := policy.max_num_queued_tokens):
        raise _overloaded(f"{num_tokens} prompt tokens are waiting, max_num_queued_tokens={most}")


def _overloaded(message: str) -> RequestError:
    return RequestError(message, code=RejectCode.RESOURCE_EXHAUSTED, retry_after_ms=RETRY_AFTER_MS)
