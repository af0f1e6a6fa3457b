"""A world whose links lose messages, bring them twice, late, or in another order; and whose ledgers go wrong.

Beside the scheduler and its workers stands a model of both: it knows what every worker must hold after every plan, who
may write to which life of a block, which messages are of a life that is over, and every token of every stream.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from services.scheduler.consistency.holdings import digest_of
from services.scheduler.consistency.results import StepLost
from services.scheduler.invariants import check
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import MAX_PREEMPTIONS
from services.worker.plans.plan_sequencer import Work
from shared.errors import ProtocolError
from shared.messages import BlocksMoved, Holdings, SlidingPlan, StepPlan, StepResult, WorkerCapacity
from tests.unit.scheduler.worlds.world import World

Answer = StepResult | Holdings | BlocksMoved
MAX_IDLE = 20  # rounds in which no actor has anything to do but to say how it stands


class RoughWorld(World):
    """`work` and `hear` are the two halves of `answer`: at the worker, and back at the scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.links: dict[str, deque[Work]] = {}  # to each worker
        self.answers: dict[str, deque[Answer]] = {}  # back from it
        self.late: list[tuple[str, Work | Answer]] = []  # what an old connection still has
        self.alive: dict[str, int] = {}  # epoch of each link
        self.expected: dict[tuple[int, int], dict[int, int]] = {}  # digests by row after (epoch, step)
        self.writers: set[tuple[int, int, int, int]] = set()  # (epoch, pool, block, generation) that somebody writes to
        self.aborted: set[str] = set()
        self.is_broken = False  # ledgers have been tampered with, and not been set right yet
        self.was_tampered_with = False
        self.num_renewed = 0
        super().__init__(*args, **kwargs)

    # -- the troupe

    def join(self, name: str, size: WorkerCapacity | None = None) -> None:
        self.links.setdefault(name, deque())
        self.answers.setdefault(name, deque())
        self.alive[name] = self.epoch + 1
        super().join(name, size)

    def lose(self, name: str) -> None:
        del self.alive[name]
        super().lose(name)

    def restart(self, name: str) -> None:
        """A worker dies and is back under the same name: what is under way to the old life comes to the new one."""
        size = self.workers[name].capacity
        self.lose(name)
        self.join(name, size)

    def renew(self, name: str) -> None:
        self.epoch += 1
        self.num_renewed += 1
        self.alive[name] = self.epoch
        self.scheduler.renew_worker(name, self.epoch)

    # -- steps

    def plan(self, name: str) -> StepPlan | None:
        plan = super().plan(name)
        if plan is not None:
            self.links[name].append(self.plans[name].pop())
            self._expect(plan, self.scheduler.replicas[name])
        return plan

    def _expect(self, plan: StepPlan, replica: Replica) -> None:
        tables = {s.row: digest_of(s) for s in replica.running}
        self.expected[plan.epoch, plan.step_id] = tables
        if not self.is_broken:
            self._check_writers(plan, replica.block_size)

    def _check_writers(self, plan: StepPlan, size: int) -> None:
        """Each life of a block has one writer: what a row is given to write to was no other's in that generation."""
        parts: list[StepPlan | SlidingPlan] = [plan, *plan.sliding]
        for pool, part in enumerate(parts):
            lefts = part.num_left_blocks if isinstance(part, SlidingPlan) else [0] * len(plan.rows)
            self._check_writers_of(plan, pool, part, lefts, size)

    def _check_writers_of(
        self, plan: StepPlan, pool: int, part: StepPlan | SlidingPlan, lefts: list[int], size: int
    ) -> None:
        admitted, start = {sequence.row for sequence in plan.admitted}, 0
        columns = zip(plan.rows, plan.num_computed_tokens, part.num_new_blocks, lefts, strict=True)
        for row, computed, count, left in columns:
            num_shared = computed // size - left if row in admitted else 0
            for place in range(start + num_shared, start + count):
                life = plan.epoch, pool, part.new_block_ids[place], part.new_block_generations[place]
                assert life not in self.writers, "a block has a new owner and its old generation"
                self.writers.add(life)
            start += count

    def work(self, name: str) -> bool:
        """Let a worker take what is next on its link."""
        if not self.links[name]:
            return False
        work, worker = self.links[name].popleft(), self.workers[name]
        answer = worker.take(work)
        if answer is not None:
            self.answers[name].append(answer)
        if isinstance(answer, StepResult):
            assert not answer.refused_rows or self.was_tampered_with, "a row is refused, and the test has not tampered"
            held = dict(zip(*worker.holdings(), strict=True))
            wanted = self.expected.pop((answer.epoch, answer.step_id), None)
            assert wanted in (None, held) or self.was_tampered_with, "the worker does not hold what it should"
        self.num_events += 1
        return True

    def hear(self, name: str) -> bool:
        """Let the scheduler take what is next from a worker."""
        if not self.answers[name]:
            return False
        answer = self.answers[name].popleft()
        is_fresh = name in self.alive and answer.epoch == self.alive[name]
        self.now += 0.01
        try:
            if isinstance(answer, StepResult):
                taken = self.scheduler.apply(name, answer, self.now)
            elif isinstance(answer, BlocksMoved):
                taken = self.hear_moved(answer)
            else:
                taken = self.scheduler.reconcile(answer)
            assert is_fresh or not taken, "an answer of another life is taken"
        except StepLost:
            assert is_fresh, "an answer of another life restarts the link"
            self.renew(name)
        except ProtocolError as error:
            raise AssertionError("what a worker says makes no sense") from error
        self.after()
        return True

    def hear_moved(self, answer: BlocksMoved) -> bool:
        """Whether anything came of it."""
        moves = [len(replica.moves.open) for replica in self.scheduler.replicas.values()]
        self.scheduler.moves.moved(answer)
        return moves != [len(replica.moves.open) for replica in self.scheduler.replicas.values()]

    def answer(self, name: str) -> bool:
        worked = self.work(name)
        return self.hear(name) or worked

    def ask(self, name: str) -> None:
        self.links[name].append(self.scheduler.ask_holdings(name))
        self.num_events += 1

    def check_ledgers(self) -> None:
        self.scheduler.check_ledgers()
        self.is_broken = False
        self.after()

    # -- what goes wrong on the way

    def disturb(self, name: str, chance: random.Random) -> None:
        """One fault of a link, in either direction."""
        way: deque[Any] = chance.choice([self.links[name], self.answers[name]])
        if not way:
            return
        place = chance.randrange(len(way))
        kind = chance.randrange(4)
        if kind == 0:
            del way[place]
        elif kind == 1:
            way.append(way[place])
        elif kind == 2:
            self.late.append((name, way[place]))
            del way[place]
        else:  # a new connection was quicker than the old one
            way.rotate(chance.randrange(1, len(way) + 1))
        self.num_events += 1

    def deliver_late(self, chance: random.Random) -> None:
        if self.late:
            name, message = self.late.pop(chance.randrange(len(self.late)))
            way: deque[Any] = self.answers[name] if isinstance(message, Answer) else self.links[name]
            way.append(message)
            self.num_events += 1

    # -- what goes wrong in the ledgers

    def tamper(self, name: str, chance: random.Random) -> None:
        """As a fault of the scheduler's code, or of a machine's memory, would."""
        replica, worker = self.scheduler.replicas[name], self.workers[name]
        kind = chance.randrange(5 if replica.snapshots is None else 8)
        sequence = chance.choice(replica.running) if replica.running else None
        which = chance.randrange(len(replica.pools)) if len(replica.pools) > 1 else 0
        pool = replica.pools[which]
        if kind == 0 and sequence is not None:  # a double free
            pool.release([chance.choice(sequence.tables[which].block_ids)])
        elif kind == 1 and pool.num_available > 4:  # a release is forgotten
            pool.allocate(1)
        elif kind == 2 and replica.num_free_rows:
            replica.free_rows = replica.free_rows[1:]
        elif kind == 3 and replica.released_rows:  # the worker is not told
            replica.released_rows.pop()
        elif kind == 4 and sequence is not None and sequence.row in worker.rows:
            worker.forgotten.add(sequence.row)
        elif kind == 5 and sequence is not None and worker.states is not None:  # a state is lost
            worker.states._due[sequence.row] = -1
        elif kind == 6 and worker.states is not None:  # all snapshots are
            worker.states._lives[:] = 0
            worker.places.states[2 * replica.capacity.max_num_seqs :] = [(-1,)] * replica.capacity.num_snapshots
        elif kind == 7 and replica.snapshots is not None and replica.snapshots.pool.num_available:
            replica.snapshots.pool.allocate(1)
        else:
            return
        self.is_broken = self.was_tampered_with = True

    # -- what must hold

    def check(self) -> None:
        if not self.is_broken:
            check(self.scheduler)
        for replica in self.scheduler.replicas.values():
            for sequence in (*replica.running, *replica.waiting):
                assert sequence.num_preemptions <= MAX_PREEMPTIONS, "preempted too often"
        alarms = self.scheduler.journal.take_alarms()
        assert not alarms or self.was_tampered_with, f"an alarm, and the test has not tampered with anything: {alarms}"

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        super().abort(request_id)
        assert request_id not in self.scheduler.requests, "an aborted request goes on"

    def take_tokens(self, key: tuple[str, int], offset: int, token_ids: list[int], *, is_again: bool) -> None:
        output = self.outputs.setdefault(key, [])
        assert key[0] not in self.aborted, "tokens of a request that was aborted"
        assert offset == len(output) or (is_again and offset == 0), "a token is skipped, or told twice"
        assert token_ids == self.wanted[key][offset : offset + len(token_ids)], "a wrong token"
        super().take_tokens(key, offset, token_ids, is_again=is_again)

    # -- until everything is done

    def settle(self) -> None:
        """No fault any more: everything that was asked for ends, and nothing is held."""
        while self.late:
            self.deliver_late(random.Random(0))
        self.check_ledgers()
        num_idle = 0
        while num_idle < MAX_IDLE:
            if self.step() or any(self.links.values()) or any(self.answers.values()):
                self._drop_mail_of_the_dead()
                num_idle = 0
                continue
            num_idle += 1
            for name in self.workers:
                self.ask(name)
            for name in list(self.workers):
                self.answer(name)
            self.check_ledgers()
            if not self.scheduler.requests:
                break
        assert not self.scheduler.requests, "no end in sight"
        assert not self.is_broken
        self.acknowledges = True
        self.after()
        self.assert_idle()

    def _drop_mail_of_the_dead(self) -> None:
        for name in set(self.links) - set(self.workers):
            self.links[name].clear()
            self.answers[name].clear()
