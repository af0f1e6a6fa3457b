"""One child that tokenizes huge texts: python -m services.tokenizer.encoder

Within the tokenizer's own process, a million tokens would hold the interpreter's lock for a second or two when they
are made into a list and thrown away.  It is confined before it sees a text (`services.tokenizer.confinement`).
"""

from __future__ import annotations

import os
import sys

import msgspec
from tokenizers import Tokenizer

from services.tokenizer.confinement import confine, die_with_parent, limit_cpu, read_frame
from services.tokenizer.frames import Encoded, EncodeJob, EncodeSetup, to_frame
from shared.packing import pack_tokens


def main() -> None:
    """Serve until the parent closes the pipe."""
    die_with_parent(os.getppid())
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    frame = read_frame(requests)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=EncodeSetup)
    tokenizer = Tokenizer.from_str(setup.tokenizer)
    confine(setup.max_memory)
    jobs = msgspec.msgpack.Decoder(EncodeJob)
    while (frame := read_frame(requests)) is not None:
        limit_cpu(setup.max_cpu_seconds)
        answers.write(to_frame(encode_one(tokenizer, jobs.decode(frame))))
        answers.flush()


def encode_one(tokenizer: Tokenizer, job: EncodeJob) -> Encoded:
    try:
        return Encoded(pack_tokens(tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens).ids))
    except Exception as error:  # what the binding raises has no other class
        return Encoded(error=f"cannot be tokenized: {type(error).__name__}")


if __name__ == "__main__":
    main()
