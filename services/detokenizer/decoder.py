"""Incremental decoding: token ids in, text out, one token at a time, never half a character.

A stream's text is what decoding prompt and output together adds to decoding the prompt.  Where a run of byte tokens is
no UTF-8, tokenizers differ from themselves: decoding the whole run at once gives up the complete characters in it too.
A stream has shown those already, and keeps them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from shared.text.pieces import Pieces, make_pieces
from shared.text.tokenization import ModelTokenizer

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16  # no character spans more tokens: what is still broken then stays so


class TextDecoder(Protocol):
    """Decodes one stream."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""

    def finish(self) -> str:
        """What is held back, as replacement characters, when no more tokens will come."""


class DecoderFactory:
    """Makes one decoder per stream, in the way that suits the tokenizer."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = make_pieces(tokenizer)

    def make(self, prompt_tail: Sequence[int], *, whole_prompt: bool, skip_special_tokens: bool) -> TextDecoder:
        """A decoder for what follows `prompt_tail`, the end of the prompt or (`whole_prompt`) all of it."""
        if self._pieces is None:
            return WindowDecoder(self._tokenizer, prompt_tail, skip_special_tokens)
        return PieceDecoder(self._pieces, prompt_tail, whole_prompt, skip_special_tokens)


class PieceDecoder:
    """Joins the pieces of tokens through an incremental UTF-8 decoder: constant work per token.

    Between characters, which is almost always, a token whose text is whole is looked up in a table.
    """

    def __init__(
        self, pieces: Pieces, prompt_tail: Sequence[int], whole_prompt: bool, skip_special_tokens: bool
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if pieces.merges_invalid else EACH_BYTE)
        self._num_to_strip = pieces.num_stripped_spaces if whole_prompt else 0
        self._num_owned_by_prompt = 0
        self._texts = pieces.texts(skip_special_tokens=skip_special_tokens)
        self._is_between = False  # no half character is held, and nothing is left to trim
        for token_id in prompt_tail:
            self.push(token_id)
        pending = len(self._utf8.getstate()[0])
        # Half a character at the prompt's end: should it stay broken, its replacement belongs to the prompt.
        self._num_owned_by_prompt = min(1, pending) if pieces.merges_invalid else pending

    def push(self, token_id: int) -> str:
        if self._is_between:
            text = self._texts.get(token_id)
            if text is not None:
                return text
            self._pieces.note(token_id, skip_special_tokens=self._skip)
        text = self._join(token_id)
        self._look()
        return text

    def _look(self) -> None:
        trims = self._num_to_strip or self._num_owned_by_prompt
        self._is_between = not trims and not self._utf8.getstate()[0]

    def _join(self, token_id: int) -> str:
        piece = self._pieces.get(token_id, skip_special_tokens=self._skip)
        if not piece:
            return ""
        if isinstance(piece, bytes):
            text = self._utf8.decode(piece)
        else:
            text = self._utf8.decode(b"", True) + piece
        return self._trimmed(text) if self._num_to_strip or self._num_owned_by_prompt else text

    def finish(self) -> str:
        return self._trimmed(self._utf8.decode(b"", True))

    def _trimmed(self, text: str) -> str:
        if not text:
            return text
        if self._num_owned_by_prompt:
            cut = _leading(text, REPLACEMENT, self._num_owned_by_prompt)
            self._num_owned_by_prompt = 0
            return text[cut:]
        cut = _leading(text, " ", self._num_to_strip)
        self._num_to_strip = self._num_to_strip - cut if cut == len(text) else 0
        return text[cut:]


class WindowDecoder:
    """For decoders that look at neighbours: decodes a short window of tokens with and without the new one."""

    def __init__(self, tokenizer: ModelTokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail)
        self._num_shown = len(self._ids)  # tokens of the window whose text is out
        self._shown = self._decode()

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_shown < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new or len(self._ids) - self._num_shown >= MAX_HELD_TOKENS:
            # What was shown last is context enough for what comes next; older tokens are not needed any more.
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


def _leading(text: str, character: str, limit: int) -> int:
    """How many times `text` begins with `character`, at most `limit`."""
    return min(limit, len(text) - len(text.lstrip(character)))


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


EACH_BYTE = "pageant.replace_each_byte"
codecs.register_error(EACH_BYTE, _replace_each_byte)
