"""The text of single tokens, as log-probabilities show them: learnt from the tokenizers, and kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

REPLACED = "bytes:"  # how OpenAI writes a token that is no whole character


class TokenNames:
    """What is known of the model's tokens; at most as many entries as the model has tokens."""

    def __init__(self, ask: Callable[[list[int]], Awaitable[list[bytes]]]) -> None:
        self._ask = ask
        self._pieces: dict[int, bytes] = {}

    async def learn(self, token_ids: Iterable[int]) -> None:
        """Know these from here on; raises RequestError where no tokenizer answers."""
        unknown = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._pieces]
        if unknown:
            self._pieces.update(zip(unknown, await self._ask(unknown), strict=True))

    def piece(self, token_id: int) -> bytes:
        """The token's bytes; it must have been learnt."""
        return self._pieces[token_id]

    def text(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return REPLACED + "".join(f"\\x{byte:02x}" for byte in piece)
