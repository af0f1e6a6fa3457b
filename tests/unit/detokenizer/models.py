"""The real tokenizers that these tests run over, and texts that are hard for them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from services.detokenizer.decoder import DecoderFactory
from shared.messages import OpenStream, RequestHeader
from shared.text.tokenization import ModelTokenizer, load_tokenizer

BUNDLED = Path(__file__).resolve().parents[3] / "models" / "pageant-stories"

NAMES = [
    "tokenizers/qwen3",
    "tokenizers/gpt2",
    "tokenizers/llama2",
    "models/babyllama-361",
    "models/tinystories-656k",
]

SNIPPETS = [
    *("Hello", " world", " ", "  ", "\n", "\t", ".", ",", "!!", "the", "  four", "3", "42", "don't", "a", "b"),
    *("é", "e\u0301", "ñ", "Ω", "ß", "ﬁ", "한", "국", "日本語", "中", "文", "ไทย", "हिन्दी", "ខ្មែរ", "עברית", "\u200d"),
    *("😀", "🦙", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "𝔘", "\u0301", "\ufeff", "<s>", "</s>", "<|im_end|>", "▁", "<0x41>"),
]

SPELLED = ["▁", "▁▁", "▁H", "ello", "he", "▁the", "ñ", "🦙", *"Habcdehlnort.,!"]


def write_spelled(directory: Path) -> None:
    """A tokenizer as SentencePiece's are: spaces are marked, a text begins with one that its decoder takes away again,
    and what is not in its small vocabulary is spelled in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPELLED]
    vocabulary = {word: place for place, word in enumerate(dict.fromkeys([*words, *"".join(SPELLED)]))}
    merges = [("▁", "▁"), ("▁", "H"), ("h", "e"), ("▁", "the")]
    merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocabulary.keys()]
    made = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(directory / "tokenizer.json"))


texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=12).map("".join)


@cache
def tokenizer(path: Path) -> ModelTokenizer:
    return load_tokenizer(path)


@cache
def factory(path: Path) -> DecoderFactory:
    return DecoderFactory(tokenizer(path))


@st.composite
def token_ids(draw: st.DrawFn, model: ModelTokenizer) -> list[int]:
    """Tokens of texts, characters as byte tokens where the tokenizer has those, single bytes, and any token at all."""
    byte_ids = [model.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        match draw(st.integers(0, 3)):
            case 0:
                ids += model.encode_plain(draw(texts))
            case 1 if None not in byte_ids:
                ids += [byte_ids[byte] for byte in draw(st.sampled_from(SNIPPETS)).encode()]
            case 2 if None not in byte_ids:
                ids.append(byte_ids[draw(st.integers(0, 255))])
            case _:
                ids.append(draw(st.integers(0, model.vocab_size - 1)))
    return ids


def splits(length: int) -> st.SearchStrategy[list[slice]]:
    """Ways to cut a list of this length into batches."""

    def cut(points: set[int]) -> list[slice]:
        bounds = [0, *sorted(points), length]
        return [slice(a, b) for a, b in pairwise(bounds)]

    return st.sets(st.integers(0, length), max_size=10).map(cut)


def opened(
    request_id: str = "r",
    *,
    prompt: list[int] | None = None,
    stop: list[str] | None = None,
    include: bool = False,
    skip_special_tokens: bool = True,
    detokenize: bool = True,
    min_tokens: int = 0,
    gateway: str = "memory://gateway",
) -> OpenStream:
    return OpenStream(
        header=RequestHeader(request_id, gateway),
        index=0,
        num_prompt_tokens=len(prompt or [1]),
        prompt_tail=(prompt or [1])[-32:],
        stop=stop or [],
        include_stop_str_in_output=include,
        skip_special_tokens=skip_special_tokens,
        detokenize=detokenize,
        min_tokens=min_tokens,
    )
