"""The small model that every fixture is a quantised copy of, and what is kept of a fixture.

Runs in the makers' environments: torch, safetensors and transformers, and nothing of this project.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_base(directory: Path, dtype: torch.dtype, **changes: Any) -> Path:
    """A random Llama; the same for the same arguments."""
    import transformers

    torch.manual_seed(7)
    name = str(dtype).removeprefix("torch.")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **changes, dtype=name)).to(dtype)
    model.save_pretrained(directory)
    return directory


def make_all(fixtures: Collection[str], make: Callable[[str, Path, Path], None], dtype: torch.dtype) -> None:
    """Into the folder that the command line names, or those of them that it names behind that."""
    out, names = Path(sys.argv[1]), sys.argv[2:] or fixtures
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base", dtype)
        for name in (name for name in names if name in fixtures):
            make(name, base, out)


def calibration_tokens(count: int = 8, length: int = 32) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    rows: list[list[int]] = torch.randint(3, VOCAB, (count, length), generator=generator).tolist()
    return rows


def make_tokenizer() -> Any:
    """A word for each number: packages want one beside a model."""
    import tokenizers
    import transformers

    words = {"<unk>": 0, **{f"w{index}": index for index in range(1, VOCAB)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<unk>")


def digest_of(weight: Tensor) -> str:
    """Of a tensor's bytes; zeros have no sign."""
    octets = (weight.detach() + 0.0).contiguous().view(torch.uint8)
    return hashlib.sha256(octets.numpy().tobytes()).hexdigest()


def keep(made: Path, out: Path, packages: list[str], weights: dict[str, Tensor]) -> None:
    """A fixture: the checkpoint, and digests of its weights as the package itself dequantises them."""
    if not weights:
        raise RuntimeError(f"{out.name}: the package dequantised nothing")
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(made / name, out / name)
    expected = {
        "made_by": [f"{package} {version(package)}" for package in (*packages, "torch")],
        "weights": {
            name: {"dtype": str(weight.dtype).removeprefix("torch."), "sha256": digest_of(weight)}
            for name, weight in sorted(weights.items())
        },
    }
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    print(f"{out.name}: {sum(file.stat().st_size for file in out.iterdir()) / 1e3:.0f} kB", flush=True)
