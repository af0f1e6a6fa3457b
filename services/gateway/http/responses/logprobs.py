"""Log-probabilities of a response's text: which tokens the text that is new was made of.

A parser reads the text and may hold some of it back, and not every token shows: one that closes the reasoning does not.
So tokens wait here until text comes that begins with theirs.
"""

from __future__ import annotations

from services.gateway.http.answers.logprobs import Entry, TokenTexts, chat_logprobs, ids_of
from services.gateway.http.answers.objects import TokenLogprob
from services.gateway.http.requests.gate import Gate
from services.gateway.streams.stream import StreamDelta


class TextLogprobs:
    """Of one response."""

    def __init__(self, gate: Gate, top: int) -> None:
        """`top`: so many likeliest tokens at each position."""
        self._vocabulary = gate.vocabulary
        self._texts = TokenTexts(gate.vocabulary, as_ids=gate.names_ids(None))
        self._top = top
        self._waiting: list[tuple[int, Entry]] = []

    async def take(self, delta: StreamDelta) -> None:
        """Tokens whose text comes with this output, or later."""
        await self._vocabulary.learn(ids_of(delta.logprobs) | set(delta.token_ids))
        self._waiting += zip(delta.token_ids, delta.logprobs, strict=True)

    def of(self, text: str) -> list[TokenLogprob]:
        """Of the tokens that became `text`; those before them that show nothing are left out."""
        rest, token_ids, entries = text.encode(), [], []
        while rest and self._waiting:
            token_id, entry = self._waiting.pop(0)
            piece = self._vocabulary.piece(token_id)
            shown = next((one for one in (piece, piece.lstrip()) if one and rest.startswith(one)), None)
            if shown is None and not (piece and piece.startswith(rest)):  # a part of the last token may be held back
                continue
            rest = rest.removeprefix(shown) if shown else b""
            token_ids.append(token_id)
            entries.append(entry)
        return chat_logprobs(token_ids, entries, self._texts, top=self._top)
