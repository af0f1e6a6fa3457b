"""What quantised weights and KV caches cost in perplexity, beside the bits that they take.

    scripts/bench_quality MODEL TEXT [MODEL TEXT ...] [--tokens 16384] [--kernels native|torch] [--check]

MODEL is a checkpoint directory, TEXT a file of the language that it knows.  The text's tokens are cut into pieces as
long as the model reads, and each token but a piece's first is scored.  All is computed in float32 with a float32
cache, so that only the weights differ, or else only the cache.  int4 is compared with its own weights as float32 too:
what is between them is the price of activations in 8 bits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.loading.load import LoadedModel, load_model
from engine.modeling.batch import StepBatch
from kernels.ops.linears.codes import quantise_to_codes
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.quality.quality_floats import BITS, rewrite, write_floats
from shared.config import Settings

BLOCK_SIZE = 16
GROUPS = (32, 64, 128)
CACHES = ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
OWN_TARGET = 0.5  # percent between int4 and its own weights in float32


@dataclass(frozen=True)
class Format:
    name: str
    settings: dict[str, object]
    bits: float | None = None  # of a weight of the layers, scales included; None: as the checkpoint has them


def formats() -> list[Format]:
    """In int8 a scale of each row is too little to count."""
    int4 = [
        Format(f"int4, groups of {group}", {"quantization": "int4", "quantization_group": group}, 4 + 16 / group)
        for group in GROUPS
    ]
    heads = [
        Format(f"{one.name}, head as it was", one.settings | {"quantization_head": "none"}, one.bits) for one in int4
    ]
    caches = [Format(f"KV cache in {one}", {"kv_cache_dtype": one}) for one in CACHES]
    return [Format("none", {}), Format("int8", {"quantization": "int8"}, 8), *int4, *heads, *caches]


def perplexity(loaded: LoadedModel, tokens: list[int]) -> float:
    """Of all tokens that have another before them in their piece."""
    length = loaded.plan.max_model_len
    blocks = np.arange(length // BLOCK_SIZE)[None]
    total, count = 0.0, 0
    for begin in range(0, len(tokens) - length + 1, length):
        piece = torch.tensor([tokens[begin : begin + length]])
        every = np.array([length])
        batch = StepBatch(np.array([0]), np.array([0]), every, every, piece, blocks, BLOCK_SIZE)
        logits = loaded.model.logits(loaded.model.forward(batch)[:-1])
        scored: Tensor = torch.log_softmax(logits.double(), dim=-1).gather(1, piece[0, 1:, None])
        total, count = total - float(scored.sum()), count + length - 1
    return math.exp(total / count)


def load(directory: Path, kernels: str, changes: dict[str, object]) -> LoadedModel:
    exact: dict[str, object] = {"dtype": "float32", "kv_cache_dtype": "float32"}
    config = Settings.of(model=str(directory), kernels=kernels, **exact | changes)
    longest = load_model(config.replace(num_blocks=1 << 16, block_size=BLOCK_SIZE)).plan.max_model_len
    length = min(longest, 512) // BLOCK_SIZE * BLOCK_SIZE
    return load_model(
        config.replace(
            num_blocks=length // BLOCK_SIZE, block_size=BLOCK_SIZE, max_model_len=length, max_num_batched_tokens=length
        )
    )


def measure(directory: Path, text: Path, kernels: str, num_tokens: int) -> Iterator[Result]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with text.open(encoding="utf-8") as file:
        tokens = tokenizer.encode(file.read(8 * num_tokens), add_special_tokens=False).ids[:num_tokens]
    found: dict[str, float] = {}
    for one in formats():
        value = found[one.name] = perplexity(load(directory, kernels, one.settings), tokens)
        note = f"{value / found['none'] - 1:+.2%}" + (f", {one.bits:.3f} bits per weight" if one.bits else "")
        yield Result(f"{directory.name}, {one.name}", value, "perplexity", note=note)
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as target:
            rewrite(directory, Path(target), lambda name, one: {name: quantise_to_codes(one, group).dequantised()})  # noqa: B023
            own = perplexity(load(Path(target), kernels, {}), tokens)
        apart = 100 * abs(found[f"int4, groups of {group}, head as it was"] / own - 1)
        what = f"{directory.name}, int4 in groups of {group} from its own weights in float32"
        yield Result(what, apart, "%", at_most=OWN_TARGET, note=f"perplexity {own:.4f}")
    for kind, bits in BITS.items():
        value, own = (_of_floats(directory, kind, kernels, tokens, stored=stored) for stored in (True, False))
        note = f"{value / found['none'] - 1:+.2%}, {bits:.3f} bits per weight"
        yield Result(f"{directory.name}, {kind}", value, "perplexity", note=note)
        what = f"{directory.name}, {kind} from its own weights in float32"
        yield Result(what, 100 * abs(value / own - 1), "%", at_most=OWN_TARGET)


def _of_floats(directory: Path, kind: str, kernels: str, tokens: list[int], *, stored: bool) -> float:
    with tempfile.TemporaryDirectory() as target:
        write_floats(directory, Path(target), kind, stored=stored)
        return perplexity(load(Path(target), kernels, {}), tokens)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("pairs", nargs="+", type=Path, metavar="MODEL TEXT")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--kernels", choices=["native", "torch"], default="native")
    args = parser.parse_args()
    if len(args.pairs) % 2:
        parser.error("each model needs a text")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    lines = [
        line
        for directory, text in zip(args.pairs[::2], args.pairs[1::2], strict=True)
        for line in measure(directory, text, args.kernels, args.tokens)
    ]
    return finish(lines, check=args.check, title="perplexity of quantised weights")
