"""Names for full blocks: a hash chained over (parent, tokens), seeded by the tenant's salt.

Two blocks have one name only where all tokens up to and including theirs are equal, and the salt too.  128 bits of
BLAKE2b: a collision, accidental or sought, is out of reach.
"""

from __future__ import annotations

from hashlib import blake2b

from shared.packing import pack_tokens

DIGEST_BYTES = 16


def root_hash(salt: str) -> bytes:
    """The parent of a request's first block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"pageant-kv").digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> None:
    """Append the hashes of all full blocks of `token_ids` that `hashes` does not have yet."""
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else root
        tokens = pack_tokens(token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest())
