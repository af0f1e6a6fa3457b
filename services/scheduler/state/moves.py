"""Blocks on their way between one worker and the stores, or other workers.

A move makes names findable at a worker, or at a store, and nothing else: sequences then find them as any prefix.  What
does not come is computed.  So every way in which a move can fail ends in the same place, and none is an error.

What is offered is not held: an order is carried out after the plans before it and before those after it, so the worker
reads a block in the life that the order names, or finds it in another.  What is fetched is held until the worker's
answer, or until a time is over.  After that the blocks may be given to others although the worker may still write to
them: it compares generations, and from the first plan that gives such a block to a row it writes there no more.

What comes from another worker is lent there first (`ServeBlocks`), and held there as long as the fetch is open.  The
fetch is sent once that worker has said that its blocks can be read.  Its generations decide there too: where blocks
were given to others although they were held, or the hold was over, they are missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.computing_speed import ComputingSpeed
from services.scheduler.blocks.name_times import NameTimes
from services.scheduler.blocks.stores import StoreIndex
from services.scheduler.state.open_moves import OpenMove
from services.scheduler.state.peers import Peers
from shared.errors import ProtocolError
from shared.messages import BlocksMoved, FetchBlocks, OfferBlocks, ServeBlocks, WorkerCapacity

MAX_OFFER_BYTES = 4 << 20  # on their way to a store at a time: a step waits for as long as copying them takes
MAX_OFFERED = 256
MAX_FETCHED = 512  # blocks of one order
OFFER_SECONDS = 5.0  # after which an offer is taken for lost
FETCH_SECONDS = 2.0  # after which a fetch is, where nothing is known of how long computing takes
LEAST_FETCH_SECONDS, MOST_FETCH_SECONDS = 0.2, 4.0
REST_SECONDS = 1.0  # that a store is given nothing after an offer failed
MAX_CHECKED = 64
MAX_AVOIDED, AVOID_SECONDS = 8192, 10.0  # names, and for how long they are avoided
SLOW = "slow"  # a worker's reason, where computing is faster
AT_FAULT = frozenset({"missing", "corrupt"})  # reasons for which a store is not asked for these names again


class ReplicaMoves:
    """Those of one worker's life.

    Invariant: each block in `held` is counted once for each time that it stands there.
    """

    def __init__(
        self,
        pool: BlockPool,
        epoch: int,
        capacity: WorkerCapacity,
        stores: StoreIndex,
        clock: Clock,
        peers: Peers,
    ) -> None:
        movable = bool(capacity.block_space) and not capacity.sliding and not capacity.keeps_states
        self.space = capacity.block_space if movable else b""  # empty: no block moves
        self.open: dict[int, OpenMove] = {}  # by number
        self.speed = ComputingSpeed()
        self.pool = pool
        self._epoch = epoch
        self._capacity = capacity
        self._stores = stores
        self._peers = peers
        self._is_comparable = not capacity.max_head_drafts  # a draft head's last key in a block depends on what follows
        self._clock = clock
        self._arriving: dict[bytes, int] = {}  # names, with the number of their order
        self._unsent: list[FetchBlocks | ServeBlocks] = []
        self._num_orders = 0
        self._num_offers = 0  # open ones
        self._rests_until = 0.0
        self._checked: OrderedDict[bytes, str] = OrderedDict()  # names that are computed, with a store that has them
        self.sources: set[str] = set()  # stores and workers from which blocks have come
        self.takers: set[str] = set()  # stores that were offered blocks
        self._avoided = NameTimes(MAX_AVOIDED)  # what was to come and did not, and until when it is computed instead
        if movable:
            pool.keep_named()

    @property
    def held(self) -> list[int]:
        """Blocks, as often as moves hold them."""
        return [block for move in self.open.values() for block in move.held]

    @property
    def deadline(self) -> float | None:
        """When the next open move is over, answered or not."""
        return min((move.deadline for move in self.open.values()), default=None)

    # -- from stores and other workers

    @property
    def can_prefetch(self) -> bool:
        """Whether something could come, and nothing does."""
        return bool(self.space and self._stores) and not self._arriving

    def awaits(self, names: Sequence[bytes], found: list[int], reserve: int) -> bool:
        """Whether the block behind those that were found of a prefix is on its way, or looked for.  Where a store or
        another worker has it, and fetching takes less time than computing, it is from now on; `reserve` blocks stay
        available."""
        place = len(found)
        if not self.space or place >= len(names) or not (self._stores or self._arriving or self._peers):
            return False
        rest = names[place : place + MAX_FETCHED]
        if rest[0] in self._arriving or self._fetch(rest, found, reserve):
            return True
        return self._may_be_found(rest)

    def _may_be_found(self, names: Sequence[bytes]) -> bool:
        """Whether a store looks for these, of which no store has told the first."""
        if self._stores.holds(self.space, names[0]) or self._avoided.has_until(names[0], self._clock.now):
            return False
        return self._stores.lookups.awaits(self.space, names, self._seconds_to_compute(len(names)), self._clock.now)

    def _fetch(
        self,
        names: Sequence[bytes],
        found: list[int],
        reserve: int,
        *,
        at_any_cost: bool = False,
        is_unhurried: bool = False,
    ) -> bool:
        """False where that is not possible, or not worth while."""
        pool, now = self.pool, self._clock.now
        source, count = self.best_source(names[: self._num_wanted(names)])
        count = min(count, pool.num_available - (len(found) - pool.num_held_of(found)) - reserve)
        if count < 1:
            return False
        computing = self._seconds_to_compute(count)
        if computing and self.seconds_from(source, count) >= computing and not at_any_cost:
            return False
        if count > 1 and source in self._stores and self._is_comparable and self._stores.is_to_verify():
            count -= 1  # computed behind the others, it differs if one of them is wrong
            self._check(names[count], source)
        self.sources.add(source)
        pool.share(found)
        blocks = pool.allocate(count)
        generations = [pool.generations[block] for block in blocks]
        order = FetchBlocks(self._epoch, self._next_id(), 0, source, list(names[:count]), blocks, generations)
        limit = 0.0 if at_any_cost else computing
        order = msgspec.structs.replace(order, seconds=limit, is_unhurried=is_unhurried)
        usual = min(MOST_FETCH_SECONDS, max(LEAST_FETCH_SECONDS, computing or FETCH_SECONDS))
        patience = MOST_FETCH_SECONDS if at_any_cost else usual
        move = OpenMove(order, now, now + patience + 2 * self.speed.longest_step, [*found, *blocks])
        self.open[order.move_id] = move
        self._arriving.update(dict.fromkeys(order.names, order.move_id))
        if (lender := self._peers.get(source)) is None:
            self._unsent.append(order)
        else:
            move.deadline += 2 * lender.speed.longest_step
            move.loan = lender, lender.lend(order.names, move.deadline, partial(self._lent, order.move_id))
        return True

    def best_source(self, names: Sequence[bytes]) -> tuple[str, int]:
        """The store or the worker that has the most of the first of these, and how many; the faster one of two that
        have the same."""
        store, stored = self._stores.longest(self.space, names)
        peer, count = self._peers.longest(self, names) if self._peers else ("", 0)
        if stored > count or (stored == count and self.seconds_from(store, count) <= self.seconds_from(peer, count)):
            return store, stored
        return peer, count

    def seconds_from(self, source: str, num_blocks: int) -> float:
        """That so many blocks are likely to take from there; 0 where that was never measured."""
        now = self._clock.now
        seconds = self._stores.seconds_for(source, num_blocks * self._capacity.block_bytes, now)
        return seconds + self._peers.delay(source, now)

    def _lent(self, move_id: int, count: int) -> None:
        """So many blocks of a fetch from another worker can be read there."""
        if (move := self.open.get(move_id)) is None:
            return
        if not count:
            self._give_up(move)
            return
        del self.open[move_id]  # a worker takes orders by growing numbers: it is sent only now
        move.order = msgspec.structs.replace(move.order, move_id=self._next_id())
        assert isinstance(move.order, FetchBlocks)
        self.open[move.order.move_id] = move
        self._unsent.append(move.order)

    def follow(self, names: Sequence[bytes], *, is_unhurried: bool) -> bool:
        """Whether more of a prefix comes to this worker than it has, for a sequence that is computed elsewhere
        meanwhile: it is fetched also where computing would be quicker.  That holds for blocks behind those on their way
        too: once the sequence is here, computing would be chosen for them.  `is_unhurried`: no client waits."""
        if not self.space:
            return False
        found = self.pool.lookup(names)
        place = len(found)
        while place < len(names) and (names[place] in self._arriving or self.pool.knows(names[place])):
            place += 1
        rest = names[place : place + MAX_FETCHED]
        is_asked = bool(rest) and self._fetch(rest, found, 0, at_any_cost=True, is_unhurried=is_unhurried)
        return is_asked or place > len(found)

    def lose_source(self, instance: str) -> None:
        """A worker is gone: what was to come from it does not."""
        for move in list(self.open.values()):
            if isinstance(move.order, FetchBlocks) and move.order.store == instance:
                self._close(move)

    def end(self) -> None:
        """This life of the worker is over, and nothing comes to it any more."""
        for move in list(self.open.values()):
            self._close(move)

    # -- to other workers

    def lend(self, names: Sequence[bytes], deadline: float, ready: Callable[[int], None]) -> int:
        """Let another worker read the blocks of these names, all of which are here; returns a number for `take_back`.
        `ready` is called once with how many can be read."""
        blocks = self.pool.lookup(names)
        generations = [self.pool.hash_generations[block] for block in blocks]
        self.pool.share(blocks)
        order = ServeBlocks(self._epoch, self._next_id(), 0, list(names[: len(blocks)]), blocks, generations)
        self.open[order.move_id] = OpenMove(order, self._clock.now, deadline, blocks, ready=ready)
        self._unsent.append(order)
        return order.move_id

    @property
    def has_lent(self) -> bool:
        return any(isinstance(move.order, ServeBlocks) for move in self.open.values())

    def take_back(self, move_id: int) -> None:
        """What was lent has been read, or is not waited for any more."""
        if (move := self.open.get(move_id)) is not None:
            self._close(move)

    def _num_wanted(self, names: Sequence[bytes]) -> int:
        """Up to the first that is there, comes already, or did not come of late."""
        now, knows = self._clock.now, self.pool.knows
        return next(
            (
                place
                for place, name in enumerate(names)
                if name in self._arriving
                or name in self._checked
                or self._avoided.has_until(name, now)
                or (place and knows(name))
            ),
            len(names),
        )

    def _check(self, name: bytes, store: str) -> None:
        """Have a block computed, and compared with what a store has."""
        self._checked[name] = store
        while len(self._checked) > MAX_CHECKED:
            self._checked.popitem(last=False)

    def _seconds_to_compute(self, num_blocks: int) -> float:
        """0: not known."""
        return self.speed.seconds_for(num_blocks * self._capacity.block_size)

    def give_way(self) -> bool:
        """Give up the fetch that was begun last, for a sequence that lacks blocks; False where there is none."""
        last = next((move for move in reversed(self.open.values()) if move.held), None)
        if last is not None:
            self._give_up(last)
        return last is not None

    # -- to stores

    def next_offer(self, num_steps: int) -> OfferBlocks | None:
        """Blocks that were named since the last one, by so many plans; one offer is open at a time."""
        now, fresh = self._clock.now, self.pool.named
        if not fresh or self._num_offers or now < self._rests_until or not self._stores:
            return None
        store, is_check = self._stores.place_for(f"{self._epoch}"), False
        if not store:
            return None
        most = max(1, min(MAX_OFFERED, MAX_OFFER_BYTES // self._capacity.block_bytes))
        chosen: dict[bytes, tuple[int, int]] = {}
        while fresh and len(chosen) < most:
            block, generation = fresh[0]
            name = self.pool.name_of(block, generation)
            if name in self._checked and chosen:
                break  # it goes alone
            fresh.popleft()
            if name is not None and name in self._checked:
                chosen[name] = block, generation
                store, is_check = self._checked.pop(name), True
                break
            if name is not None and not self._stores.holds(self.space, name):
                chosen[name] = block, generation
        if not chosen:
            return None
        blocks, generations = zip(*chosen.values(), strict=True)
        columns = list(chosen), list(blocks), list(generations)
        order = OfferBlocks(self._epoch, self._next_id(), num_steps, store, *columns, is_check=is_check)
        if not is_check:
            self.takers.add(store)
        self.open[order.move_id] = OpenMove(order, now, now + OFFER_SECONDS + 2 * self.speed.longest_step, [])
        self._num_offers += 1
        return order

    # -- where a store has told untruths

    def doubt(self) -> None:
        """What has come from stores, and all that was computed behind it, may be wrong: nothing of it may be given
        away, and nothing more of it may come."""
        for move in list(self.open.values()):
            if isinstance(move.order, OfferBlocks):
                move.is_doubtful = True
            elif move.order.move_id in self.open:  # giving up one can end another
                self._give_up(move)
        self._checked.clear()
        self._unsent.clear()
        self.sources.clear()
        self.takers.clear()

    # -- orders and answers

    def _next_id(self) -> int:
        self._num_orders += 1
        return self._num_orders

    def take_fetches(self, num_steps: int) -> list[FetchBlocks | ServeBlocks]:
        """Those that were begun since the last call and not given up, and loans; to be sent behind so many plans."""
        unsent, self._unsent = self._unsent, []
        return [msgspec.structs.replace(one, next_step_id=num_steps) for one in unsent if one.move_id in self.open]

    def moved(self, message: BlocksMoved) -> OpenMove | None:
        """Take an answer; None where the move is over already.  Raises ProtocolError where it makes no sense."""
        move = self.open.get(message.move_id)
        if move is None:
            return None
        order, num_done, now = move.order, message.num_done, self._clock.now
        if not 0 <= num_done <= len(order.blocks):
            raise ProtocolError(f"{num_done} blocks are moved, of {len(order.blocks)}")
        if isinstance(order, ServeBlocks):
            self._answer(move, num_done)
            return move
        if isinstance(order, OfferBlocks):
            self._close(move)
            if order.is_check:
                return move
            self._rests_until = now + REST_SECONDS if num_done < len(order.blocks) else 0.0
            return move
        columns = zip(order.blocks, order.names, order.generations, strict=True)
        for _, (block, name, generation) in zip(range(num_done), columns, strict=False):
            self.pool.register(block, name, generation)
        missing = order.names[num_done:]
        self._avoided.note_all(missing, now + AVOID_SECONDS)
        if message.reason in AT_FAULT:
            self._stores.discard(order.store, self.space, missing)
        if num_done and message.seconds > 0.0:
            self._stores.measured(order.store, message.num_bytes, message.seconds, now)
            if move.loan is not None:
                self._peers.delayed(order.store, now - move.begun - message.seconds, now)
        elif message.reason == SLOW:
            self._stores.failed(order.store, now - move.begun, now)
        self._close(move)
        return move

    def expire(self) -> int:
        """Give up the moves whose time is over; how many."""
        now = self._clock.now
        late = [move for move in self.open.values() if move.deadline <= now]
        for move in late:
            if isinstance(move.order, FetchBlocks):
                self._stores.failed(move.order.store, now - move.begun, now)
            self._give_up(move)
        return len(late)

    def _give_up(self, move: OpenMove) -> None:
        if isinstance(move.order, FetchBlocks):
            self._avoided.note_all(move.order.names, self._clock.now + AVOID_SECONDS)
        elif isinstance(move.order, OfferBlocks):
            self._rests_until = self._clock.now + REST_SECONDS
        self._close(move)
        self._answer(move, 0)

    def _answer(self, move: OpenMove, count: int) -> None:
        """Tell the borrower of a loan, once."""
        ready, move.ready = move.ready, None
        if ready is not None:
            ready(count)

    def _close(self, move: OpenMove) -> None:
        del self.open[move.order.move_id]
        if isinstance(move.order, OfferBlocks):
            self._num_offers -= 1
            return
        if isinstance(move.order, FetchBlocks):
            for name in move.order.names:
                self._arriving.pop(name, None)
        self.pool.release(move.held)
        if move.loan is not None:
            lender, number = move.loan
            lender.take_back(number)
