"""Events of pools as the payloads of vLLM's KV events.

A payload is msgpack: `[time, [event, ...], rank]`.  An event is a map with its `type`, or, for readers of older
versions, an array that begins with it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.scheduler.blocks.pool_events import BlocksRemoved, BlocksStored, PoolEvent

MEDIUM = "GPU"  # vLLM's word for the pool that steps read, whatever they run on
NUMBER_BYTES = 8  # of a name, that become its number

Form = Literal["map", "array"]

_encoder = msgspec.msgpack.Encoder()


def encode_events(now: float, events: list[PoolEvent], rank: int, form: Form) -> bytes:
    described = [describe(event) for event in events]
    if form == "map":
        return _encoder.encode([now, described, rank])
    return _encoder.encode([now, [list(one.values()) for one in described], rank])


def describe(event: PoolEvent) -> dict[str, Any]:
    """Fields in the order of vLLM's."""
    if isinstance(event, BlocksStored):
        return {
            "type": "BlockStored",
            "block_hashes": [number_of(name) for name in event.names],
            "parent_block_hash": number_of(event.parent) if event.parent is not None else None,
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": event.adapter or None,
        }
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": list(map(number_of, event.names)), "medium": MEDIUM}
    return {"type": "AllBlocksCleared"}


def number_of(name: bytes) -> int:
    """64 bits."""
    return int.from_bytes(name[:NUMBER_BYTES], "big")
