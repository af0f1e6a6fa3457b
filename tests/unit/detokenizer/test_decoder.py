"""Incremental decoding against decoding the whole at once, over real tokenizers."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace, WordPiece
from tokenizers.models import WordLevel

from services.detokenizer.decoder import REPLACEMENT, DecoderFactory, PieceDecoder, TextDecoder, WindowDecoder
from shared.text.pieces import make_pieces
from shared.text.tokenization import ModelTokenizer
from tests.unit.detokenizer.models import BUNDLED, factory, texts, token_ids, tokenizer

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def offline(model: ModelTokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    before = model.decode(prompt, skip_special_tokens=skip)
    return model.decode([*prompt, *ids], skip_special_tokens=skip)[len(before) :]


def whole(decoder: TextDecoder, ids: list[int]) -> str:
    return "".join([*(decoder.push(token_id) for token_id in ids), decoder.finish()])


def is_well_defined(model: ModelTokenizer, ids: list[int], skip: bool) -> bool:
    """Whether no run of byte tokens mixes complete characters with broken ones."""
    pieces = make_pieces(model)
    assert pieces is not None
    if pieces.merges_invalid:
        return True
    run = b""
    for piece in [*(pieces.get(token_id, skip_special_tokens=skip) for token_id in ids), "end"]:
        if isinstance(piece, bytes):
            run += piece
        elif piece:
            complete = run.decode(errors="ignore")
            if complete and complete.encode() != run:
                return False
            run = b""
    return True


@relaxed
@given(data=st.data())
def test_any_tokens_give_the_offline_text(paths: list[Path], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths))
    model = tokenizer(path)
    prompt = model.encode(data.draw(texts))
    ids = data.draw(token_ids(model))
    skip = data.draw(st.booleans())
    decoder = factory(path).make(prompt, whole_prompt=True, skip_special_tokens=skip)
    assert isinstance(decoder, PieceDecoder)
    text = whole(decoder, ids)
    if is_well_defined(model, [*prompt, *ids], skip):
        assert text == offline(model, prompt, ids, skip)


@relaxed
@given(data=st.data())
def test_text_goes_through_unharmed_and_never_in_halves(paths: list[Path], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths))
    model = tokenizer(path)
    text = data.draw(texts).replace(REPLACEMENT, "")
    ids = model.encode_plain(text)
    expected = model.decode([*model.encode("x"), *ids], skip_special_tokens=False).removeprefix(
        model.decode(model.encode("x"), skip_special_tokens=False)
    )
    decoder = factory(path).make(model.encode("x"), whole_prompt=True, skip_special_tokens=False)
    shown = ""
    for token_id in ids:
        shown += decoder.push(token_id)
        assert REPLACEMENT not in shown
        assert expected.startswith(shown)
    assert decoder.finish() == ""
    assert shown == expected


@relaxed
@given(data=st.data())
def test_a_long_prompts_tail_is_context_enough(paths: list[Path], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths))
    model = tokenizer(path)
    prompt = model.encode("word " * 40 + data.draw(texts).replace(REPLACEMENT, ""))
    ids = model.encode_plain(data.draw(texts))
    decoder = factory(path).make(prompt[-32:], whole_prompt=False, skip_special_tokens=True)
    if is_well_defined(model, [*prompt, *ids], True):
        assert whole(decoder, ids) == offline(model, prompt, ids, True)


def test_half_a_character_in_the_prompt(spelled: Path) -> None:
    for path in (BUNDLED, spelled):
        model = tokenizer(path)
        ids = model.encode_plain("日")
        cut = len(ids) - 1
        make = factory(path).make
        completed = make(ids[:cut], whole_prompt=False, skip_special_tokens=True)
        assert whole(completed, [*ids[cut:], *model.encode_plain("!")]).startswith("日")
        broken = make(ids[:cut], whole_prompt=False, skip_special_tokens=True)
        assert REPLACEMENT not in whole(broken, model.encode_plain("!"))


@pytest.mark.parametrize("num_bytes", [1, 2])
def test_what_stays_broken_at_the_prompt_s_end_is_the_prompt_s_and_no_more(spelled: Path, num_bytes: int) -> None:
    for path in (BUNDLED, spelled):
        model = tokenizer(path)
        first, second, third = model.encode_plain("日")[-3:]
        (plain,) = model.encode_plain("a!")[-1:]
        never = next(filter(None, map(model.tokenizer.token_to_id, ("ÿ", "<0xFF>"))))  # no character has this byte
        prompt = [plain, first, second][: 1 + num_bytes]
        for ids in ([first, plain], [never, plain], [plain, first, second, third, plain, first], [first, first, plain]):
            made = factory(path).make(prompt, whole_prompt=False, skip_special_tokens=True)
            assert whole(made, ids) == offline(model, prompt, ids, True)


def test_bytes_that_are_none_of_any_character_are_replaced_one_by_one(spelled: Path) -> None:
    ids = [tokenizer(spelled).tokenizer.token_to_id(name) for name in ("<0xF0>", "<0xFF>", "<0xFF>", "H")]
    made = factory(spelled).make([1], whole_prompt=True, skip_special_tokens=True)
    assert [*map(made.push, ids)] == ["", 2 * REPLACEMENT, REPLACEMENT, "H"]


def test_an_empty_prompt_loses_the_first_space_of_the_text(spelled: Path) -> None:
    model = tokenizer(spelled)
    pieces = [*map(model.tokenizer.token_to_id, ("▁", "▁H", "H", "▁▁"))]
    for _ in range(2):  # the second time tokens are known
        for ids in map(list, product(pieces, repeat=3)):
            text = model.tokenizer.decode([pieces[2], *ids])[1:]
            cut = factory(spelled).make([1], whole_prompt=True, skip_special_tokens=True)
            assert whole(cut, ids) == text.removeprefix(" ")
            for prompt, is_whole in (([1], False), ([1, pieces[1]], True)):
                kept = factory(spelled).make(prompt, whole_prompt=is_whole, skip_special_tokens=True)
                assert whole(kept, ids) == text


def test_ids_that_the_tokenizer_lacks_are_silent(data_dir: Path) -> None:
    decoder = factory(data_dir / "tokenizers/qwen3").make([1], whole_prompt=True, skip_special_tokens=False)
    assert whole(decoder, [151_900, -1, 1 << 40]) == ""


@relaxed
@given(data=st.data())
def test_the_window_agrees_with_the_pieces_on_text(paths: list[Path], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths))
    model = tokenizer(path)
    ids = model.encode_plain(data.draw(texts).replace(REPLACEMENT, ""))
    prompt = model.encode("Once upon a time there was a decoder that was shown many words before")
    pieces = factory(path).make(prompt, whole_prompt=True, skip_special_tokens=False)
    assert whole(WindowDecoder(model, prompt, False), ids) == whole(pieces, ids)


@pytest.mark.parametrize("decoder", [WordPiece(prefix="##"), Metaspace()])
def test_other_decoders_go_through_the_window(decoder: object) -> None:
    words = ["[UNK]", "▁un", "##aff", "##able", "hello", "▁world"]
    raw = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    raw.decoder = decoder  # type: ignore[assignment]
    model = ModelTokenizer(raw)
    made = DecoderFactory(model).make([4], whole_prompt=True, skip_special_tokens=True)
    assert isinstance(made, WindowDecoder)
    ids = [1, 2, 3, 5, 4]
    assert whole(made, ids) == offline(model, [4], ids, True)


def test_silent_tokens_leave_the_window_its_context() -> None:
    """A decoder that drops the first space of what it is given must go on seeing what came before."""
    raw = Tokenizer(WordLevel({"[UNK]": 0, "▁hello": 1, "▁world": 2, "<s>": 3}, unk_token="[UNK]"))
    raw.decoder = Metaspace()
    raw.add_special_tokens(["<s>"])
    model = ModelTokenizer(raw)
    prompt = [1] * 20
    for num_silent in (1, 3):
        ids = [*[3] * num_silent, 2, 3, 1]
        decoder = WindowDecoder(model, prompt, True)
        assert whole(decoder, ids) == offline(model, prompt, ids, True) == " world hello"


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "tokenizers/llama2"])
def test_a_stream_of_broken_bytes_takes_linear_time(data_dir: Path, name: str) -> None:
    model = tokenizer(data_dir / name)
    broken = model.encode_plain("🦙")[-2]
    for decoder in (
        factory(data_dir / name).make([1], whole_prompt=True, skip_special_tokens=True),
        WindowDecoder(model, [1], True),
    ):
        started = time.process_time()
        assert len(whole(decoder, [broken] * 5000)) > 4000
        assert time.process_time() - started < 2
