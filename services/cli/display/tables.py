"""Plain tables for the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Columns of equal width, figures to the right, those at the places `left` to the left."""
    first, *others = columns([head, *rows], left)
    return "\n".join([first, "-" * max(map(len, (first, *others))), *others])


def columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """A line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]
