"""The formats of calls and reasoning in one deployment: as settings name them, or as the chat template shows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from services.gateway.http.parsing.detection import reasoning_format, tool_format
from services.gateway.http.parsing.registry import REASONING_FORMATS, ReasoningFormat
from shared.config import GatewaySettings
from shared.messages import DescribeResult
from shared.requests.reasoning import ReasoningTags

AUTO = "auto"


class AnswerFormats:
    """`describe` gives the tokenizer's configuration, and the token ids of texts.  Each is asked once, and only where a
    setting is `auto`, or reasoning is told from the answer."""

    def __init__(
        self, settings: GatewaySettings, describe: Callable[[Sequence[str]], Awaitable[DescribeResult]]
    ) -> None:
        self.tools: str = settings.tool_call_parser
        self.reasoning: str = settings.reasoning_parser
        self.closes_tools = settings.closed_objects != "none"  # a call's arguments are what its schema names, no more
        self.tags: ReasoningTags | None = None  # None where the model's tokenizer has no tokens for them
        self._describe = describe
        self._knows_tags = False

    async def learn(self) -> None:
        """Know them from here on; raises RequestError where no tokenizer answers."""
        if AUTO in (self.tools, self.reasoning):
            config = msgspec.json.decode((await self._describe(())).config)
            template = str(config.get("chat_template") or "")
            self.tools = tool_format(template) if self.tools == AUTO else self.tools
            self.reasoning = reasoning_format(template) if self.reasoning == AUTO else self.reasoning
        if not self._knows_tags and (form := REASONING_FORMATS.get(self.reasoning)) is not None:
            self.tags = _tags_of(form, (await self._describe(form.texts)).token_ids)
        self._knows_tags = True


def _tags_of(form: ReasoningFormat, found: list[list[int]]) -> ReasoningTags | None:
    count = len(form.begin)
    begin, ends, leads = found[:count], found[count:-1], found[-1]
    if any(len(ids) != 1 for ids in (*begin, *ends)):
        return None
    return ReasoningTags([ids[0] for ids in begin], ends, [*ends[0], *leads])
