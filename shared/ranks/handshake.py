"""What passes before any message where ranks join over TCP: both ends show that they have the deployment's keys.

    leader -> rank    MAGIC, 16 bytes that differ with every connection
    rank   -> leader  16 bytes of its own, and a keyed digest of both
    leader -> rank    ACCEPTED and another keyed digest of both; or REFUSED, and the connection ends

The key is made from the deployment's keys and does not pass.  What passes later is not encrypted: as with data links
(shared/data_link/frames.py), use a network of your own.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from pathlib import Path

from shared.data_link.frames import CHALLENGE_BYTES, PROOF_BYTES, is_proof, proof, receive
from shared.errors import ConfigError, ProtocolError
from shared.transport.keys import FILE, load_keys

MAGIC = b"PGRANKS1"
ACCEPTED, REFUSED = b"\1", b"\0"
SECONDS = 30.0  # that either end has for each answer: a leader may be importing torch on a busy machine
_FROM_RANK, _FROM_LEADER = b"rank", b"leader"


def group_key(directory: Path) -> bytes:
    """Of the deployment's runtime directory.  Raises ConfigError."""
    keys = load_keys(directory)
    return hashlib.blake2b(keys.server_secret + keys.client_secret, digest_size=32, person=b"pageant ranks").digest()


def admit(end: socket.socket, key: bytes) -> None:
    """The leader's part.  Raises ProtocolError for a stranger, OSError where the other end leaves or waits."""
    own = secrets.token_bytes(CHALLENGE_BYTES)
    end.settimeout(SECONDS)
    end.sendall(MAGIC + own)
    theirs = bytes(receive(end, CHALLENGE_BYTES))
    if not is_proof(key, _FROM_RANK + own + theirs, bytes(receive(end, PROOF_BYTES))):
        end.sendall(REFUSED)
        raise ProtocolError("it does not have the keys of this deployment")
    end.sendall(ACCEPTED + proof(key, _FROM_LEADER + own + theirs))


def introduce(end: socket.socket, key: bytes) -> None:
    """The rank's part.  Raises ConfigError where the keys differ, ProtocolError for what is no leader, OSError."""
    end.settimeout(SECONDS)
    greeting = bytes(receive(end, len(MAGIC) + CHALLENGE_BYTES))
    if not greeting.startswith(MAGIC):
        raise ProtocolError("what listens there leads no ranks of this version")
    theirs, own = greeting[len(MAGIC) :], secrets.token_bytes(CHALLENGE_BYTES)
    end.sendall(own + proof(key, _FROM_RANK + theirs + own))
    accepted = bytes(receive(end, len(ACCEPTED))) == ACCEPTED
    if not accepted or not is_proof(key, _FROM_LEADER + theirs + own, bytes(receive(end, PROOF_BYTES))):
        raise ConfigError(f"this rank and its leader have different keys: both need the same {FILE} in runtime_dir")
