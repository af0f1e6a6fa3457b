"""A made pair: a target large enough to be worth drafting for, and a draft that agrees with it at a chosen rate.

Both are checkpoints of real size and layout with random weights everywhere, so a step costs what a trained model's
does; but what the layers add to the residual stream is scaled to almost nothing.  The final hidden state is then the
direction of the last token's embedding E[v], and a head whose row s(v) is E[v] makes s(v) the most likely next token
by a wide margin: the model walks a known permutation s, one long cycle through the vocabulary.  (Random unit vectors
in d dimensions have products of about 1 / sqrt(d), so the right logit stands far above all others.)  The draft has
embeddings of its own and walks s too, except from a share 1 - rate of the tokens, chosen at random, whose successors
are exchanged among one another: along the cycle its guesses are right independently with probability `rate`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.common.models import EMBEDDING, HEAD, SCALE, shapes, write_config
from scripts.bench.common.specs import llama

SEED = 20_240
QUIET = 1e-3  # further factor of the matrices that write to the residual stream
WRITERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
PEAK = 20.0  # logit of the right token; the others' are about PEAK / sqrt(hidden size)
READY = "pair.json"  # written last

VOCAB = 32_000
TARGET = llama(1280, 3584, 24, (20, 5), VOCAB, max_position_embeddings=2048)  # 510 M parameters
DRAFT = llama(256, 512, 2, (4, 2), VOCAB, max_position_embeddings=2048)


@dataclass(frozen=True)
class MadePair:
    """Where the two checkpoints are, and what they compute."""

    directory: Path
    vocab_size: int
    rate: float

    @property
    def target(self) -> Path:
        return self.directory / "target"

    @property
    def draft(self) -> Path:
        return self.directory / "draft"

    def successors(self) -> Tensor:  # [vocab_size] int64
        """The target's most likely next token after each."""
        return one_cycle(self.vocab_size)

    def guesses(self) -> Tensor:  # [vocab_size] int64
        """The draft's."""
        return partly_exchanged(self.successors(), self.rate)


def ensure_pair(
    directory: Path, *, rate: float, target: dict[str, Any] = TARGET, draft: dict[str, Any] = DRAFT
) -> MadePair:
    """The pair in `directory`, made there where it is not; about a gigabyte with the sizes given here."""
    pair = MadePair(directory, target["vocab_size"], rate)
    made = {"rate": rate, "target": target, "draft": draft}
    ready = directory / READY
    if ready.exists() and json.loads(ready.read_text(encoding="utf-8")) == made:
        return pair
    write_checkpoint(pair.target, target, pair.successors(), SEED)
    write_checkpoint(pair.draft, draft, pair.guesses(), SEED + 1)
    ready.write_text(json.dumps(made), encoding="utf-8")
    return pair


def one_cycle(vocab_size: int) -> Tensor:  # [vocab_size] int64
    """A random permutation that visits every token before it comes back."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(SEED))
    successors = torch.empty_like(order)
    successors[order] = order.roll(-1)
    return successors


def partly_exchanged(
    successors: Tensor,  # [vocab_size] int64
    rate: float,
) -> Tensor:  # [vocab_size] int64
    """The same permutation but for a random share 1 - rate of the tokens, each of which gets another's successor."""
    size = len(successors)
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(SEED + 2))[: round(size * (1 - rate))]
    exchanged = successors.clone()
    exchanged[chosen] = successors[chosen.roll(-1)]
    return exchanged


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    successors: Tensor,  # [vocab_size] int64
    seed: int,
) -> None:
    """A Hugging Face checkpoint in bfloat16 whose greedy next token after v is successors[v]."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in shapes(config).items() if name != HEAD}
    head = torch.empty_like(tensors[EMBEDDING])
    head[successors] = tensors[EMBEDDING] * (PEAK / config["hidden_size"])
    save_file(tensors | {HEAD: head}, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, config["vocab_size"])
    write_config(directory, config)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One tensor in bfloat16; an embedding's entries are of the size that a norm would make them."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 1.0 if name == EMBEDDING else SCALE * QUIET if name.endswith(WRITERS) else SCALE
    return torch.empty(shape).normal_(0, scale, generator=generator).bfloat16()


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A word for every id: prompts come as ids, and no text is asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": false}', encoding="utf-8")
