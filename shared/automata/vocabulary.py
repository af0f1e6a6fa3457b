"""A checkpoint's vocabulary as the engine walks it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared.automata.limits import GrammarError
from shared.text.pieces import TokenPieces, make_pieces
from shared.text.tokenization import ModelTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_TOKENS = 1 << 22
TAG = re.compile(r"<.*>", re.DOTALL)  # what the engine takes for a special token


class NamedToken(msgspec.Struct, frozen=True):
    content: str
    special: bool = False


class TokenizerFile(msgspec.Struct, frozen=True):
    """The part of a tokenizer.json that decides how the engine may read it."""

    added_tokens: list[NamedToken] = []


class Vocabulary:
    """`size` covers every id that the model can produce; ids that its tokenizer lacks are never allowed.

    `engine` is immutable, and any number of automata share it.
    """

    def __init__(self, engine: LLTokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        self.engine = engine
        self.size = size
        self.eos_token_ids = tuple(eos_token_ids)


class PlainTokens:
    """A tokenizer as the engine asks one: its tokens' bytes, which of them are special, and how a text is written.

    Read by itself, the engine takes every added token in angle brackets for special, `</tool_call>` too.  It would then
    demand that token where a grammar has its text, and refuse it when it comes.  Here only those are special that the
    checkpoint calls so, and a text is never written with them.
    """

    def __init__(self, tokenizer: ModelTokenizer, eos_token_ids: Sequence[int], size: int) -> None:
        pieces = TokenPieces(tokenizer)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.special_ids | set(eos_token_ids))
        self.tokens = [pieces.of(token_id) for token_id in range(size)]
        self._tokenizer = tokenizer.tokenizer
        self._tokenizer.encode_special_tokens = True  # as any text

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        return ids


def load_vocabulary(
    model_dir: Path, size: int, eos_token_ids: Sequence[int], tokenizer: ModelTokenizer | None = None
) -> Vocabulary:
    """Takes about 5 us and 2 KB per token.  `tokenizer`: the directory's, where it was read already and is not used for
    anything else.  Raises GrammarError where it is not one that can be walked."""
    if not eos_token_ids:
        raise GrammarError("is not possible: the model has no end-of-sequence token")
    from llguidance import LLTokenizer, TokenizerWrapper

    try:
        text = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        plain = _with_plain_tags(text, size, tokenizer)
        read = text if plain is None else TokenizerWrapper(PlainTokens(plain, eos_token_ids, size))
        engine = LLTokenizer(read, n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:  # whatever the engine's reader of tokenizers raises
        raise GrammarError(f"is not possible with the model's tokenizer: {error}") from error
    return Vocabulary(engine, size, eos_token_ids)


def _with_plain_tags(text: str, size: int, tokenizer: ModelTokenizer | None) -> ModelTokenizer | None:
    """The tokenizer, if it has added tokens that the engine would take for special although they are none."""
    added = msgspec.json.decode(text, type=TokenizerFile).added_tokens
    if not any(TAG.fullmatch(token.content) and not token.special for token in added):
        return None
    if tokenizer is None:
        from tokenizers import Tokenizer

        tokenizer = ModelTokenizer(Tokenizer.from_str(text), vocab_size=size)
    return tokenizer if make_pieces(tokenizer) is not None else None
