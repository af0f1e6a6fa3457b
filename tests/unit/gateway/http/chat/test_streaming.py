"""From a sequence's tokens to its client: what a stream adds up to is the whole answer, however the tokens come.

Ten thousand random splits of answers with thoughts, calls, CJK and emoji, whose characters are several tokens each: in
the bundled byte-level vocabulary, and in one that falls back on single bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.stream import TextStream
from services.gateway.http.chat.answer import DeltaBuilder, message_of
from services.gateway.http.conversation.reader import AnswerReader
from services.gateway.http.parsing.registry import OutputParser, make_reasoning_parser, make_tool_parser
from shared.messages import FinishReason, SequenceTokens
from shared.text.tokenization import ModelTokenizer, load_tokenizer
from tests.unit.detokenizer.models import opened

NUM_SPLITS = 10_000
SPLITS_OF_EACH = 25
MODEL = Path(__file__).resolve().parents[5] / "models" / "pageant-stories"
THOUGHTS = ["Rome", "北京", "서울", "日本語", "🦊🎉", "👩\u200d👩\u200d👧", "🇩🇪", "naïve", "e\u0301"]
WORDS = [*THOUGHTS, "<think", "</tool", "{[", "}]", '\\"', "\n", "a b"]


def falling_back(folder: Path) -> None:
    """A tokenizer that has a few words, and all else as tokens of one byte."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abehnt", "th", "the", "▁the", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(params=["byte-level", "byte-fallback"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelTokenizer:
    if request.param == "byte-level":
        return load_tokenizer(MODEL)
    falling_back(tmp_path)
    return load_tokenizer(tmp_path)


def answer(rng: random.Random) -> str:
    thought = " ".join(rng.choices(THOUGHTS, k=rng.randrange(3)))
    text = f"<think>{thought}</think>" + " ".join(rng.choices(WORDS, k=rng.randrange(6)))
    for _ in range(rng.randrange(3)):
        arguments = json.dumps({rng.choice(WORDS): rng.choice(WORDS)}, ensure_ascii=rng.random() < 0.3)
        text += f'<tool_call>{{"name": "f{rng.randrange(9)}", "arguments": {arguments}}}</tool_call>'
    return text


def batches(ids: list[int], rng: random.Random) -> list[list[int]]:
    """The ids in pieces of one token to many, as steps, drafts and slow readers make them."""
    longest, found, place = rng.choice([1, 2, 5, 40]), [], 0
    while place < len(ids):
        found.append(ids[place : place + rng.randint(1, longest)])
        place += len(found[-1])
    return found


def said(factory: DecoderFactory, pieces: Iterable[list[int]]) -> list[str]:
    """What the detokenizer makes of them."""
    stream, place, texts = TextStream(opened(skip_special_tokens=False), factory), 0, []
    listed = list(pieces)
    for number, ids in enumerate(listed):
        end = FinishReason.STOP if number == len(listed) - 1 else None
        told = stream.advance(SequenceTokens("r", 0, place, ids, [], end, None))
        texts.append(told.text if told is not None else "")
        place += len(ids)
    return texts


def reader() -> AnswerReader:
    return AnswerReader(
        OutputParser(make_reasoning_parser("qwen3"), make_tool_parser("hermes")), parallel=True, reasoning=True
    )


Answer = tuple[str, str, list[tuple[str, str]]]  # content, thought, and names with arguments of calls


def whole(text: str) -> Answer:
    read = reader()
    message = message_of(read.feed(text) + read.finish())
    calls = [(str(call.function.name), call.function.arguments) for call in message.tool_calls or []]
    return message.content or "", message.reasoning_content or "", calls


def streamed(texts: list[str]) -> Answer:
    """What a client adds up from a stream's deltas."""
    builder, read = DeltaBuilder(), reader()
    deltas = [delta for text in texts for delta in builder.deltas(read.feed(text))] + builder.deltas(read.finish())
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls or []):
        if call.function.name:
            calls.append((str(call.function.name), ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + call.function.arguments)
    content = "".join(delta.content or "" for delta in deltas)
    return content, "".join(delta.reasoning_content or "" for delta in deltas), calls


def test_a_stream_adds_up_to_the_whole_however_its_tokens_come(model: ModelTokenizer) -> None:
    rng = random.Random(7)
    factory = DecoderFactory(model)
    num_splits = num_calls = num_byte_tokens = 0
    while num_splits < NUM_SPLITS // 2:
        text = answer(rng)
        ids = model.encode_plain(text)
        assert "".join(said(factory, [ids])) == text
        expected = whole(text)
        num_calls += len(expected[2])
        num_byte_tokens += len(ids)
        for _ in range(SPLITS_OF_EACH):
            texts = said(factory, batches(ids, rng))
            assert "".join(texts) == text
            assert streamed(texts) == expected
        num_splits += SPLITS_OF_EACH
    assert num_calls > 100 and num_byte_tokens > 20 * num_splits / SPLITS_OF_EACH
