"""Orders to move blocks that are not answered yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.state.peers import Lender
from shared.messages import DropBlocks, FetchBlocks, LookUpBlocks, OfferBlocks, ServeBlocks

MoveOrder = OfferBlocks | FetchBlocks | ServeBlocks
AnyOrder = MoveOrder | DropBlocks | LookUpBlocks  # the latter two to stores


@dataclass(slots=True)
class OpenMove:
    """An order without an answer."""

    order: MoveOrder
    begun: float
    deadline: float
    held: list[int]  # of a fetch: the prefix before its blocks, and its blocks; of a loan: its blocks
    is_doubtful: bool = False  # of an offer: its blocks may not be what their names say
    loan: tuple[Lender, int] | None = None  # of a fetch from a worker: who lends its blocks, and under which number
    ready: Callable[[int], None] | None = None  # of a loan, until it is answered: to be told how many can be read
