"""Blocks of a pool that prompts can find, or can find no longer, with their tokens: for routers by prefix.

Blocks of salted prefixes are left out, so that no subscriber learns what a tenant asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

MAX_KNOWN = 8192  # blocks whose tokens are known before they are findable


@dataclass(slots=True)
class BlocksStored:
    """Blocks that follow each other."""

    names: list[bytes]
    parent: bytes | None  # the name of the block before the first
    token_ids: list[int]
    block_size: int
    adapter: str  # by its name; empty: none


@dataclass(slots=True)
class BlocksRemoved:
    names: list[bytes]


@dataclass(slots=True)
class PoolCleared:
    """Nothing is findable any more."""


PoolEvent = BlocksStored | BlocksRemoved | PoolCleared


@dataclass(slots=True)
class PoolEvents:
    """Of one worker's life.

    Invariant: of the names that were told, those are in `_told` that were not told to be removed since.
    """

    block_size: int
    knows: Callable[[bytes], bool]  # whether a block of this name can be found
    pending: list[PoolEvent] = field(default_factory=list)
    _told: set[bytes] = field(default_factory=set)
    _contents: OrderedDict[bytes, BlocksStored] = field(default_factory=OrderedDict)

    def learn(self, names: Sequence[bytes], places: range, token_ids: Sequence[int], adapter: str) -> None:
        """What blocks of a sequence hold, for when they are findable; those that are have not been told so far."""
        for place in places:
            name, start = names[place], place * self.block_size
            if name in self._told or name in self._contents:
                continue
            tokens = list(token_ids[start : start + self.block_size])
            stored = BlocksStored([name], names[place - 1] if place else None, tokens, self.block_size, adapter)
            if self.knows(name):
                self._tell(stored)
            else:
                self._contents[name] = stored
        while len(self._contents) > MAX_KNOWN:
            self._contents.popitem(last=False)

    def named(self, name: bytes) -> None:
        """A block is findable by this name from now on."""
        if (stored := self._contents.pop(name, None)) is not None:
            self._tell(stored)

    def forgotten(self, name: bytes) -> None:
        if name in self._told:
            self._told.discard(name)
            last = self.pending[-1] if self.pending else None
            if isinstance(last, BlocksRemoved):
                last.names.append(name)
            else:
                self.pending.append(BlocksRemoved([name]))

    def only(self, names: Collection[bytes]) -> None:
        """Of those that were told only these are findable."""
        for name in [name for name in self._told if name not in names]:
            self.forgotten(name)

    def _tell(self, stored: BlocksStored) -> None:
        self._told.update(stored.names)
        last = self.pending[-1] if self.pending else None
        follows = isinstance(last, BlocksStored) and last.names[-1] == stored.parent and last.adapter == stored.adapter
        if isinstance(last, BlocksStored) and follows:
            last.names += stored.names
            last.token_ids += stored.token_ids
        else:
            self.pending.append(stored)
