"""Stores that come and go, the orders to move blocks, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.stores import StoreIndex
from services.scheduler.state.open_moves import AnyOrder
from services.scheduler.state.peers import Peers
from services.scheduler.state.replica import Replica
from services.scheduler.telemetry.journal import EventJournal
from shared.messages import BlocksMoved, DropBlocks, FetchBlocks, MoveCounts, OfferBlocks, StoreContents

DIFFERENT = "different"  # the reason of a worker that has compared a block


class BlockMoves:
    """Between the stores and the workers, and among the workers."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        journal: EventJournal,
        start_over: Callable[[Replica], None],
        clock: Clock,
        verify_fetches: int = 0,
    ) -> None:
        """`start_over`: forget what a worker's pool holds, and compute what runs there again."""
        self.stores = StoreIndex(verify_fetches)
        self.peers = Peers(replicas)
        self.leaving: set[str] = set()  # workers that take nothing new, since they are about to leave
        self.num_stored_blocks = 0  # given to stores
        self.num_stored_bytes = 0
        self.num_fetched_blocks = 0
        self.num_fetched_bytes = 0
        self.num_asked_tokens = 0  # of the blocks that stores and other workers were asked for
        self.num_fetched_tokens = 0
        self.num_failed_moves = 0  # orders of which not all blocks were moved
        self.num_checks = 0  # blocks that were computed although a store had them, and compared
        self.num_false_blocks = 0  # of these, that were otherwise in the store
        self._replicas = replicas
        self._journal = journal
        self._start_over = start_over
        self._clock = clock
        self._to_drop: list[str] = []  # stores that are to forget everything

    def join(self, store: str, *, can_look_up: bool = False) -> None:
        """A store has come, or says hello again: what it has it tells behind that.  Blocks that were named before are
        offered to it too.  `can_look_up`: it finds out for `LookUpBlocks` what else there is."""
        if store in self.stores:
            return
        if can_look_up:
            self.stores.lookups.join(store)
        self.stores.join(store)
        for replica in self._replicas.values():
            if replica.moves.space:
                replica.pool.name_again()

    def serve(self, worker: str) -> None:
        """A worker gives its blocks to others that ask for them."""
        self.peers.serving.add(worker)

    @property
    def are_possible(self) -> bool:
        return bool(self.stores or self.peers)

    def leave(self, instance: str) -> None:
        """A store or a worker is gone.  What comes from it still is as good as before; what does not is a miss."""
        self.stores.leave(instance)
        self.peers.leave(instance)
        self.leaving.discard(instance)

    def forget(self, replica: Replica) -> None:
        """A life of a worker is over."""
        replica.moves.end()
        for other in self._replicas.values():
            other.moves.lose_source(replica.instance)

    def told(self, message: StoreContents) -> None:
        self.stores.told(message.instance, message.kept, message.dropped, is_first=message.is_first)
        self.stores.lookups.told([*message.kept, *message.dropped], self._clock.now)

    def moved(self, message: BlocksMoved) -> None:
        """Take a worker's answer, unless it is of another life, or the move is over already.  Raises ProtocolError
        where it makes no sense."""
        replica = next((one for one in self._replicas.values() if one.epoch == message.epoch), None)
        move = replica.moves.moved(message) if replica is not None else None
        if move is None or replica is None:
            return
        order, num_done = move.order, message.num_done
        if isinstance(order, FetchBlocks):
            self.num_fetched_blocks += num_done
            self.num_fetched_bytes += message.num_bytes
            self.num_asked_tokens += len(order.names) * replica.block_size
            self.num_fetched_tokens += num_done * replica.block_size
        elif isinstance(order, OfferBlocks) and order.is_check:
            self.num_checks += 1
            if message.reason == DIFFERENT:
                self.num_false_blocks += 1
                self._found_false(order.store, replica)
        elif isinstance(order, OfferBlocks):
            self.num_stored_blocks += num_done
            self.num_stored_bytes += message.num_bytes
        self.num_failed_moves += num_done < len(order.blocks)
        if move.is_doubtful and isinstance(order, OfferBlocks):
            self._to_drop.append(order.store)

    @property
    def counts(self) -> MoveCounts:
        """All of these numbers."""
        return MoveCounts(*(getattr(self, name) for name in MoveCounts.__struct_fields__))

    def _found_false(self, store: str, replica: Replica) -> None:
        """A store does not have what was computed, or what was computed rests on what it had: it is asked no more, and
        everything goes that may rest on its blocks, in workers' pools and in other stores."""
        self._journal.alarm("store_untrue", store=store, worker=replica.instance)
        self.stores.distrust(store)
        doubtful, reached = self._reached_from(store, replica)
        for one in doubtful:
            one.moves.doubt()
            self._start_over(one)
        for name in sorted(reached):
            if name in self.stores:
                self.stores.empty(name)
                self._to_drop.append(name)

    def _reached_from(self, store: str, replica: Replica) -> tuple[list[Replica], set[str]]:
        """The workers to which blocks of a store may have come, by way of others too, and all on these ways."""
        doubtful, reached = [replica], {store}
        while True:
            reached.update(*(one.moves.takers | {one.instance} for one in doubtful))
            more = [one for one in self._replicas.values() if one not in doubtful and reached & one.moves.sources]
            if not more:
                return doubtful, reached
            doubtful += more

    def expire(self, replica: Replica) -> None:
        """Give up what has taken too long."""
        self.stores.lookups.expire(self._clock.now)
        if replica.moves.open:
            self.num_failed_moves += replica.moves.expire()

    def take_orders(self, now: float | None = None) -> list[tuple[str, AnyOrder]]:
        """By worker or store, what to send there now, behind the plans that were made.

        `now`: as the core has it; an argument, so that a recording has it where no worker is left to plan for.
        """
        self._clock.now = self._clock.now if now is None else now
        self.stores.lookups.expire(self._clock.now)
        orders: list[tuple[str, AnyOrder]] = [(store, DropBlocks(store)) for store in self._to_drop]
        orders += ((order.store, order) for order in self.stores.lookups.take_orders())
        self._to_drop.clear()
        for instance, replica in self._replicas.items():
            if not replica.moves.space:
                continue
            orders += ((instance, order) for order in replica.moves.take_fetches(replica.num_steps))
            if (offer := replica.moves.next_offer(replica.num_steps)) is not None:
                orders.append((instance, offer))
        return orders

    @property
    def wake_time(self) -> float | None:
        """When the next move is over, answered or not."""
        deadlines = [replica.moves.deadline for replica in self._replicas.values() if replica.moves.open]
        deadlines.append(self.stores.lookups.deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)
