"""The parts of a fingerprint that decide about text: the tokenizer's files, the chat template, the defaults.

Two with the same parts tokenize, render and decode alike.  Knows files; must never know torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.messages.fingerprint import Fingerprint

DIGEST_BYTES = 8


def text_fingerprint(directory: Path) -> Fingerprint:
    """The text parts alone; a part whose files are not there is empty."""
    config = _read(directory / "tokenizer_config.json")
    template = b""
    try:
        content: Any = json.loads(config)
        if isinstance(content, dict) and (named := content.pop("chat_template", None)):
            template = _canonical(named)
            config = _canonical(content)
    except ValueError:
        pass  # its reader reports the error; here any content counts as it is
    template += _read(directory / "chat_template.jinja")
    tokenizer = _read(directory / "tokenizer.json")
    special = _read(directory / "special_tokens_map.json")
    return Fingerprint(
        tokenizer=digest_of(tokenizer, config, special) if tokenizer else "",
        chat_template=digest_of(template),
        generation_config=digest_of(_read(directory / "generation_config.json")),
    )


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def digest_of(*contents: bytes) -> str:
    """Hexadecimal, short."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for content in contents:
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.hexdigest()
