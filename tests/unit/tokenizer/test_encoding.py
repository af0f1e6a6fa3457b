"""Loading checkpoints' tokenizers, and the ids that they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.text.tokenization import load_tokenizer
from tests.unit.detokenizer.models import BUNDLED, tokenizer


def copy(model: Path, tmp_path: Path, **config: Any) -> Path:
    """A checkpoint with this one's tokenizer and a configuration of its own."""
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("vocabulary", "name"), [("gpt-2", "gpt2"), ("qwen2", "qwen3"), ("llama-spm", "llama2")])
def test_ids_are_those_of_other_implementations(data_dir: Path, vocabulary: str, name: str) -> None:
    model = tokenizer(data_dir / "tokenizers" / name)
    inputs = (data_dir / f"tokenizers/{vocabulary}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    outputs = (data_dir / f"tokenizers/{vocabulary}.out").read_text(encoding="utf-8").split("\n")
    expected = [[int(token_id) for token_id in line.split()] for line in outputs]
    same = [model.encode_plain(text) == ids for text, ids in zip(inputs, expected, strict=False)]
    assert len(same) >= 44
    assert all(same), [text for text, ok in zip(inputs, same, strict=True) if not ok]


def test_the_greedy_prompts_of_the_models(data_dir: Path) -> None:
    for name in ("babyllama-361", "tinystories-656k"):
        path = data_dir / "models" / name
        expected = json.loads((path / "expected_greedy.json").read_text())
        assert tokenizer(path).encode(expected["prompt"]) == expected["prompt_ids"]


def test_bos_is_added_exactly_once(data_dir: Path, tmp_path: Path) -> None:
    llama = tokenizer(data_dir / "tokenizers/llama2")
    assert llama.encode("Hello") == [1, 15043]
    assert llama.encode_plain("Hello") == [15043]
    gpt2 = load_tokenizer(
        copy(data_dir / "tokenizers/gpt2", tmp_path, add_bos_token=True, bos_token={"content": "<|endoftext|>"})
    )
    assert gpt2.encode("Hello") == [50256, 15496]
    (tmp_path / "generic").mkdir()
    generic = copy(
        data_dir / "tokenizers/gpt2", tmp_path / "generic", add_bos_token=True, bos_token="<|endoftext|>",
        tokenizer_class="PreTrainedTokenizerFast",
    )  # fmt: skip
    assert load_tokenizer(generic).encode("Hello") == [15496], "as transformers' generic class has it"
    assert tokenizer(data_dir / "tokenizers/gpt2").encode("Hello") == [15496]


def test_end_tokens_and_defaults(tmp_path: Path) -> None:
    path = copy(BUNDLED, tmp_path, eos_token="<|endoftext|>")
    (path / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "vocab_size": 50304, "max_position_embeddings": 64})
    )
    model = load_tokenizer(path)
    assert model.defaults.eos_token_ids == [7, 0]
    assert (model.vocab_size, model.context_length) == (50304, 64)
    generation = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (path / "generation_config.json").write_text(json.dumps(generation))
    defaults = load_tokenizer(path).defaults
    assert defaults.eos_token_ids == [5, 6, 0]
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p) == (0.6, 20, 0.95, None)


@pytest.mark.parametrize("content", ["[]", "{", '{"temperature": "hot"}', '{"eos_token_id": "2"}', '{"top_k": true}'])
def test_bad_configuration_is_named(tmp_path: Path, content: str) -> None:
    path = copy(BUNDLED, tmp_path)
    (path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_tokenizer(path)


def test_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_where_chat_templates_are_found(tmp_path: Path) -> None:
    assert load_tokenizer(copy(BUNDLED, tmp_path)).chat_template is None
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    path = copy(BUNDLED, tmp_path, chat_template=named)
    assert load_tokenizer(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(path).chat_template == "F"
    (tmp_path / "mine").write_text("M")
    assert load_tokenizer(path, str(tmp_path / "mine")).chat_template == "M"
    assert load_tokenizer(path, "{{ messages }}").chat_template == "{{ messages }}"
    with pytest.raises(ModelError, match=r"absent\.jinja cannot be read"):
        load_tokenizer(path, "absent.jinja")


def test_how_many_characters_a_token_can_be(data_dir: Path) -> None:
    assert tokenizer(data_dir / "tokenizers/qwen3").max_chars_per_token == 4 * 128
    assert tokenizer(data_dir / "tokenizers/gpt2").max_chars_per_token == 128
    # Without byte tokens, unknown characters fuse into one token, however many they are.
    assert tokenizer(data_dir / "models/tinystories-656k").max_chars_per_token is None
