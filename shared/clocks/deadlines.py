"""Deadlines on the way: clocks of two processes may differ, and be set meanwhile, so what travels is what is left.

`deadline` of a header is a time of the steady clock of the process that has it; `time_left` is as of sending it.
What a message waits on its way does not count: the gateway, which had it first, ends the call in time by itself.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shared.clocks.clock import steady_time
from shared.messages import AttachRequest, RequestHeader

Dated = TypeVar("Dated", RequestHeader, AttachRequest)


def received(message: Dated) -> Dated:
    """With a deadline by our clock."""
    if message.time_left is None:
        return message
    return msgspec.structs.replace(message, deadline=steady_time() + message.time_left)


def sent(header: RequestHeader) -> RequestHeader:
    """With what is left until a deadline by our clock."""
    if header.deadline is None:
        return header
    return msgspec.structs.replace(header, time_left=header.deadline - steady_time())
