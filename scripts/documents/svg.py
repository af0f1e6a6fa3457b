"""A few shapes of SVG as text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

SANS = "Helvetica, Arial, sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def picture(width: int, height: int, title: str, parts: Iterable[str], *, family: str = SANS) -> str:
    """A whole document; `title` is what a screen reader says."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{escape(family)}">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"/>'


def words(
    x: float, y: float, text: str, size: float, fill: str, *, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
