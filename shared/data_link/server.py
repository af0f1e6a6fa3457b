"""The side of a data link that listens: a thread for each connection, of which each worker has two."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

import structlog

from shared.data_link.addresses import prepare
from shared.data_link.frames import (
    CHALLENGE_BYTES,
    DONE,
    MAGIC,
    PROOF_BYTES,
    PUT,
    BlockRequest,
    checksum,
    group_size,
    groups,
    is_proof,
    read_checksums,
    read_request,
    receive,
    send_count,
    send_group,
)
from shared.data_link.window import Window, send_window
from shared.errors import ProtocolError

log = structlog.get_logger()

MAX_CONNECTIONS = 64
PROOF_SECONDS = 5.0  # that a connection has to show that it may be here
TRANSFER_SECONDS = 30.0  # that one call of a socket may take within a request

HeldBlock = tuple[int, bytes | bytearray | memoryview]  # checksum, bytes


class BlockHolder(Protocol):
    """What is served; called by several threads."""

    def keep(self, space: bytes, name: bytes, block: HeldBlock) -> bool:
        """False where there is no room for it."""

    def copy(self, space: bytes, names: Sequence[bytes], block_bytes: int, place: memoryview) -> list[int]:
        """Copy the blocks of the first names that are all there, one behind the other; returns their checksums."""


class BlockServer:
    """Serves until it is closed.  No connection outlives it, and none keeps the process alive."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes, holder: BlockHolder) -> None:
        self._listeners = listeners
        self._secret = secret
        self._holder = holder
        self._lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._closed = threading.Event()
        for listener in listeners:
            threading.Thread(target=self._accept, args=(listener,), name="data-link", daemon=True).start()

    @property
    def num_links(self) -> int:
        return len(self._links)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            links = list(self._links)
        for link in (*self._listeners, *links):
            with contextlib.suppress(OSError):  # it was never connected, or is closed by the other side
                link.shutdown(socket.SHUT_RDWR)
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                link, _ = listener.accept()
            except OSError:
                self._closed.wait(0.5)  # there is no descriptor at present
                continue
            with self._lock:
                if self._closed.is_set() or len(self._links) >= MAX_CONNECTIONS:
                    link.close()
                    continue
                self._links.add(link)
            threading.Thread(target=self._serve, args=(link,), name="data-link-peer", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            prepare(link)
            if self._let_in(link):
                window = send_window(link)
                link.settimeout(None)
                while (request := read_request(link)) is not None:
                    link.settimeout(TRANSFER_SECONDS)
                    if request.kind == PUT:
                        self._take(link, request)
                    else:
                        self._give(link, request, window)
                    link.settimeout(None)
        except ProtocolError as error:
            log.warning("data_link_refused", reason=str(error))
        except (OSError, MemoryError) as error:
            if not self._closed.is_set():
                log.info("data_link_closed", reason=str(error))
        finally:
            link.close()
            with self._lock:
                self._links.discard(link)

    def _let_in(self, link: socket.socket) -> bool:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        link.settimeout(PROOF_SECONDS)
        link.sendall(MAGIC + challenge)
        if is_proof(self._secret, challenge, bytes(receive(link, PROOF_BYTES))):
            return True
        log.warning("data_link_refused", reason="it does not have this store's secret")
        return False

    def _give(self, link: socket.socket, request: BlockRequest, window: Window | None) -> None:
        """Up to the first block that is not there, a group at a time: so one is read while the others are found."""
        size = request.block_bytes
        slots = window.slots(size) if window is not None else []
        places = slots or [memoryview(bytearray(group_size(size) * size))]
        num_unread = 0  # slots that the other side has not read yet
        for names, place in zip(groups(request.names, size), cycle(places), strict=False):
            if slots and num_unread == len(slots):
                _await_read(link, 1)
                num_unread -= 1
            found = self._holder.copy(request.space, names, size, place)
            send_group(link, found)
            if not slots:
                link.sendall(place[: len(found) * size])
            if len(found) < len(names):
                break
            num_unread += bool(slots)
        _await_read(link, num_unread)

    def _take(self, link: socket.socket, request: BlockRequest) -> None:
        """Keep the blocks up to the first that is corrupt or does not fit; all are read, so that the link goes on."""
        checksums, num_kept, is_whole = read_checksums(link, len(request.names)), 0, True
        for name, wanted in zip(request.names, checksums, strict=True):
            block = receive(link, request.block_bytes)
            is_whole = is_whole and checksum(block) == wanted
            is_whole = is_whole and self._holder.keep(request.space, name, (wanted, block))
            num_kept += is_whole
        send_count(link, num_kept)


def _await_read(link: socket.socket, count: int) -> None:
    """Raises ProtocolError where the other side says something else."""
    if receive(link, count) != DONE * count:
        raise ProtocolError("an answer is interrupted by something else")
