"""The model that is measured."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.common.models import write_config
from scripts.bench.common.specs import llama
from services.simulator.hardware import DecoderShape
from shared.metrics import ModelWork

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "models" / "pageant-stories"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class GpuModelShape:
    """A decoder in bfloat16."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int

    @property
    def work(self) -> ModelWork:
        """What its tokens cost, as the simulator counts it."""
        return DecoderShape(
            self.hidden, self.inner, self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.vocab_size
        ).work()

    def write(self, directory: Path) -> Path:
        """As a model directory without weights, with a tokenizer of a smaller vocabulary."""
        write_config(
            directory,
            llama(
                self.hidden, self.inner, self.num_layers, (self.num_heads, self.num_kv_heads), self.vocab_size,
                head_dim=self.head_dim, max_position_embeddings=self.max_position_embeddings, rope_theta=500_000.0,
                bos_token_id=0, eos_token_id=0,
            ),
        )  # fmt: skip
        for name in TOKENIZER_FILES:
            shutil.copy(TOKENIZER / name, directory / name)
        return directory


LLAMA_3_8B = GpuModelShape(4096, 14336, 32, 32, 8, 128, 128256, 16384)
TINY = GpuModelShape(64, 96, 2, 4, 2, 16, 300, 256)  # what tests go through
