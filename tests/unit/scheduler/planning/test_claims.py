"""Which tenants go ahead in one step, and whose prompts are slow, by the numbers that each decision follows."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from types import SimpleNamespace
from typing import cast

from services.scheduler.planning.sharing import MEMORY, Claims, Visitors
from services.scheduler.state.fairness import Shares
from services.scheduler.state.replica import Replica


class Waiting:
    """As much of a `WaitingQueue` as is asked for here."""

    def __init__(self, waits: Counter[str]) -> None:
        self.tenants = waits.keys()
        self.counts = lambda: dict(waits)
        self._waits = waits

    def __len__(self) -> int:
        return self._waits.total()


class Place:
    """A worker with so many rows, of which each tenant holds some and waits for some."""

    def __init__(self, max_num_seqs: int = 8, weights: dict[str, float] | None = None) -> None:
        self.rows: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.prefilling: list[tuple[str, int]] = []  # tenants of running sequences, and how many tokens they lack
        self.shares = Shares(weights or {})
        self.num_steps = 0
        self.max_num_seqs = max_num_seqs

    @property
    def replica(self) -> Replica:
        running = [SimpleNamespace(tenant=tenant, num_behind=behind) for tenant, behind in self.prefilling]
        capacity = SimpleNamespace(max_num_seqs=self.max_num_seqs)
        found = SimpleNamespace(
            num_rows=self.rows,
            waiting=Waiting(self.waits),
            active=running,
            capacity=capacity,
            num_steps=self.num_steps,
            is_resting=False,
        )
        return cast(Replica, found)

    def claims(self, slack: float = 0.0) -> Claims:
        return Claims(self.replica, self.shares, slack)

    def serve(self, tenant: str, num_tokens: int) -> None:
        self.shares.charge_prompt(tenant, num_tokens)


def place(rows: dict[str, int], waits: dict[str, int], max_num_seqs: int = 8, **weights: float) -> Place:
    made = Place(max_num_seqs, weights)
    made.rows.update(rows)
    made.waits.update(waits)
    return made


def test_a_row_goes_only_where_the_giver_stays_as_rich_as_the_taker() -> None:
    assert place({"a": 2}, {"b": 1}).claims().tenants() == ["b"]
    assert place({"a": 1}, {"b": 1}).claims().tenants() == [], "it would only change hands"
    assert place({"a": 4, "b": 3}, {"b": 1}).claims().tenants() == []
    assert place({"a": 5, "b": 3}, {"b": 1}, 16).claims().tenants() == ["b"]


def test_one_that_asks_for_more_than_its_share_gets_rows_below_half_of_the_other_s() -> None:
    greedy = place({"a": 6, "b": 2}, {"b": 9})
    assert greedy.claims().tenants() == [], "three, of which the double is no less than six"
    greedy.rows["a"] = 7
    assert greedy.claims().tenants() == ["b"]


def test_what_is_granted_or_taken_counts_at_once() -> None:
    claims = place({"a": 4}, {"b": 3}).claims()
    assert claims.tenants() == ["b"] and list(claims.givers("b")) == ["a"]
    claims.take("a")
    claims.grant("b")
    assert list(claims.givers("b")) == ["a"], "three against two"
    claims.take("a")
    claims.grant("b")
    assert list(claims.givers("b")) == [] and claims.tenants() == []


def test_the_share_of_rows_follows_what_is_granted_and_taken() -> None:
    claims = place({"a": 2}, {"b": 4, "a": 1}, 8).claims()
    for _ in range(4):
        claims.grant("b")
    assert claims._fits("b") and claims._num_waiting["b"] == 0
    claims.take("b")
    assert claims._num_waiting["b"] == 1 and claims._num_rows["b"] == 3
    claims.take("a")
    assert claims._num_waiting["a"] == 2 and claims._num_rows["a"] == 1


def test_weights_make_rich_and_poor() -> None:
    assert place({"a": 4}, {"b": 1}, a=4.0).claims().tenants() == [], "four rows of weight four are as one"
    assert place({"a": 4}, {"b": 1}, b=2.0).claims().tenants() == ["b"]


def test_one_that_was_served_more_takes_nothing_unless_it_asks_for_little() -> None:
    one = place({"a": 3}, {"b": 1}, 8)
    one.serve("b", 100)
    assert one.claims(slack=99.0).tenants() == []
    assert one.claims(slack=100.0).tenants() == ["b"]
    one.waits["b"] = 9
    assert one.claims(slack=1000.0).tenants() == [], "it asks for more than its share: no slack"


def test_the_least_served_comes_first_and_the_richest_gives_first() -> None:
    many = place({"a": 6, "c": 4}, {"b": 1, "d": 1}, 16)
    many.serve("b", 10)
    claims = many.claims(slack=1000.0)
    assert claims.tenants() == ["d", "b"] and list(claims.givers("d")) == ["a", "c"]


def test_prompts_of_one_that_was_served_more_are_gone_ahead_of() -> None:
    one = place({"a": 1}, {"b": 1})
    one.prefilling = [("a", 1)]
    assert not one.claims().precedes("b"), "it decodes"
    one.prefilling = [("a", 2)]
    assert one.claims().precedes("b") and one.claims().tenants() == ["b"]
    one.serve("b", 1)
    assert not one.claims().precedes("b") and one.claims(slack=1.0).precedes("b")
    one.prefilling = [("b", 9)]
    assert not one.claims().precedes("b"), "its own is being computed"
    assert place({}, {}).claims().tenants() == []


# -- tenants whose prompts are slow


def test_only_one_that_asks_for_more_than_its_share_beside_one_that_does_not_is_slow() -> None:
    for rows, waits, slow in (
        ({"a": 3}, {"a": 9}, set()),
        ({"a": 3}, {"a": 1, "b": 4}, set()),
        ({"a": 3}, {"a": 2, "b": 4}, {"a"}),
        ({"a": 3, "b": 5}, {"a": 2}, set()),
        ({"a": 7, "b": 1}, {}, {"a"}),
    ):
        one = place(rows, waits)
        assert Visitors(one.replica, one.shares).slow() == slow, (rows, waits)
    many = place({"a": 1}, {"b": 2, "c": 1}, max_num_seqs=1)
    assert Visitors(many.replica, many.shares).slow() == {"b"}, "one row is never more than a share"


def test_shares_depend_on_no_order_of_names() -> None:
    """A replay is another process, in which sets of the same names have another order; so sums of weights must not
    depend on it.  A tenant that asks for exactly its share asks for no more."""
    for light, middle, heavy in permutations("abcdefg", 3):
        weights = {light: 0.1, middle: 0.2, heavy: 0.3}
        one = place({heavy: 3, middle: 1}, {light: 5}, max_num_seqs=6, **weights)
        assert Visitors(one.replica, one.shares).slow() == {light}, weights
        assert one.claims()._fits(heavy), weights


def test_one_that_left_lately_is_expected_back_for_a_while() -> None:
    one = place({"a": 1, "b": 1}, {"a": 9})
    replica = one.replica
    visitors = Visitors(replica, one.shares)
    visitors.planned()
    del one.rows["b"]
    assert visitors.slow() == {"a"} and len(visitors) == 1
    for num_steps, slow in ((MEMORY, {"a"}), (MEMORY + 1, set())):
        replica.num_steps = num_steps
        visitors.planned()
        assert visitors.slow() == slow
    assert len(visitors) == 0


def test_no_more_are_expected_back_than_there_are_rows() -> None:
    one = place({}, {}, max_num_seqs=3)
    replica = one.replica
    visitors = Visitors(replica, one.shares)
    for index in range(6):
        one.rows[f"t{index}"] = 1
        visitors.planned()
        del one.rows[f"t{index}"]
        replica.num_steps = index
        visitors.slow()
    assert list(visitors._left) == ["t3", "t4", "t5"]
    one.rows["t3"] = 1
    visitors.planned()
    del one.rows["t3"]
    visitors.slow()
    assert list(visitors._left) == ["t4", "t5", "t3"], "it left again"
