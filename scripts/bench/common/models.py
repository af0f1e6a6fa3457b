"""Checkpoints of real layout with random weights, in Hugging Face's format, of what specs.py describes."""

from __future__ import annotations

import json
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench.common.specs import SPECS

if TYPE_CHECKING:
    from engine.description.names import Part, TensorMap

SEED = 1234
GROUP = 64  # input features of a scale of int4, as the settings have it
SCALE = 0.02  # standard deviation of the weights
FEW_TOKENS = 8000  # that the tokenizer learns; the rest of the vocabulary is padding
SPECIAL = ["<|endoftext|>", "<s>", "</s>"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def ensure(directory: Path, name: str) -> None:
    """Make a model in the folder where it is not complete yet; the configuration is written last."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, SPECS[name])
    _write_tokenizer(directory, SPECS[name]["vocab_size"])
    write_config(directory, SPECS[name])


@contextmanager
def kept(models: Path | None, name: str) -> Iterator[Path]:
    """A model's folder among the others in `models`; where there are none, one that is made for the block alone."""
    with tempfile.TemporaryDirectory() if models is None else nullcontext(models) as folder:
        ensure(directory := Path(folder) / name, name)
        yield directory


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape."""
    return _tensors(config).shapes()


def _tensors(config: dict[str, Any]) -> TensorMap:
    from engine.description.reading import parse_config, tensors_of

    return tensors_of(parse_config(config))


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """model.safetensors, in bfloat16: norms of one, and everything else normal."""
    import torch
    from safetensors.torch import save_file

    tensors, generator = _tensors(config), torch.Generator().manual_seed(SEED)
    norms = _norms(tensors)

    def made(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name in norms:
            return torch.full(shape, norms[name], dtype=torch.bfloat16)
        return torch.empty(shape).normal_(0, SCALE, generator=generator).bfloat16()

    content = {name: made(name, shape) for name, shape in tensors.shapes().items()}
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})


def _norms(tensors: TensorMap) -> dict[str, float]:
    """The weights of norms by name, and as what a norm of one is stored."""
    found: dict[str, float] = {}
    for slots in (tensors.norm, *tensors.layers):
        for slot, parts in slots.items():
            if slot == "norm" or slot.endswith("_norm"):
                found |= {part.name: 0.0 if part.plus_one else 1.0 for part in parts}
    return found


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Byte-level BPE learned from the standard library's sources, padded to the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=FEW_TOKENS, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    tokenizer.add_tokens([f"<|pad_{index}|>" for index in range(vocab_size - tokenizer.get_vocab_size())])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def weight_bytes(name: str, *, quantization: str = "none") -> int:
    """Of all tensors of a model in bfloat16, or with quantised matrices: what a worker holds of them."""
    return sum(_tensor_bytes(tensor, shape, quantization) for tensor, shape in shapes(SPECS[name]).items())


def streamed_bytes(name: str, *, quantization: str = "none") -> int:
    """Of what a token alone reads: all but embeddings that are not the head too, and experts that it does not take."""
    from engine.description.reading import parse_config, tensors_of

    spec = parse_config(SPECS[name])
    tensors = tensors_of(spec)

    def read(part: Part) -> int:
        return _tensor_bytes(part.name, part.shape if part.expert is None else part.shape[1:], quantization)

    head = tensors.embedding if tensors.head is None else tensors.head
    total = read(head) + sum(read(part) for parts in tensors.norm.values() for part in parts)
    for layer, slots in zip(spec.layers, tensors.layers, strict=True):
        experts = layer.mlp.experts
        for slot, parts in slots.items():
            wanted = list({(part.name, part.expert): part for part in parts}.values())
            share = experts.top_k / experts.count if experts is not None and slot.startswith("experts_") else 1
            total += int(share * sum(map(read, wanted)))
    return total


def _tensor_bytes(name: str, shape: tuple[int, ...], quantization: str) -> int:
    """Vectors stay as they are.  An int4 matrix has a scale of two bytes for each 64 input features, heads are int8."""
    if quantization == "none" or len(shape) == 1:
        return 2 * prod(shape)
    if quantization == "int8" or name in (EMBEDDING, HEAD):
        return prod(shape)
    return prod(shape[:-1]) * (shape[-1] // 2 + 2 * -(-shape[-1] // GROUP))
