"""Log-probabilities in OpenAI's two shapes and vLLM's one.  Texts of tokens come from the vocabulary, learnt before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gateway.http.answers.objects import (
    LegacyLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from services.gateway.http.requests.vocabulary import TokenNames
from services.gateway.streams.stream import StreamDelta
from shared.messages import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity

Entry = TokenLogprobs | None


def ids_of(entries: Iterable[Entry]) -> set[int]:
    """Every token that the entries name."""
    return {token_id for entry in entries if entry for token_id in entry.token_ids}


def ids_in(deltas: Iterable[StreamDelta], *, tells_output: bool) -> set[int]:
    """Every token that the log-probabilities of some output name.  `tells_output`: they tell of each token of it, also
    of those that have none, because another life of the scheduler computed them."""
    found: set[int] = set()
    for delta in deltas:
        found |= ids_of([*delta.logprobs, *delta.prompt_logprobs])
        if tells_output:
            found.update(delta.token_ids)
    return found


class TokenTexts:
    """How tokens are written in one answer: their text, or `token_id:7` where the client wants that."""

    def __init__(self, vocabulary: TokenNames, *, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids

    async def learn(self, token_ids: Iterable[int]) -> None:
        if not self._as_ids:
            await self._vocabulary.learn(token_ids)

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._vocabulary.text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        return None if self._as_ids else list(self._vocabulary.piece(token_id))


def legacy_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], texts: TokenTexts, *, top: int | None, offset: int
) -> LegacyLogprobs:
    """The columns of /v1/completions for `token_ids`, the first of which begins at character `offset`: before the text,
    where there are tokens that it does not show."""
    columns = LegacyLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        columns.tokens.append(texts.text(token_id))
        columns.text_offset.append(max(0, offset))
        offset += len(columns.tokens[-1])
        columns.token_logprobs.append(_finite(entry.logprobs[0]) if entry else None)
        if columns.top_logprobs is not None:
            columns.top_logprobs.append(_top_by_text(entry, texts, top) if entry else None)
    return columns


def _top_by_text(entry: TokenLogprobs, texts: TokenTexts, top: int | None) -> dict[str, float]:
    """The token itself first, as vLLM has it, then the likeliest `top`."""
    found = {texts.text(entry.token_ids[0]): _finite(entry.logprobs[0])}
    for token_id, logprob in _likeliest(entry, top):
        found.setdefault(texts.text(token_id), _finite(logprob))
    return found


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], texts: TokenTexts, *, top: int | None
) -> list[TokenLogprob]:
    """The entries of a chat's `logprobs.content`."""
    found = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likeliest = _likeliest(entry, top) if entry else []
        tops = [TopLogprob(texts.text(other), _finite(logprob), texts.bytes(other)) for other, logprob in likeliest]
        own = _finite(entry.logprobs[0]) if entry else LOWEST
        found.append(TokenLogprob(texts.text(token_id), own, texts.bytes(token_id), tops))
    return found


def prompt_logprobs(entries: Sequence[Entry], texts: TokenTexts) -> PromptLogprobs:
    """vLLM's shape: for each position of the prompt the candidates by id, none for the first."""
    return [_by_id(entry, texts) if entry else None for entry in entries]


def _by_id(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, PromptLogprob]:
    found: dict[str, PromptLogprob] = {}
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        rank = entry.rank if place == 0 else place
        found.setdefault(str(token_id), PromptLogprob(_finite(logprob), rank, texts.text(token_id)))
    return found


def _likeliest(entry: TokenLogprobs, top: int | None) -> list[tuple[int, float]]:
    """`top` of them, -1: all that there are; None: the tokens that the request named, behind the token itself."""
    pairs = list(zip(entry.token_ids, entry.logprobs, strict=True))
    if top is None:
        return list(dict(pairs).items())
    return pairs[1:] if top < 0 else pairs[1 : 1 + top]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
