"""Prompts from files of JSON lines, in the shapes that public sets have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shared.workload.prompts import ChatPrompt, TextPrompt
from shared.workload.requests import LoadRequest

FIELDS = ("prompt", "question", "text", "turns")


def read_prompts(path: Path, max_tokens: int, *, chat: bool = False) -> list[LoadRequest]:
    """One request for each line, all at time 0; of several turns the first.

    A line is an object with the prompt under `prompt`, `question`, `text` or `turns`, and may say `output_tokens`.
    Raises ValueError naming file and line where it is not.
    """
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=dict[str, Any])
            text = _text_of(entry)
            length = int(entry.get("output_tokens") or max_tokens)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        requests.append(LoadRequest(ChatPrompt(text) if chat else TextPrompt(text), 0, length))
    return requests


def _text_of(entry: dict[str, Any]) -> str:
    name = next((name for name in FIELDS if entry.get(name)), None)
    if name is None:
        raise ValueError(f"has none of {', '.join(FIELDS)}")
    value = entry[name][0] if isinstance(entry[name], list) else entry[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")
    return value
