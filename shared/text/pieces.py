"""What each token adds to a text by itself, for the tokenizers where that is well defined: all common ones.

Byte-level BPE writes bytes as printable characters; SentencePiece-style tokenizers write text with a mark for spaces,
and bytes as <0xNN> where a character is not in the vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

from shared.text.tokenization import ModelTokenizer

Piece = str | bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """The piece of every token id: bytes to be joined with their neighbours, or text that is whole.

    `num_stripped_spaces` is how many leading spaces the decoder takes from the start of a whole text.
    `merges_invalid`: whether a broken character becomes one replacement or one for each of its bytes.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        replacements: list[tuple[str, str]] | None,
        *,
        byte_tokens: bool = False,
        num_stripped_spaces: int = 0,
    ) -> None:
        self.num_stripped_spaces = num_stripped_spaces
        self.merges_invalid = replacements is None
        self._token = tokenizer.tokenizer.id_to_token
        self._replacements = replacements
        self._byte_tokens = byte_tokens
        self._special = tokenizer.special_ids
        self._known: dict[int, Piece] = {}
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def texts(self, *, skip_special_tokens: bool) -> dict[int, str]:
        """The table of tokens whose text is whole whatever comes before or after; filled by `note`."""
        return self._texts[skip_special_tokens]

    def note(self, token_id: int, *, skip_special_tokens: bool) -> None:
        """Put a token into the table, if its text is whole: one that is skipped is, half a character is not."""
        piece = self.get(token_id, skip_special_tokens=skip_special_tokens)
        try:
            text = piece.decode() if isinstance(piece, bytes) else piece
        except UnicodeDecodeError:
            return
        self._texts[skip_special_tokens][token_id] = text

    def get(self, token_id: int, *, skip_special_tokens: bool) -> Piece:
        """The piece of a token; empty for one that is skipped or that the tokenizer does not have."""
        if skip_special_tokens and token_id in self._special:
            return ""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> Piece:
        token: str | None = self._token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return ""
        if self._replacements is None:
            return _byte_level(token)
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else token


class TokenPieces:
    """The bytes of any one token, by itself; special tokens have their names."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = make_pieces(tokenizer)

    def of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have."""
        if self._pieces is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        piece = self._pieces.get(token_id, skip_special_tokens=False)
        return piece if isinstance(piece, bytes) else piece.encode()

    def written(self, token_id: int) -> bytes:
        """As the vocabulary has it, with its marks for spaces and bytes; empty for an id that it does not have."""
        token: str | None = self._tokenizer.tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return (token or "").encode()


def make_pieces(tokenizer: ModelTokenizer) -> Pieces | None:
    """The pieces of a tokenizer, or None where its decoder looks at more than one token at a time."""
    steps = _steps(tokenizer.spec.decoder)
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return Pieces(tokenizer, None)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteFallback", "Fuse"]:
        return Pieces(tokenizer, replacements, byte_tokens=True)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["content"] == " " and not steps[2]["stop"]:
        return Pieces(tokenizer, replacements, byte_tokens=True, num_stripped_spaces=steps[2]["start"])
    return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _byte_level(token: str) -> bytes:
    """Back from byte-level BPE's printable characters; a token written in others stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
