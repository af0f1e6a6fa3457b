"""Requests that an earlier scheduler had begun: each sequence continues after the tokens that its client has.

A token is a function of those before it, so what follows is what would have followed.  The detokenizer gets the
whole output from the start, as when a stream is opened again; the gateway drops what it has sent.
"""

from __future__ import annotations

from services.scheduler.lifecycle.stopping import finish_of
from services.scheduler.state.sequence import Request, Sequence, Status
from shared.errors import RequestError
from shared.messages import AddRequest
from shared.packing import unpack_tokens
from shared.requests.sampling import check_token_ids


def sent_tokens(message: AddRequest, vocab_size: int) -> list[list[int]]:
    """Per sequence, the output that its client has.  Raises RequestError where it cannot be of this request."""
    num_sequences = message.params.n
    if max(len(message.sent_token_ids), len(message.sent_finished)) > num_sequences:
        text = f"sent_token_ids or sent_finished has more than n={num_sequences} entries"
        raise RequestError(text, field="sent_token_ids")
    if sum(message.sent_finished) == num_sequences:
        raise RequestError("sent_finished ends all n sequences: nothing is left to generate", field="sent_finished")
    sent = [unpack_tokens(packed) for packed in message.sent_token_ids]
    for tokens in sent:
        check_token_ids("sent_token_ids", tokens, vocab_size)
    return sent + [[]] * (num_sequences - len(sent))


def resume(request: Request, sent: list[list[int]], finished: list[bool]) -> None:
    """Give each sequence of a new request its output so far; those that are through have nothing left to do."""
    for sequence, tokens in zip(request.sequences, sent, strict=True):
        if sequence.index < len(finished) and finished[sequence.index]:
            sequence.status = Status.FINISHED
        elif tokens:
            _go_on_behind(sequence, tokens)


def begin_again(request: Request) -> list[Sequence]:
    """Those of a request whose client has come back that had ended in an earlier life: nothing is known of them here,
    and the client may lack them.  They are generated again."""
    if request.search is not None:
        return []
    ended = [one for one in request.sequences if one.status is Status.FINISHED and one.num_cached_tokens < 0]
    again = [one for one in ended if not one.num_output_tokens]
    for sequence in again:
        sequence.status = Status.WAITING
    return again


def _go_on_behind(sequence: Sequence, tokens: list[int]) -> None:
    """What would end the sequence is left out: it is generated again, and then ends it."""
    request = sequence.request
    longest = request.max_length - request.num_prompt_tokens - 1
    tokens = tokens[: max(0, longest)]
    sequence.token_ids += tokens
    if tokens and finish_of(sequence):
        sequence.token_ids.pop()
    if request.params.logprobs is not None:
        sequence.logprobs += [None] * sequence.num_output_tokens
