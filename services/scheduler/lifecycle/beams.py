"""The sequences of a beam search: `width` of them in slots, of which those that are followed are unfinished.

After each step they fork and are dropped.  What stays where it was keeps its row and its blocks; what begins behind
another shares its full blocks, and the one to be written in is copied when the next step is planned (`Batcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.scheduler.state.beam_search import BeamOutput, BeamSearch, LengthBounds, Move
from services.scheduler.state.sequence import Request, Sequence, Status
from shared.messages import FinishReason, TokenLogprobs


def rest(sequences: Iterable[Sequence]) -> None:
    """Nothing is followed in these slots."""
    for sequence in sequences:
        sequence.status = Status.FINISHED


def is_usable(known: TokenLogprobs, search: BeamSearch, vocab_size: int) -> bool:
    """Whether a worker has sent the candidates that a search needs at one position."""
    if len(known.token_ids) != len(known.logprobs):
        return False
    if len(known.token_ids) < 1 + min(search.num_candidates, vocab_size):
        return False
    return min(known.token_ids) >= 0 and max(known.token_ids) < vocab_size


def next_moves(request: Request, search: BeamSearch) -> list[Move]:
    """The beams of the next step; none where the search is over."""
    prompt = request.num_prompt_tokens
    followed = {slot: request.sequences[slot] for slot in search.scores}
    outputs = {slot: BeamOutput(one.token_ids[prompt:], one.logprobs) for slot, one in followed.items()}
    return search.advance(outputs, LengthBounds(request.params.min_tokens, request.max_length - prompt))


def regroup(request: Request, moves: list[Move], leave: Callable[[Sequence], None]) -> list[tuple[Sequence, Sequence]]:
    """Make the sequences what the moves say; returns those that begin anew, each with the one behind which it does.

    `leave` takes a sequence that is followed no more from its queue or its rows.
    """
    sequences = request.sequences
    kept = {move.slot for move in moves if move.slot == move.source}
    for slot, sequence in enumerate(sequences):
        if slot not in kept and sequence.status is not Status.FINISHED:
            leave(sequence)
    begun = []
    for move in moves:
        if move.slot != move.source:
            _begin(sequences[move.slot], sequences[move.source], move)
            begun.append((sequences[move.slot], sequences[move.source]))
    for move in moves:
        if move.slot == move.source:
            _extend(sequences[move.slot], move)
    return begun


def _begin(sequence: Sequence, source: Sequence, move: Move) -> None:
    sequence.token_ids = list(source.token_ids)
    sequence.logprobs = list(source.logprobs)
    sequence.hashes_by_size = {size: list(hashes) for size, hashes in source.hashes_by_size.items()}
    sequence.num_cached_tokens = source.num_cached_tokens
    sequence.num_computed_tokens = 0
    sequence.status = Status.WAITING
    _extend(sequence, move)


def _extend(sequence: Sequence, move: Move) -> None:
    sequence.token_ids.append(move.token_id)
    if move.logprobs is not None:
        sequence.logprobs.append(move.logprobs)


def conclude(request: Request, search: BeamSearch) -> None:
    """The best are the request's sequences, now that nothing is followed any more."""
    del request.sequences[request.params.n :]
    for sequence, best in zip(request.sequences, search.hypotheses, strict=False):
        sequence.token_ids = [*request.prompt_token_ids, *best.token_ids]
        sequence.logprobs = list(best.logprobs)
        sequence.num_cached_tokens = request.sequences[0].num_cached_tokens
        sequence.finish_reason = FinishReason.LENGTH if best.end_id is None else FinishReason.STOP
        sequence.stop_token_id = best.end_id
