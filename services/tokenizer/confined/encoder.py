"""One child that tokenizes huge texts: python -m services.tokenizer.confined.encoder

Within the tokenizer's own process a million tokens would hold the interpreter's lock for half a second when they are
freed.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

from services.tokenizer.confined.confinement import serve
from services.tokenizer.confined.frames import Encoded, EncodeJob, EncodeSetup
from shared.packing import pack_tokens


def prepare(setup: EncodeSetup) -> Callable[[EncodeJob], Encoded]:
    tokenizer = Tokenizer.from_str(setup.tokenizer)

    def encode(job: EncodeJob) -> Encoded:
        try:
            return Encoded(pack_tokens(tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens).ids))
        except Exception as error:  # what the binding raises has no other class
            return Encoded(error=f"cannot be tokenized: {type(error).__name__}")

    return encode


if __name__ == "__main__":
    serve(EncodeSetup, EncodeJob, prepare)
