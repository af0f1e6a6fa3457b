"""What a request begins with.  Token ids are made when they are asked for: a trace's are too many to hold at once."""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_128

import msgspec

from shared.packing import pack_tokens, unpack_tokens

LARGE_VOCABULARY = 1 << 16
BYTE_VOCABULARY = 1 << 8
FIRST_TOKEN = 16  # below are, by custom, the special ones
ORDINARY_BYTES = bytes(FIRST_TOKEN + byte % (BYTE_VOCABULARY - FIRST_TOKEN) for byte in range(BYTE_VOCABULARY))


class TextPrompt(msgspec.Struct, frozen=True):
    """For a server that tokenizes."""

    text: str


class ChatPrompt(msgspec.Struct, frozen=True):
    """One user's turn, for a server with a chat template."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True):
    """Token ids as they are, packed int32."""

    packed: bytes

    def token_ids(self, vocab_size: int) -> bytes:
        return self.packed


class BlockPrompt(msgspec.Struct, frozen=True):
    """Contents that a trace knows by the names of its blocks only: equal names are equal tokens, others differ.

    Block b's tokens are a hash of its name, so two prompts share exactly the prefix that the traced ones shared.
    """

    num_tokens: int
    block_size: int  # tokens in each block
    block_names: list[int]
    salt: int = 0  # changes all names: the same trace again, for users that share nothing with the first

    def token_ids(self, vocab_size: int) -> bytes:
        """Packed int32, `num_tokens` of them, all in [0, vocab_size)."""
        parts = (block_tokens(name, self.salt, self.block_size, vocab_size) for name in self.block_names)
        return b"".join(parts)[: 4 * self.num_tokens]


Prompt = TextPrompt | ChatPrompt | TokenPrompt | BlockPrompt


@lru_cache(maxsize=1 << 14)
def block_tokens(name: int, salt: int, size: int, vocab_size: int) -> bytes:
    """`size` packed token ids that are a function of name and salt, none special where the vocabulary allows."""
    wide = bytearray(4 * size)
    if vocab_size == BYTE_VOCABULARY:
        wide[0::4] = shake_128(b"%d.%d" % (name, salt)).digest(size).translate(ORDINARY_BYTES)
        return bytes(wide)
    digest = shake_128(b"%d.%d" % (name, salt)).digest(2 * size)
    wide[0::4], wide[1::4] = digest[0::2], digest[1::2]
    if vocab_size >= LARGE_VOCABULARY:
        return bytes(wide)
    first = min(FIRST_TOKEN, vocab_size - 1)
    span = vocab_size - first
    return pack_tokens([first + value % span for value in unpack_tokens(bytes(wide))])
