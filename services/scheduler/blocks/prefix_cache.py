"""Names for full blocks: a hash chained over (parent, tokens), seeded by the tenant's salt.

Two blocks have one name only where all tokens up to and including theirs are equal, and the salt too.  128 bits of
BLAKE2b: a collision, accidental or sought, is out of reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from shared.packing import pack_tokens

DIGEST_BYTES = 16


def root_hash(salt: str, adapter: str = "") -> bytes:
    """The parent of a request's first block; `adapter`: the digest of what changes the model for it.

    The salt goes with its length where there is an adapter, so that no salt stands for another one's adapter.
    """
    salted = salt.encode("utf-8", "surrogatepass")
    if not adapter:
        return blake2b(salted, digest_size=DIGEST_BYTES, person=b"pageant-kv").digest()
    parts = len(salted).to_bytes(8, "little"), salted, adapter.encode()
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES, person=b"pageant-lora").digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> None:
    """Append the hashes of all full blocks of `token_ids` that `hashes` does not have yet."""
    parent = hashes[-1] if hashes else root
    hashes.extend(chained(parent, pack_tokens(token_ids[len(hashes) * block_size :]), block_size))


def tail_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash of fewer tokens than a block holds, behind the block of this hash: that of no full block, since what is
    hashed is shorter."""
    return blake2b(parent + pack_tokens(token_ids), digest_size=DIGEST_BYTES).digest()


def chained(parent: bytes, packed: bytes, block_size: int) -> Iterator[bytes]:
    """The hashes of all full blocks of packed token ids that follow on the block of this hash."""
    size = 4 * block_size  # bytes
    for end in range(size, len(packed) + 1, size):
        parent = blake2b(parent + packed[end - size : end], digest_size=DIGEST_BYTES).digest()
        yield parent
