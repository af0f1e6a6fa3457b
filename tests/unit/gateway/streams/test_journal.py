"""The journal of streams: its bounds, and what a prompt weighs."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.streams.journal import StreamJournal, prompt_bytes
from services.gateway.streams.stream import Stream
from shared.errors import RejectCode, RequestError
from shared.messages import ChatMessage, ChatOptions, EncodeRequest, RequestHeader, TokenizeRequest
from shared.messages.requests import ToolCall
from shared.requests.sampling import SamplingParams


def stream(request_id: str, size: int = 0) -> Stream:
    request = TokenizeRequest(RequestHeader(request_id, "g"), SamplingParams(), text="x" * size)
    return Stream(request, "memory://tokenizer")


@pytest.mark.parametrize(
    ("prompt", "size"),
    [
        ({}, 0),
        ({"text": "abc"}, 3),
        ({"token_ids": b"12345678"}, 8),
        ({"chat": [ChatMessage("user", "abcd"), ChatMessage("assistant", "ef", reasoning="ghi")]}, 9),
        ({"chat": [ChatMessage("a", "x", tool_calls=[ToolCall("1", "f", "{}"), ToolCall("2", "g", "[1]")])]}, 6),
        ({"text": "ab", "chat_options": ChatOptions(tools="[12]", template_args="{}")}, 8),
    ],
)
def test_every_part_of_a_prompt_weighs(prompt: dict[str, Any], size: int) -> None:
    assert prompt_bytes(TokenizeRequest(RequestHeader("r", "g"), SamplingParams(), **prompt)) == size
    without_ids = {name: value for name, value in prompt.items() if name != "token_ids"}
    expected = 0 if "token_ids" in prompt else size
    assert prompt_bytes(EncodeRequest("q", "g", **without_ids)) == expected


def test_it_takes_streams_and_bytes_up_to_its_limits() -> None:
    journal = StreamJournal(max_streams=2, max_bytes=10)
    journal.add(stream("a", 4))
    journal.add(stream("b", 6))
    with pytest.raises(RequestError, match="2 streams are open at this gateway, the limit is 2") as refused:
        journal.add(stream("c", 0))
    assert refused.value.code is RejectCode.RESOURCE_EXHAUSTED and refused.value.retry_after_ms == 1000
    assert (len(journal), journal.num_bytes) == (2, 10)


def test_one_prompt_may_be_larger_than_all_may_be_together() -> None:
    journal = StreamJournal(max_streams=9, max_bytes=10)
    journal.add(stream("a", 11))
    with pytest.raises(RequestError, match="11 bytes of prompts are open"):
        journal.add(stream("b", 0))


def test_a_stream_that_another_one_replaced_takes_nothing_with_it() -> None:
    journal = StreamJournal(max_streams=9, max_bytes=100)
    old, new = stream("a", 5), stream("a", 7)
    journal.add(old)
    journal.remove(old)
    journal.add(new)
    journal.remove(old)
    assert journal.get("a") is new and journal.num_bytes == 7 and list(journal) == [new]
