"""Blocks that move between a worker and a store, or another worker: orders of the scheduler, and what came of them.

The bytes of blocks never pass the bus: a worker reads and writes them over the data link of the store, or of the other
worker (`shared.data_link`).  Names are those of the prefix cache, `services.scheduler.blocks.prefix_cache`.
"""

from __future__ import annotations

from shared.messages.base import Message


class StoreCapacity(Message, frozen=True):
    """What a store offers, with its hello; and a worker that serves its blocks to others."""

    data_address: str  # of its data link
    secret: bytes  # that a worker shows there; it passes the bus only
    max_bytes: int  # 0: of a worker, which keeps none for others
    can_look_up: bool = False  # whether it may have more than it tells: it has a backend


class OfferBlocks(Message, frozen=True):
    """Scheduler -> worker, in order with the plans: give these blocks to a store.  Answered by BlocksMoved.

    The blocks are read when the plans before this have run, and before any later plan: so the scheduler holds none.
    Where a plan before it has not come, an order is not carried out.
    """

    epoch: int
    move_id: int  # grows with every order of a link
    next_step_id: int  # of the plans, those before it were sent before this
    store: str  # its instance
    names: list[bytes]
    blocks: list[int]  # parallel to names
    generations: list[int]  # parallel: in which of its lives each block has these contents
    address: str = ""  # of the store's data link
    secret: bytes = b""
    is_check: bool = False  # give nothing: compare these blocks, which were computed here, with what the store has


class DropBlocks(Message, frozen=True):
    """Scheduler -> store: forget all blocks, some of which are not what their names say."""

    store: str  # its instance


class LookUpBlocks(Message, frozen=True):
    """Scheduler -> store: find out which of these there are, also in its backend.  Answered by StoreContents, which has
    each key as kept or as dropped; not at all where the backend does not answer."""

    store: str  # its instance
    keys: list[bytes]


class FetchBlocks(Message, frozen=True):
    """Scheduler -> worker, in order with the plans: fill these blocks from a store or another worker.  Answered by
    BlocksMoved.

    The scheduler holds the blocks until the answer.  A worker writes to one only as long as no plan has given it to a
    row in another generation.
    """

    epoch: int
    move_id: int
    next_step_id: int
    store: str
    names: list[bytes]  # of blocks that follow each other in a prefix
    blocks: list[int]
    generations: list[int]
    address: str = ""
    secret: bytes = b""
    seconds: float = 0.0  # that computing them would take; what comes more slowly is given up.  0: not known
    is_unhurried: bool = False  # no client waits for it: the worker rests in between, and its steps lose less at a time


class BlocksMoved(Message, frozen=True):
    """Worker -> scheduler: an order is over.  What was not moved is a miss, and no error of any request."""

    epoch: int
    move_id: int
    num_done: int  # of its blocks, the first ones
    num_bytes: int = 0  # that passed the data link
    seconds: float = 0.0  # that this took
    reason: str = ""  # why not all were moved


class MoveCounts(Message, frozen=True):
    """What has become of blocks on their way to workers and from them, since the scheduler began."""

    num_stored_blocks: int = 0
    num_stored_bytes: int = 0
    num_fetched_blocks: int = 0
    num_fetched_bytes: int = 0
    num_asked_tokens: int = 0  # that stores and other workers had, and were asked for
    num_fetched_tokens: int = 0  # of these, that came: they were not computed
    num_failed_moves: int = 0  # orders of which not all blocks were moved
    num_checks: int = 0  # blocks that were computed although a store had them, and compared
    num_false_blocks: int = 0  # of these, that were otherwise in the store


class StoreContents(Message, frozen=True):
    """Store -> scheduler: what it has since the last of these.  A key is the space of a block and its name."""

    instance: str
    kept: list[bytes]
    dropped: list[bytes]  # after `kept`
    is_first: bool = False  # `kept` begins the whole list: forget earlier ones


class ServeBlocks(Message, frozen=True):
    """Scheduler -> worker, in order with the plans: others may read these blocks from now on, over this worker's data
    link, for as long as each is in its generation.  Answered by BlocksMoved as soon as that is so.

    The scheduler holds the blocks until the worker that reads them has answered, or until a time is over.
    """

    epoch: int
    move_id: int
    next_step_id: int
    names: list[bytes]
    blocks: list[int]
    generations: list[int]


class Leaving(Message, frozen=True):
    """Worker -> scheduler: it is to leave; its sequences are to go on elsewhere while it still serves.  Answered by
    MayLeave, once there is no more to wait for."""

    instance: str
    epoch: int  # of its life


class MayLeave(Message, frozen=True):
    """Scheduler -> worker: nothing that others could take over is left there."""

    instance: str
    epoch: int
