"""What other APIs send as items or blocks becomes the messages of a chat."""

from __future__ import annotations

import pytest

from services.gateway.http.conversation.blocks import Blocks, Closed, Grown, Kind, Opened
from services.gateway.http.conversation.turns import Turns
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Content, Reasoning
from shared.errors import RequestError


def test_an_assistant_s_turn_is_one_message() -> None:
    turns = Turns()
    turns.said("developer", "Be kind", "a")
    turns.thought("hm", "b")
    turns.said("assistant", "I look", "c")
    turns.called("1", "f", "", "d")
    turns.called("2", "g", '{"x": 1}', "e")
    turns.answered("2", "found", "f")
    turns.thought("so", "g")
    said = [(one.role, one.content, one.reasoning, one.name, len(one.tool_calls)) for one in turns.messages]
    assert said == [
        ("system", "Be kind", "", "", 0), ("assistant", "I look", "hm", "", 2), ("tool", "found", "", "g", 0),
        ("assistant", "", "so", "", 0),
    ]  # fmt: skip
    assert turns.names == ["a", "b", "f", "g"]
    assert [call.arguments for call in turns.messages[1].tool_calls] == ["{}", '{"x": 1}']


@pytest.mark.parametrize("merges", [False, True])
def test_neighbours_are_merged_where_an_api_says_so(merges: bool) -> None:
    turns = Turns(merges=merges)
    for role in ("system", "system", "user", "user", "assistant", "assistant"):
        turns.said(role, role[0], role)
    said = [(one.role, one.content) for one in turns.messages]
    assert said[:2] == [("system", "s"), ("system", "s")]
    merged = [("user", "u\nu"), ("assistant", "a\na")]
    assert said[2:] == (merged if merges else [("user", "u")] * 2 + [("assistant", "a")] * 2)


def test_a_chat_without_a_message_is_refused() -> None:
    with pytest.raises(RequestError, match="input must contain"):
        Turns().check("input")


def test_blocks_are_opened_grown_and_closed_in_order() -> None:
    blocks = Blocks()
    changes = blocks.take([Reasoning("h"), Reasoning("m"), Content("Yes"), CallBegun("f"), CallArguments("{}")])
    changes += blocks.take([CallBegun("g"), Content("So")])
    blocks.close(changes)
    blocks.close(changes)
    kinds = [(type(change), change.block.place) for change in changes]
    assert kinds == [
        (Opened, 0), (Grown, 0), (Grown, 0), (Closed, 0), (Opened, 1), (Grown, 1), (Closed, 1), (Opened, 2), (Grown, 2),
        (Closed, 2), (Opened, 3), (Closed, 3), (Opened, 4), (Grown, 4), (Closed, 4),
    ]  # fmt: skip
    assert [(block.kind, block.name, block.text) for block in blocks.all] == [
        (Kind.REASONING, "", "hm"), (Kind.TEXT, "", "Yes"), (Kind.CALL, "f", "{}"), (Kind.CALL, "g", ""),
        (Kind.TEXT, "", "So"),
    ]  # fmt: skip
