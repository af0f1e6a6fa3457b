"""The two models of the comparison: random weights in Hugging Face's format, made where they are missing.

S   134.5 M parameters, hidden 576, 30 layers, 9 / 3 heads, vocabulary 49,152, tied
M   348.7 M parameters, hidden 1,024, 24 layers, 16 / 8 heads, vocabulary 32,000
"""

from __future__ import annotations

import json
import struct
import sysconfig
from pathlib import Path
from typing import Any

SEED = 1234
SCALE = 0.02  # standard deviation of the weights
FEW_TOKENS = 8000  # that the tokenizer learns; the rest of the vocabulary is padding
SPECIAL = ["<|endoftext|>", "<s>", "</s>"]

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECS: dict[str, dict[str, Any]] = {
    "S": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
        "rope_theta": 100_000.0,
    },
    "M": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 2816,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
    },
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def ensure(directory: Path, name: str) -> None:
    """Make the model's folder where it is not complete yet; the configuration is written last."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = COMMON | SPECS[name]
    _write_weights(directory / "model.safetensors", config)
    _write_tokenizer(directory, config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    return found if config["tie_word_embeddings"] else found | {HEAD: found[EMBEDDING]}


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, SCALE, generator=generator)
        for name, shape in shapes(config).items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


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


def vocab_size(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


def weight_bytes(directory: Path, *, halved: bool = False) -> int:
    """Of all tensors, as the checkpoint has them, or with the matrices in half as many bytes."""
    return sum(_tensor_bytes(directory, halved).values())


def streamed_bytes(directory: Path, *, halved: bool = False) -> int:
    """Of the tensors that every token reads whole: all but an embedding that is not the head too."""
    sizes = _tensor_bytes(directory, halved)
    return sum(sizes.values()) - (sizes[EMBEDDING] if HEAD in sizes else 0)


def _tensor_bytes(directory: Path, halved: bool) -> dict[str, int]:
    """Every tensor's size, from the header of the weights' file."""
    with (directory / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in tensors.items()}
    return {name: size // 2 if halved and len(tensors[name]["shape"]) == 2 else size for name, size in sizes.items()}
