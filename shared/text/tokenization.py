"""A checkpoint's tokenizer and the configuration around it, for the tokenizer and detokenizer services.

Knows files and token ids; must never know requests, actors or torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ModelError
from shared.requests.sampling import GenerationDefaults

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # transformers' classes that ignore add_bos_token
TEMPLATE_MARKS = ("{{", "{%", "\n")
NFC_SHRINKAGE = 4  # canonical composition joins at most four code points into one


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is matched in the text before anything else."""

    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class VocabularySpec(msgspec.Struct, frozen=True):
    """How the vocabulary treats what it lacks."""

    byte_fallback: bool = False


class TokenizerSpec(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that are not the vocabulary itself; steps stay as the file has them."""

    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []
    model: VocabularySpec = VocabularySpec()


class ModelTokenizer:
    """Text <-> token ids exactly as the checkpoint's own tokenizer has it.

    `vocab_size` covers every id that the model can produce, also those that pad its output layer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int = 0,
        add_bos_token: bool | None = None,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        defaults: GenerationDefaults | None = None,
        context_length: int = 0,
        config: dict[str, Any] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.spec = msgspec.json.decode(tokenizer.to_str(), type=TokenizerSpec)
        vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        # By id, not by text: for a special token that is normalized, the tokenizer's own skipping misses its text.
        self.special_ids = frozenset(token.id for token in self.spec.added_tokens if token.special)
        self.vocab_size = max(vocab_size, 1 + max(vocab.values(), default=0))
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.tool_template = tool_template  # where chats with tools have one of their own
        self.defaults = defaults or GenerationDefaults()
        self.context_length = context_length
        self._config = config or {}
        self.max_chars_per_token = _max_chars_per_token(self.spec, vocab)
        self._add_bos_token = add_bos_token
        self._bos_token_id: int | None = tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))

    @property
    def description(self) -> str:
        """The checkpoint's configuration of its tokenizer as JSON, with the chat template that is used."""
        described = {"tokenizer_class": type(self.tokenizer).__name__} | self._config
        described["chat_template"] = self.chat_template
        return json.dumps(described)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects around it."""
        return self.with_bos(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids of a prompt that was encoded with special tokens, and the one for its begin where it lacks it."""
        bos = self._bos_token_id
        # Checkpoints disagree on what adds bos: the tokenizer's own post-processor, or its configuration.
        if self._add_bos_token and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in the middle of a sequence, or of a rendered chat: no special tokens are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special_ids]
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def load_tokenizer(model_dir: Path, chat_template: str = "") -> ModelTokenizer:
    """Read a checkpoint's tokenizer; `chat_template`: a file that is used in place of its own, or the template itself.

    Raises ModelError naming the file that is absent or unusable.
    """
    from tokenizers import Tokenizer  # workers without grammars do without the library

    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{model_dir} has no tokenizer.json, the only tokenizer format served; "
            "convert the tokenizer with transformers' save_pretrained and put the file beside the weights"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for whatever its parser meets
        raise ModelError(f"{path} cannot be read: {error}") from error
    config = _read_json(model_dir / "tokenizer_config.json")
    model = _read_json(model_dir / "config.json")
    text_model = model | _dict(model.get("text_config"))
    special = _special_tokens(_read_json(model_dir / "special_tokens_map.json")) | _special_tokens(config)
    is_generic = config.get("tokenizer_class") in GENERIC
    add_bos_token = None if is_generic else config.get("add_bos_token")
    return ModelTokenizer(
        tokenizer,
        vocab_size=_int(text_model.get("vocab_size")),
        add_bos_token=add_bos_token if isinstance(add_bos_token, bool) else None,
        special_tokens=special,
        chat_template=_given_template(chat_template) if chat_template else _chat_template(model_dir, config),
        tool_template=None if chat_template else _named_templates(config).get("tool_use"),
        defaults=_defaults(model_dir, text_model, tokenizer.token_to_id(special.get("eos_token", ""))),
        context_length=_int(text_model.get("max_position_embeddings")),
        config=config,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, each given as its text or as an object around it."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _chat_template(model_dir: Path, config: dict[str, Any]) -> str | None:
    """A file of its own wins over the configuration's, as where both exist the file is the newer way."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return _read_template(path)
    template = config.get("chat_template")
    if named := _named_templates(config):
        template = named.get("default", next(iter(named.values())))
    return template if isinstance(template, str) and template else None


def _given_template(given: str) -> str:
    """Of a setting, which may have the template in it: no file is called as one."""
    return given if any(mark in given for mark in TEMPLATE_MARKS) else _read_template(Path(given))


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _named_templates(config: dict[str, Any]) -> dict[str, Any]:
    """The templates of a configuration that has several, by name."""
    templates = config.get("chat_template")
    if not isinstance(templates, list):
        return {}
    return {entry["name"]: entry["template"] for entry in map(_dict, templates) if {"name", "template"} <= set(entry)}


def _defaults(model_dir: Path, model: dict[str, Any], eos_of_tokenizer: int | None) -> GenerationDefaults:
    path = model_dir / "generation_config.json"
    generation = _read_json(path)
    eos = _ids(generation.get("eos_token_id"), path) or _ids(model.get("eos_token_id"), model_dir / "config.json")
    if eos_of_tokenizer is not None and eos_of_tokenizer not in eos:
        eos.append(eos_of_tokenizer)
    top_k = _number(generation, "top_k", path)
    return GenerationDefaults(
        temperature=_number(generation, "temperature", path),
        top_k=None if top_k is None else int(top_k),
        top_p=_number(generation, "top_p", path),
        min_p=_number(generation, "min_p", path),
        repetition_penalty=_number(generation, "repetition_penalty", path),
        eos_token_ids=eos,
    )


def _ids(value: Any, path: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return list(dict.fromkeys(ids))


def _number(config: dict[str, Any], key: str, path: Path) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{path}: {key} must be a number, got {value!r}")
    return float(value)


def _int(value: Any) -> int:
    return value if type(value) is int else 0


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _max_chars_per_token(spec: TokenizerSpec, vocab: dict[str, int]) -> int | None:
    """How many characters of text one token can stand for at most; None where text can vanish without bound.

    It lets a hopelessly long prompt be refused before the work of tokenizing it.
    """
    shrinkage = _shrinkage(spec.normalizer)
    swallows = any(token.lstrip or token.rstrip for token in spec.added_tokens)
    is_byte_level = spec.decoder is not None and spec.decoder["type"] == "ByteLevel"
    covers_all = is_byte_level or (spec.model.byte_fallback and "<0x00>" in vocab)
    if shrinkage is None or swallows or not covers_all:
        return None
    return shrinkage * max(map(len, vocab), default=1)


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """By which factor a normalizer can shorten text at most; None where that is unknown."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _shrinkage(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "NFC":
        return NFC_SHRINKAGE
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(normalizer["content"]) >= len(pattern) else None
    return 1 if kind in ("Prepend", "NFD") else None
