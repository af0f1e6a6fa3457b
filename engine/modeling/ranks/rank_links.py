"""The way of orders to ranks that compute with torch: sockets from the leader, which the collectives do not pass.

Both ends digest what passes.  A rank answers an order for the head with its digest, so that no token is made of steps
that a rank has read otherwise.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Sequence

import msgspec

from engine.modeling.ranks.step_orders import CopyOrder, HeadOrder, LinkEnd, StepOrder, decoded

DIGEST_BYTES = 8
_LENGTH = struct.Struct("!I")


class MeetingOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where the ranks' collectives find each other: a port of the leader's host, at the address of the link."""

    port: int


RankOrder = StepOrder | CopyOrder | HeadOrder | MeetingOrder
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[RankOrder] = msgspec.msgpack.Decoder(RankOrder)


class OrderDigest:
    """Of all orders so far, in their order."""

    def __init__(self, agreed: int) -> None:
        """`agreed`: what ranks have agreed on before."""
        self.value = agreed.to_bytes(DIGEST_BYTES, "little")

    def add(self, order: bytes) -> None:
        self.value = hashlib.blake2b(self.value + order, digest_size=DIGEST_BYTES).digest()

    def spoil(self) -> None:
        """As if this end had read something else."""
        self.add(b"")


class RankLinkEnd(LinkEnd):
    """Of a connection between the leader and a rank."""

    @property
    def hosts(self) -> tuple[str, str]:
        """Addresses of this host and of the other one, as this connection has them."""
        if self.socket.family == socket.AF_UNIX:
            return "127.0.0.1", "127.0.0.1"
        return str(self.socket.getsockname()[0]), str(self.socket.getpeername()[0])


class LeadingLinks:
    """The leader's ends, to ranks 1, 2, ...  One thread orders; any may hang up."""

    def __init__(self, links: Sequence[int], agreed: int) -> None:
        """`links`: descriptors of sockets."""
        self.digest = OrderDigest(agreed)
        self._ends = [RankLinkEnd(link) for link in links]

    @property
    def host(self) -> str:
        """This host's address, as other ranks reach it."""
        return self._ends[0].hosts[0]

    def send(self, order: RankOrder) -> None:
        """Raises OSError."""
        data = _ENCODER.encode(order)
        self.digest.add(data)
        for end in self._ends:
            end.socket.sendall(_LENGTH.pack(len(data)) + data)

    def all_agree(self) -> bool:
        """Once for each order that ranks answer: whether all have read what was sent.  Raises OSError."""
        answers = [end.take(DIGEST_BYTES).tobytes() for end in self._ends]
        return set(answers) == {self.digest.value}

    def hang_up(self) -> None:
        """From any thread.  A thread that waits at either end gets an error at once."""
        for end in self._ends:
            end.hang_up()


class FollowingLink(RankLinkEnd):
    """The end of a rank that does not lead."""

    def __init__(self, link: int, agreed: int) -> None:
        """`link`: the descriptor of a socket."""
        super().__init__(link)
        self.digest = OrderDigest(agreed)

    def receive(self) -> RankOrder:
        """Raises OSError where the other end is closed, or says what cannot be."""
        (size,) = _LENGTH.unpack(self.take(_LENGTH.size).data)
        data = self.take_order(size)
        self.digest.add(data)
        return decoded(_DECODER, data)

    def answer(self) -> None:
        """The digest of all orders so far.  Raises OSError."""
        self.socket.sendall(self.digest.value)
