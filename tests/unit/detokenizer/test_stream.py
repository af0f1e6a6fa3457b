"""One stream: splits, stop strings, finishes, usage, replays and gaps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.detokenizer.stream import StreamGapError, TextStream
from shared.messages import FinishReason, OpenStream, SequenceText, SequenceTokens, TokenLogprobs
from tests.unit.detokenizer.models import BUNDLED, factory, opened, splits, texts, token_ids, tokenizer

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def tokens(
    ids: list[int],
    offset: int = 0,
    finish: FinishReason | None = None,
    stop_token_id: int | None = None,
    logprobs: list[TokenLogprobs | None] | None = None,
) -> SequenceTokens:
    return SequenceTokens("r", 0, offset, ids, logprobs or [], finish, stop_token_id)


def feed(
    stream: TextStream, ids: list[int], cuts: list[slice], finish: FinishReason = FinishReason.LENGTH
) -> list[SequenceText]:
    """What a stream says to `ids` in batches; checks that offsets follow one another."""
    said: list[SequenceText] = []
    for cut in cuts:
        text = stream.advance(tokens(ids[cut], cut.start, finish if cut is cuts[-1] else None))
        if text is not None:
            assert text.text_offset == sum(len(earlier.text) for earlier in said)
            assert text.token_offset == sum(len(earlier.token_ids) for earlier in said)
            said.append(text)
        if stream.finish_reason is not None:
            break
    return said


def say(path: Path, stream: OpenStream, ids: list[int], **finish: object) -> SequenceText:
    said = TextStream(stream, factory(path)).advance(tokens(ids, **finish))  # type: ignore[arg-type]
    assert said is not None
    return said


def test_the_first_news_name_what_computes_and_bring_the_embedding() -> None:
    first = msgspec.structs.replace(opened(), fingerprint="fp_a", embedding=b"1234")
    said = feed(TextStream(first, factory(BUNDLED)), tokenizer(BUNDLED).encode("a b c"), [slice(0, 1), slice(1, 3)])
    assert [(text.fingerprint, text.embedding) for text in said] == [("fp_a", b"1234"), ("", None)]


def test_a_space_is_taken_from_what_follows_a_whole_prompt_without_text(spelled: Path) -> None:
    ids = tokenizer(spelled).encode_plain("Hello")
    for num_prompt_tokens, text in ((1, "Hello"), (40, " Hello")):
        stream = msgspec.structs.replace(opened(prompt=[1]), num_prompt_tokens=num_prompt_tokens)
        assert say(spelled, stream, ids).text == text, "of a long prompt only the end is known"


@relaxed
@given(data=st.data())
def test_any_split_gives_the_same_text_as_the_whole(paths: list[Path], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths))
    model = tokenizer(path)
    stream = opened(prompt=model.encode(data.draw(texts)), skip_special_tokens=data.draw(st.booleans()))
    ids = data.draw(token_ids(model))
    whole = say(path, stream, ids, finish=FinishReason.LENGTH)
    said = feed(TextStream(stream, factory(path)), ids, data.draw(splits(len(ids))))
    assert "".join(part.text for part in said) == whole.text
    assert [token_id for part in said for token_id in part.token_ids] == ids
    assert said[-1].finish_reason is FinishReason.LENGTH
    assert said[-1].num_output_tokens == len(ids)


@relaxed
@given(data=st.data())
def test_any_split_stops_at_the_same_place(paths: list[Path], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths))
    model = tokenizer(path)
    ids = model.encode_plain(data.draw(texts))
    stops = data.draw(
        st.lists(st.sampled_from(["o wor", "l", " ", "é", "👩‍👩", "文", "🦙a", "!!"]), min_size=1, max_size=3)
    )
    plain = say(path, opened(), ids, finish=FinishReason.LENGTH).text
    stream = opened(stop=stops, include=data.draw(st.booleans()), min_tokens=data.draw(st.integers(0, 3)))
    whole = say(path, stream, ids, finish=FinishReason.LENGTH)
    said = feed(TextStream(stream, factory(path)), ids, data.draw(splits(len(ids))))
    shown = "".join(part.text for part in said)
    assert plain.startswith(shown)
    assert shown == whole.text
    assert said[-1].stop_reason == whole.stop_reason
    assert said[-1].num_output_tokens == whole.num_output_tokens == sum(len(part.token_ids) for part in said)
    if not stream.min_tokens and not stream.include_stop_str_in_output:
        assert not any(stop in shown for stop in stops)


def test_tokens_past_the_stop_string_are_dropped() -> None:
    model = tokenizer(BUNDLED)
    ids = model.encode_plain("one two three four five")
    logprobs: list[TokenLogprobs | None] = [TokenLogprobs([token_id], [-1.0], 1) for token_id in ids]
    said = say(BUNDLED, opened(stop=[" three"]), ids, logprobs=logprobs)
    assert (said.text, said.finish_reason, said.stop_reason) == ("one two", FinishReason.STOP, " three")
    assert said.token_ids == ids[:3]
    assert len(said.logprobs) == 3
    assert said.num_output_tokens == 3


def test_a_stop_string_within_min_tokens_is_let_pass() -> None:
    model = tokenizer(BUNDLED)
    ids = model.encode_plain("one two three two four")
    said = say(BUNDLED, opened(stop=[" two"], min_tokens=2), ids)
    assert said.text == "one two three"
    assert said.num_output_tokens == 4


def test_a_stop_string_in_the_last_token_wins_over_length() -> None:
    ids = tokenizer(BUNDLED).encode_plain("one two")
    said = say(BUNDLED, opened(stop=["two"]), ids, finish=FinishReason.LENGTH)
    assert (said.text, said.finish_reason) == ("one ", FinishReason.STOP)


def test_what_is_held_back_comes_with_the_finish() -> None:
    model = tokenizer(BUNDLED)
    stream = TextStream(opened(stop=["two three"]), factory(BUNDLED))
    ids = model.encode_plain("one two")
    first = stream.advance(tokens(ids))
    assert first is not None and first.text == "one "
    last = stream.advance(tokens(model.encode_plain("🦙")[:1], 2, FinishReason.LENGTH))
    assert last is not None and last.text == "two\ufffd"


def test_what_is_held_back_comes_with_a_finish_without_tokens() -> None:
    stream = TextStream(opened(stop=["two three"]), factory(BUNDLED))
    stream.advance(tokens(tokenizer(BUNDLED).encode_plain("one two")))
    last = stream.advance(tokens([], 2, FinishReason.LENGTH))
    assert last is not None and (last.text, last.finish_reason) == ("two", FinishReason.LENGTH)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stop_token_is_the_reason_of_a_stop_alone(finish: FinishReason) -> None:
    ids = tokenizer(BUNDLED).encode_plain("one two")
    said = say(BUNDLED, opened(), ids, finish=finish, stop_token_id=None if finish is FinishReason.STOP else ids[-1])
    assert (said.finish_reason, said.stop_reason) == (finish, "")


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "one<|im_end|>")])
def test_a_stop_token_is_reported_but_not_shown(data_dir: Path, include: bool, text: str) -> None:
    path = data_dir / "tokenizers/qwen3"
    ids = tokenizer(path).encode_plain("one<|im_end|>")
    stream = opened(include=include, skip_special_tokens=False)
    said = say(path, stream, ids, finish=FinishReason.STOP, stop_token_id=ids[-1])
    assert (said.text, said.stop_reason, said.token_ids) == (text, str(ids[-1]), ids)


def test_special_tokens_are_skipped_even_where_the_tokenizer_normalizes_them(data_dir: Path) -> None:
    path = data_dir / "models/tinystories-656k"
    assert say(path, opened(prompt=[1, 80]), [2]).text == ""


def test_without_detokenizing_only_ids_come() -> None:
    said = say(BUNDLED, opened(detokenize=False), [1, 2, 3], finish=FinishReason.LENGTH)
    assert (said.text, said.token_ids) == ("", [1, 2, 3])


def test_ids_go_on_while_text_is_held_back() -> None:
    ids = tokenizer(BUNDLED).encode_plain("🦙")
    stream = TextStream(opened(), factory(BUNDLED))
    said = [stream.advance(tokens([token_id], n)) for n, token_id in enumerate(ids)]
    assert [part and part.text for part in said] == [""] * (len(ids) - 1) + ["🦙"]


def test_a_replay_brings_nothing_twice() -> None:
    model = tokenizer(BUNDLED)
    ids = model.encode_plain("one two three")
    stream = TextStream(opened(), factory(BUNDLED))
    assert stream.advance(tokens(ids[:2])) is not None
    assert stream.advance(tokens(ids[:2])) is None
    assert stream.advance(tokens(ids[:1])) is None
    said = stream.advance(tokens(ids, 0))
    assert said is not None and (said.text, said.token_offset, said.text_offset) == (" three", 2, 7)
    finish = stream.advance(tokens(ids, 0, FinishReason.LENGTH))
    assert finish is not None and (finish.text, finish.token_ids, finish.num_output_tokens) == ("", [], 3)


def test_a_gap_is_an_error() -> None:
    with pytest.raises(StreamGapError):
        TextStream(opened(), factory(BUNDLED)).advance(tokens([1], 1))


def test_usage_and_prompt_logprobs() -> None:
    prompt_logprobs: list[TokenLogprobs | None] = [None, TokenLogprobs([5], [-0.5], 1)]
    stream = OpenStream(opened().header, 0, 7, [1], [], False, True, True, 0, 4, prompt_logprobs)
    decoding = TextStream(stream, factory(BUNDLED))
    last = msgspec.structs.replace(tokens([6], 1, FinishReason.LENGTH), num_draft_tokens=4, num_accepted_tokens=3)
    first, second = decoding.advance(tokens([5])), decoding.advance(last)
    assert first is not None and second is not None
    assert first.prompt_logprobs == prompt_logprobs and second.prompt_logprobs is None
    assert (second.num_prompt_tokens, second.num_cached_tokens, second.num_output_tokens) == (7, 4, 2)
    assert (second.num_draft_tokens, second.num_accepted_tokens) == (4, 3)
