"""Accepts requests: checks them against the limits of the workers, and makes them, with what their clients have."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.scheduler.lifecycle.admission import RETRY_AFTER_MS, check_queue, check_request
from services.scheduler.lifecycle.beams import rest
from services.scheduler.lifecycle.resumption import resume, sent_tokens
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import BEHIND_ALL, Request, Sequence
from shared.errors import RejectCode, RequestError
from shared.messages import AddRequest, WorkerCapacity
from shared.packing import unpack_tokens
from shared.requests.sampling import Limits

Queued = tuple[int, int]  # sequences, and their tokens


class RequestIntake:
    """The limits of a deployment, which follow its workers, and the requests that are within them."""

    def __init__(self, policy: Policy, replicas: Mapping[str, Replica]) -> None:
        self.capacity: WorkerCapacity | None = None  # of the smallest worker; None without workers
        self.max_model_len = 0  # tokens; 0 while no worker is known
        self._policy = policy
        self._replicas = replicas
        self._num_arrivals = 0

    def limit(self) -> None:
        """Follow the workers: every accepted request must fit the smallest of them."""
        capacities = [replica.capacity for replica in self._replicas.values()]
        self.capacity = min(capacities, key=lambda c: c.num_blocks * c.block_size, default=None)
        longest = min((c.max_model_len for c in capacities), default=0)
        self.max_model_len = min(self._policy.max_model_len or longest, longest)

    @property
    def max_input_length(self) -> int:
        """The longest prompt, in tokens; 0 while no worker is known."""
        longest = max(0, self.max_model_len - 1)
        if not self._policy.enable_chunked_prefill:
            longest = min(longest, self._policy.max_num_batched_tokens)
        return min(self._policy.max_input_length or longest, longest)

    def accept(self, message: AddRequest, *, has_detokenizers: bool, queued: Queued, now: float) -> Request:
        """`queued`: what waits of its kind, in the background or not.

        Raises RequestError where it cannot be served as it stands, or not now.
        """
        if self.capacity is None:
            raise _not_ready("worker")
        if not has_detokenizers:
            raise _not_ready("detokenizer")
        if message.header.adapter is not None and not any(r.capacity.max_loras for r in self._replicas.values()):
            raise RequestError("max_loras is 0: no adapters are served", field="model", code=RejectCode.NOT_FOUND)
        prompt = unpack_tokens(message.prompt_token_ids)
        check_request(message, prompt, self._limits(self.capacity), now)
        if not message.is_resumed:  # then it had passed here before
            check_queue(*queued, self._policy, is_background=message.header.is_background)
        return self._make(message, prompt, sent_tokens(message, self.capacity.vocab_size), now)

    def _limits(self, capacity: WorkerCapacity) -> Limits:
        return Limits(
            vocab_size=capacity.vocab_size,
            max_model_len=self.max_model_len,
            max_input_length=self.max_input_length,
            max_logprobs=self._policy.max_logprobs,
            max_n=self._policy.max_n,
            max_num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            classifies=bool(capacity.labels),
        )

    def _make(self, message: AddRequest, prompt: list[int], sent: list[list[int]], now: float) -> Request:
        self._num_arrivals += 1
        header, params = message.header, message.params
        if sent[0]:  # the prompt's went out with the first token
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        request = Request(
            header, params, prompt, list(message.eos_token_ids), self._num_arrivals,
            packed_prompt=message.prompt_token_ids, max_model_len=self.max_model_len, fingerprint=message.fingerprint,
        )  # fmt: skip
        by_priority = self._policy.scheduling_policy == "priority"
        aged = header.priority + now / self._policy.priority_ageing if by_priority else 0.0
        aged += BEHIND_ALL * request.is_background
        for index in range(request.num_sequences):
            request.sequences.append(Sequence(request, index, (aged, request.arrival, index), list(prompt)))
        if request.search is None:
            resume(request, sent, message.sent_finished)
        else:
            rest(request.sequences[1:])
        return request


def _not_ready(service: str) -> RequestError:
    return RequestError(f"no {service} is ready", code=RejectCode.UNAVAILABLE, retry_after_ms=RETRY_AFTER_MS)
