"""The tokens of blocks that can be found: where a prompt leaves the last full block that it shares with another, the
block behind it may begin with the same tokens.

What a token's keys and values are depends on no token behind it, so the first slots of a block serve every sequence
that begins alike up to them.  SGLang's radix tree finds as much (Zheng et al., 2024); here blocks keep their names, and
beside each name stand the blocks that follow it, in the order of their tokens.  The longest match is a neighbour of the
place where the wanted tokens would stand.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

TOKEN_BYTES = 4


@dataclass(slots=True)
class BlockContents:
    """Of the blocks of one pool, by name.  A tail is a block that was not filled to its end.

    Invariant: `_followers` of a name holds, sorted, the packed tokens of exactly those blocks whose parent it is in
    `_known`, and is never empty.
    """

    block_size: int
    _known: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)  # name -> parent's name, packed tokens
    _followers: dict[bytes, list[bytes]] = field(default_factory=dict)  # name -> packed tokens of those behind it
    _names: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)  # parent's name and packed tokens -> name

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, name: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """A block can be found from now on; `parent`: the name of the block before it, or the root."""
        if name not in self._known:
            packed = pack(token_ids)
            self._known[name] = parent, packed
            self._names[parent, packed] = name
            insort(self._followers.setdefault(parent, []), packed)

    def is_tail(self, name: bytes) -> bool:
        known = self._known.get(name)
        return known is not None and len(known[1]) < TOKEN_BYTES * self.block_size

    def forget(self, name: bytes) -> None:
        """It cannot be found any more."""
        if (known := self._known.pop(name, None)) is None:
            return
        parent, packed = known
        del self._names[known]
        followers = self._followers[parent]
        del followers[bisect_left(followers, packed)]
        if not followers:
            del self._followers[parent]

    def longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[bytes, int]:
        """The name of the block behind `parent` that begins with the most of these tokens, and how many they are; 0:
        none does."""
        followers, wanted = self._followers.get(parent), pack(token_ids)
        if not followers:
            return b"", 0
        place = bisect_left(followers, wanted)
        beside = followers[max(0, place - 1) : place + 1]
        best = max(beside, key=lambda packed: num_alike(packed, wanted))
        return self._names[parent, best], num_alike(best, wanted)


def pack(token_ids: Sequence[int]) -> bytes:
    """In an order of bytes that is the order of the tokens."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def num_alike(one: bytes, other: bytes) -> int:
    """Tokens at the beginning that both packed lists have."""
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
