"""Plain tables for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Columns of equal width, figures to the right, those at the places `left` to the left."""
    everything = [head, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    lines = ["  ".join(_padded(row, widths, left)).rstrip() for row in everything]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _padded(row: Sequence[str], widths: Sequence[int], left: Collection[int]) -> list[str]:
    return [
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
