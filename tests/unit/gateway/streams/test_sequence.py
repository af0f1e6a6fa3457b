"""One sequence's journal: what of its news is queued for the client, in which deltas, and when that is a hole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.streams.stream import (
    MAX_DELTA_BYTES,
    OutputLostError,
    Position,
    SequenceJournal,
    StreamDelta,
    packed,
)
from shared.errors import ProtocolError
from shared.messages import FinishReason, SequenceText, TokenLogprobs


def news(text: str, tokens: list[int], at: tuple[int, int] = (0, 0), **more: Any) -> SequenceText:
    return SequenceText("r", 0, token_offset=at[0], text_offset=at[1], text=text, token_ids=tokens, **more)


def logprob(token_id: int, *others: int) -> TokenLogprobs:
    return TokenLogprobs([token_id, *others], [-1.0] * (1 + len(others)), 1)


class Queue:
    """A journal and what it queues."""

    def __init__(self, has: Position | None = None) -> None:
        self.deltas: list[StreamDelta] = []
        self.journal = SequenceJournal(0, has)

    def hear(self, *args: Any, **more: Any) -> bool:
        return self.journal.accept(news(*args, **more), self.deltas)

    @property
    def whole(self) -> StreamDelta:
        gathered = StreamDelta(0)
        for delta in self.deltas:
            gathered.extend(delta)
        return gathered


def test_a_delta_weighs_what_it_takes_on_the_wire() -> None:
    delta = StreamDelta(0)
    delta.add("abc", [1, 2])
    assert delta.num_bytes == 3 + 2 * 4
    delta.add("", [3])
    assert delta.num_bytes == 3 + 3 * 4 and delta.text == ["abc"] and delta.token_ids == [1, 2, 3]
    delta.add_logprobs([logprob(1, 8), None], [None, logprob(9)])
    assert delta.num_bytes == 3 + 3 * 4 + 3 * 12
    assert delta.logprobs == [logprob(1, 8), None] and delta.prompt_logprobs == [None, logprob(9)]
    delta.add_logprobs([logprob(2)], None)
    assert delta.num_bytes == 3 + 3 * 4 + 4 * 12 and len(delta.prompt_logprobs) == 2


def test_a_delta_that_is_gathered_has_all_parts_and_the_last_end() -> None:
    end = news("", [])
    whole = StreamDelta(0)
    whole.extend(StreamDelta(0, ["a"], [1], [logprob(1)], [None], end=end))
    whole.extend(StreamDelta(0, ["b"], [2], [logprob(2)], [logprob(5)]))
    assert (whole.text, whole.token_ids) == (["a", "b"], [1, 2])
    assert (whole.logprobs, whole.prompt_logprobs) == ([logprob(1), logprob(2)], [None, logprob(5)])
    assert whole.end is end
    later = news("z", [])
    whole.extend(StreamDelta(0, end=later))
    assert whole.end is later


@pytest.mark.parametrize("part", [{"text": ["a"]}, {"logprobs": [None]}, {"prompt_logprobs": [None]}])
def test_a_delta_with_something_to_show_is_not_empty(part: dict[str, Any]) -> None:
    assert not StreamDelta(0, **part).empty


def test_news_that_were_all_sent_before_queue_nothing() -> None:
    queue = Queue()
    assert queue.hear("ab", [1, 2])
    assert not queue.hear("ab", [1, 2]) and not queue.hear("", []) and not queue.hear("a", [1])
    assert queue.hear("c", [], at=(2, 2)), "text that came late, of tokens that are there"
    assert queue.hear("", [3], at=(2, 3)), "a token whose text is held back"
    assert (queue.whole.text, queue.whole.token_ids) == (["ab", "c"], [1, 2, 3])
    assert (queue.journal.num_chars, list(queue.journal.token_ids)) == (3, [1, 2, 3])


def test_nothing_comes_behind_the_end() -> None:
    queue = Queue()
    assert queue.hear("a", [1], finish_reason=FinishReason.STOP)
    assert not queue.hear("ab", [1, 2]) and not queue.hear("z", [9], at=(5, 5))
    assert queue.whole.token_ids == [1]


def test_the_end_is_news_by_itself() -> None:
    queue = Queue()
    assert queue.hear("a", [1])
    queue.journal.taken()
    assert queue.hear("a", [1], finish_reason=FinishReason.LENGTH)
    first, last = queue.deltas
    assert first.end is None and last.end is not None and last.text == [] and last.token_ids == []


def test_logprobs_are_those_of_the_new_tokens_alone() -> None:
    queue = Queue()
    queue.hear("ab", [1, 2], logprobs=[logprob(1), logprob(2)], prompt_logprobs=[None, logprob(7)])
    queue.hear("bc", [2, 3], at=(1, 1), logprobs=[logprob(2), logprob(3)], prompt_logprobs=[None, logprob(7)])
    assert queue.whole.logprobs == [logprob(1), logprob(2), logprob(3)]
    assert queue.whole.prompt_logprobs == [None, logprob(7)], "once, with the first tokens"


def test_the_prompt_s_logprobs_come_where_no_token_has_any() -> None:
    queue = Queue()
    queue.hear("a", [1], prompt_logprobs=[None, logprob(7)])
    assert (queue.whole.logprobs, queue.whole.prompt_logprobs) == ([], [None, logprob(7)])


def test_a_client_that_is_back_gets_what_it_lacks() -> None:
    queue = Queue(Position(num_tokens=2, num_chars=3))
    assert queue.hear("ab", [1], logprobs=[logprob(1)], prompt_logprobs=[None]), "it came, though nothing is shown"
    assert queue.deltas == []
    queue.hear("cd", [2, 3], at=(1, 2), logprobs=[logprob(2), logprob(3)])
    assert (queue.whole.text, queue.whole.token_ids, queue.whole.logprobs) == (["d"], [3], [logprob(3)])
    queue.hear("cde", [2, 3, 4], at=(1, 2), logprobs=[logprob(2), logprob(3), logprob(4)])
    assert (queue.whole.text, queue.whole.token_ids) == (["d", "e"], [3, 4])
    assert queue.whole.logprobs == [logprob(3), logprob(4)] and queue.whole.prompt_logprobs == []


def test_overlapping_news_for_a_client_that_is_back() -> None:
    queue = Queue(Position(num_tokens=3))
    queue.hear("a", [1], logprobs=[logprob(1)])
    ids = [1, 2, 3, 4, 5]
    queue.hear("abcde", ids, logprobs=[logprob(n) for n in ids], prompt_logprobs=[None])
    assert queue.whole.token_ids == [4, 5] and queue.whole.logprobs == [logprob(4), logprob(5)]
    assert queue.whole.prompt_logprobs == [], "it has had those too"


def test_a_delta_grows_until_it_is_as_large_as_a_message_should_be() -> None:
    queue = Queue()
    text = "x" * MAX_DELTA_BYTES
    queue.hear(text, [])
    queue.hear("y", [], at=(0, len(text)))
    assert [delta.num_bytes for delta in queue.deltas] == [MAX_DELTA_BYTES + 1], "it was not yet too large"
    queue.hear("z", [], at=(0, len(text) + 1))
    assert [delta.num_bytes for delta in queue.deltas] == [MAX_DELTA_BYTES + 1, 1]
    queue.journal.taken()
    queue.hear("!", [], at=(0, len(text) + 2))
    assert [delta.text for delta in queue.deltas[1:]] == [["z"], ["!"]]


def test_a_hole_is_told_of_once_and_another_one_again() -> None:
    queue = Queue()
    queue.hear("a", [1])
    with pytest.raises(OutputLostError, match="at token 3 and character 3, expected 1 and 1"):
        queue.hear("d", [4], at=(3, 3))
    assert not queue.hear("e", [5], at=(4, 4))
    assert queue.hear("abc", [1, 2, 3]), "what was missing has come"
    with pytest.raises(OutputLostError):
        queue.hear("z", [9], at=(8, 8))
    assert queue.whole.token_ids == [1, 2, 3]


def test_what_the_first_news_say_of_the_cache_holds_to_the_end() -> None:
    queue = Queue()
    queue.hear("a", [1], num_cached_tokens=6)
    queue.hear("b", [2], at=(1, 1), num_cached_tokens=0)
    assert queue.journal.num_cached_tokens == 6
    last = news("c", [3], at=(2, 2), num_cached_tokens=0, finish_reason=FinishReason.STOP)
    queue.journal.accept(last, queue.deltas)
    assert queue.whole.end == msgspec.structs.replace(last, num_cached_tokens=6)


def test_an_id_that_no_vocabulary_has_is_refused_and_nothing_of_it_is_kept() -> None:
    assert list(packed([1, 2])) == [1, 2]
    queue = Queue()
    with pytest.raises(ProtocolError):
        queue.hear("a", [1 << 40], finish_reason=FinishReason.STOP)
    assert queue.deltas == [] and not queue.journal.finished and queue.hear("a", [1])
