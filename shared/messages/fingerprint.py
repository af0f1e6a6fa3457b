"""What a service computes with, named part by part: two that agree in every part give the same bits.

The wire's form of it.  Each service makes its parts: `engine.loading.fingerprint` for a worker,
`shared.text.text_digest` for those that have the tokenizer alone.
"""

from __future__ import annotations

import hashlib

import msgspec

from shared.messages.base import Message

NAME_DIGITS = 12  # hexadecimal


class Fingerprint(Message, frozen=True):
    """Everything that can change a bit of an output.  Digests are hexadecimal.

    A part that a service has nothing to do with is empty.
    """

    tokenizer: str = ""  # digest of its files
    chat_template: str = ""  # digest
    generation_config: str = ""  # digest: the defaults of what a request leaves open
    load_format: str = ""
    weights: str = ""  # digest of every tensor: name, format, shape, content
    config: str = ""  # digest of what config.json says of the model
    executor: str = ""  # native or torch, in which version
    numeric_class: str = ""  # processors of one class give the same bits
    dtype: str = ""  # of the arithmetic
    quantization: str = ""
    kv_cache_dtype: str = ""
    batch_invariant: str = ""
    block_size: str = ""  # where a bit hangs on it

    @property
    def name(self) -> str:
        """Short, for clients: OpenAI's `system_fingerprint`."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.astuple(self)))
        return f"fp_{digest.hexdigest()[:NAME_DIGITS]}"


TEXT_PARTS = ("tokenizer", "chat_template", "generation_config")
PARTS = Fingerprint.__struct_fields__


def difference(mine: Fingerprint, theirs: Fingerprint, whose: str) -> str:
    """In words, every part in which the two differ; empty where none does.

    A part that either of them does not have is not compared.
    """
    found = []
    for part in PARTS:
        one, other = getattr(mine, part), getattr(theirs, part)
        if one and other and one != other:
            found.append(f"its {part} is {one!r}, that of {whose} is {other!r}")
    return "; ".join(found)
