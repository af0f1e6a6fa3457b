"""The draft tokens that one update asks for, until they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ProposalOrder:
    """A row stands in one order at most: a later update that names it takes it out of an earlier one."""

    update_id: int
    num_ahead: int
    wanted: dict[int, int] = field(default_factory=dict)  # row -> draft tokens
    lost: set[int] = field(default_factory=set)  # rows; reported with the answer
    is_answered: bool = False  # what is left to do is to run ahead
    num_sent: int = 0  # tokens of the answer

    def goal(self, row: int) -> int:
        return self.wanted[row] + (self.num_ahead if self.is_answered else 0)

    def longest(self, row: int) -> int:
        return self.wanted[row] + self.num_ahead

    def split(self, rows: list[int]) -> ProposalOrder:
        """Another order, with these rows of this one."""
        return ProposalOrder(self.update_id, self.num_ahead, {row: self.wanted.pop(row) for row in rows})
