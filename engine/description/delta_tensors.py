"""The tensors of a layer of linear attention: checkpoints keep the rows of its projections by kind, or by key head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from engine.description.names import NameTable, Part, Parts
from engine.description.spec import DeltaNetSpec


def delta_parts(d: DeltaNetSpec, table: NameTable, prefix: str, hidden: int) -> Iterator[tuple[str, Parts]]:
    """Slots `qkv` (gates of the results behind the values) and `output`, as attention has them, and `delta.*`."""
    share = d.value_heads // d.key_heads
    values = share * d.value_dim
    each = (d.key_dim, d.key_dim, values, values)  # of a key head: query, key, values, gates of the results
    yield "qkv", _projections(d, _names(table, prefix, "delta_qkvz"), each, hidden, joined=3)
    yield "output", (Part(f"{_name(table, prefix, 'delta_output')}.weight", (hidden, d.value_features)),)
    yield "delta.gates", _projections(d, _names(table, prefix, "delta_gates"), (share, share), hidden, joined=1)
    yield "delta.taps", (Part(f"{_name(table, prefix, 'delta_conv')}.weight", (d.channels, 1, d.conv_width)),)
    yield "delta.rate", (Part(_name(table, prefix, "delta_rate"), (d.value_heads,)),)
    yield "delta.step", (Part(_name(table, prefix, "delta_step"), (d.value_heads,)),)
    yield "delta.norm", (Part(f"{_name(table, prefix, 'delta_norm')}.weight", (d.value_dim,)),)


def _projections(d: DeltaNetSpec, names: Sequence[str], each: Sequence[int], hidden: int, *, joined: int) -> Parts:
    """Matrices one below the other, by kind.  One stored matrix has all kinds of one key head after another; of two the
    first has the first `joined` kinds."""
    if len(names) == 2:
        counts = (sum(each[:joined]), sum(each[joined:]))
        return tuple(
            Part(f"{name}.weight", (d.key_heads * count, hidden)) for name, count in zip(names, counts, strict=True)
        )
    (name,) = names
    shape = (d.key_heads * sum(each), hidden)
    ends = list(accumulate(each))
    orders = (tuple(range(end - count, end)) for end, count in zip(ends, each, strict=True))
    return tuple(Part(f"{name}.weight", shape, head_order=order, head_rows=sum(each)) for order in orders)


def _names(table: NameTable, prefix: str, slot: str) -> list[str]:
    return [prefix + name for name in table.slots[slot]]


def _name(table: NameTable, prefix: str, slot: str) -> str:
    (name,) = _names(table, prefix, slot)
    return name
