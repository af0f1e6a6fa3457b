"""The end of listening before the end of serving, which gRPC's core offers only as one.

The core cancels every call that reaches it after its server has begun to stop, and a client is not told that it may ask
again.  A client that has just connected sends its first call within moments.  So the port is left first, calls of the
connections that are there go on being served, and the server stops once no more of them come.
"""

from __future__ import annotations

import os
import socket

from services.gateway.grpc.peers import OWN, inode_of


def stop_listening(port: int) -> int:
    """Take no more connections at this TCP port; returns how many sockets listened there.

    The descriptor stays open, for the core still owns it: a socket to which nothing can connect takes its place.
    Where the system has no /proc, nothing happens.
    """
    try:
        descriptors = [int(path.name) for path in OWN.iterdir() if inode_of(path.name)]
    except OSError:
        return 0
    listening = [descriptor for descriptor in descriptors if listens(descriptor, port)]
    for descriptor in listening:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind("")  # a name that the kernel makes up
            silent.listen()
            silent.setblocking(False)
            os.dup2(silent.fileno(), descriptor, inheritable=False)
    return len(listening)


def listens(descriptor: int, port: int) -> bool:
    """Whether the descriptor is a socket that takes connections at the port."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
                return False
            return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and own.getsockname()[1] == port
    except OSError:  # closed meanwhile
        return False
