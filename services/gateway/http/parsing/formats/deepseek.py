"""DeepSeek's formats: V3 with a fence around the arguments, V3.1 without, and V3.2's tags of DSML (see parameters.py);
and Kimi K2's, which is built alike."""

from __future__ import annotations

import re

from services.gateway.http.parsing.reading.parts import CallFormat
from services.gateway.http.parsing.reading.tagged import JsonArgumentsParser, Tags

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
NUMBERED = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")


class DeepSeekV3Parser(JsonArgumentsParser):
    keeps_special_tokens = True
    tags = Tags((BEGIN, CALL), CALL, ("\n", "{"), CALL_END, (END,))
    form = CallFormat(
        f"{BEGIN}{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}", f"\n{CALL}function{SEPARATOR}", END,
        quoted=False,
    )  # fmt: skip

    def _clean(self, heading: str) -> str:
        return heading.partition(SEPARATOR)[2].strip()

    def _takes(self, tag: str) -> bool:
        return tag != "{"


class DeepSeekV31Parser(JsonArgumentsParser):
    keeps_special_tokens = True
    tags = Tags((BEGIN, CALL), CALL, (SEPARATOR,), CALL_END, (END,))
    form = CallFormat(f"{BEGIN}{CALL}", SEPARATOR, CALL_END, CALL, END, quoted=False)


class KimiK2Parser(JsonArgumentsParser):
    """Names are `functions.NAME:0`, with the number of the call in the conversation."""

    keeps_special_tokens = True
    tags = Tags((KIMI_BEGIN, KIMI_CALL), KIMI_CALL, (KIMI_ARGUMENTS,), KIMI_CALL_END, (KIMI_END,))
    form = CallFormat(
        f"{KIMI_BEGIN}{KIMI_CALL}functions.", KIMI_ARGUMENTS, KIMI_CALL_END, f"{KIMI_CALL}functions.", KIMI_END,
        quoted=False, number=":",
    )  # fmt: skip

    def _clean(self, heading: str) -> str:
        found = NUMBERED.fullmatch(heading.strip())
        return found[1] if found else ""
