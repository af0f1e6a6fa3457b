"""What the stand-in worker says, so that its listeners know beforehand what they must hear."""

from __future__ import annotations

from pathlib import Path

from shared.text.tokenization import ModelTokenizer, load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "models" / "pageant-stories"


def spoken_ids(tokenizer: ModelTokenizer) -> list[int]:
    """The ids that are ASCII text by themselves: a stream of them is the same however it is cut."""
    candidates = (token_id for token_id in range(tokenizer.vocab_size) if token_id not in tokenizer.special_ids)
    pieces = ((token_id, tokenizer.tokenizer.decode([token_id])) for token_id in candidates)
    return [token_id for token_id, piece in pieces if piece and piece.isascii()]


class Speech:
    """Token number `position` of a request is a function of its seed, and of nothing else."""

    def __init__(self, directory: Path = MODEL) -> None:
        self.tokenizer = load_tokenizer(directory)
        self._ids = spoken_ids(self.tokenizer)

    def token(self, seed: int, position: int) -> int:
        return self._ids[(seed * 7919 + position * 31) % len(self._ids)]

    def tokens(self, seed: int, count: int) -> list[int]:
        return [self.token(seed, position) for position in range(count)]
