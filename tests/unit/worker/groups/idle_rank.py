"""A rank that computes nothing: `python -m tests.unit.worker.groups.idle_rank STAGE RANK SOCKET` says over each group's
channel how many groups there were, and leaves when its socket is closed."""

from __future__ import annotations

import socket
import sys

import msgspec

from services.worker.groups.group_sockets import close_all, wait_for_group
from shared.ranks.channel import Channel


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What it says."""

    rank: int
    num_groups: int
    num_descriptors: int


def main() -> None:
    _, rank, descriptor = map(int, sys.argv[1:])
    groups, num_groups = socket.socket(fileno=descriptor), 0
    while descriptors := wait_for_group(groups):
        num_groups += 1
        channel = Channel(socket.socket(fileno=descriptors[0]))
        channel.send(Joined(rank, num_groups, len(descriptors)))
        channel.close()
        close_all(descriptors[1:])


if __name__ == "__main__":
    main()
