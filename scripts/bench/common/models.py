"""Checkpoints of real layout with random weights, in Hugging Face's format; two of them are made for `bench_peers`:

S   134.5 M parameters, hidden 576, 30 layers, 9 / 3 heads, vocabulary 49,152, tied
M   348.7 M parameters, hidden 1,024, 24 layers, 16 / 8 heads, vocabulary 32,000
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

SEED = 1234
GROUP = 64  # input features of a scale of int4, as the settings have it
SCALE = 0.02  # standard deviation of the weights
FEW_TOKENS = 8000  # that the tokenizer learns; the rest of the vocabulary is padding
SPECIAL = ["<|endoftext|>", "<s>", "</s>"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def llama(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab_size: int, **own: Any) -> dict[str, Any]:
    """A config.json; `heads`: of queries, and of keys and values.  `own` fields override the others."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "head_dim": 64,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab_size,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return fields | own


SPECS: dict[str, dict[str, Any]] = {
    "S": llama(576, 1536, 30, (9, 3), 49152, tie_word_embeddings=True, rope_theta=100_000.0),
    "M": llama(1024, 2816, 24, (16, 8), 32000),
}


def ensure(directory: Path, name: str) -> None:
    """Make S or M in the folder where it is not complete yet; the configuration is written last."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, SPECS[name])
    _write_tokenizer(directory, SPECS[name]["vocab_size"])
    write_config(directory, SPECS[name])


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape."""
    from engine.description.reading import parse_config, tensors_of

    return tensors_of(parse_config(config)).shapes()


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """model.safetensors: normal matrices and norms of one, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, SCALE, generator=generator)
        for name, shape in shapes(config).items()
    }
    content = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})


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
    """Of all tensors of S or M in bfloat16, or with quantised matrices: what a worker holds of them."""
    return sum(_tensor_bytes(name, quantization).values())


def streamed_bytes(name: str, *, quantization: str = "none") -> int:
    """Of the tensors that every token reads whole: all but an embedding that is not the head too."""
    sizes = _tensor_bytes(name, quantization)
    return sum(sizes.values()) - (sizes[EMBEDDING] if HEAD in sizes else 0)


def _tensor_bytes(name: str, quantization: str) -> dict[str, int]:
    """An int4 matrix has a scale of two bytes for each 64 input features; heads are in int8 then."""
    return {
        tensor: shape[0] * (_row_bytes(tensor, shape[1], quantization) if len(shape) == 2 else 2)
        for tensor, shape in shapes(SPECS[name]).items()
    }


def _row_bytes(tensor: str, width: int, quantization: str) -> int:
    if quantization == "none":
        return 2 * width
    if quantization == "int8" or tensor in (EMBEDDING, HEAD):
        return width
    return width // 2 + 2 * -(-width // GROUP)
