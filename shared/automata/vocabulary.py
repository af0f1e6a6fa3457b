"""A checkpoint's vocabulary as the engine walks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.automata.limits import GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_TOKENS = 1 << 22


class Vocabulary:
    """`size` covers every id that the model can produce; ids that its tokenizer lacks are never allowed.

    `engine` is immutable, and any number of automata share it.
    """

    def __init__(self, engine: LLTokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        self.engine = engine
        self.size = size
        self.eos_token_ids = tuple(eos_token_ids)


def load_vocabulary(model_dir: Path, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Takes about 10 us and 2 KB per token.  Raises GrammarError where the tokenizer is not one that can be walked."""
    if not eos_token_ids:
        raise GrammarError("is not possible: the model has no end-of-sequence token")
    from llguidance import LLTokenizer

    try:
        text = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        engine = LLTokenizer(text, n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:  # whatever the engine's reader of tokenizers raises
        raise GrammarError(f"is not possible with the model's tokenizer: {error}") from error
    return Vocabulary(engine, size, eos_token_ids)
