"""The model that is measured."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.bench.common.models import write_config
from scripts.bench.common.specs import llama
from services.simulator.hardware import DecoderShape

ROOT = Path(__file__).resolve().parents[3]
TOKENIZER = ROOT / "models" / "pageant-stories"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class GpuModelShape(DecoderShape, frozen=True):
    """A decoder in bfloat16."""

    max_position_embeddings: int

    def write(self, directory: Path) -> Path:
        """As a model directory without weights, with a tokenizer of a smaller vocabulary."""
        heads = self.num_attention_heads, self.num_key_value_heads
        config = llama(
            self.hidden_size, self.intermediate_size, self.num_hidden_layers, heads, self.vocab_size,
            head_dim=self.head_dim, max_position_embeddings=self.max_position_embeddings, rope_theta=500_000.0,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        write_config(directory, config)
        for name in TOKENIZER_FILES:
            shutil.copy(TOKENIZER / name, directory / name)
        return directory


LLAMA_3_8B = GpuModelShape(4096, 14336, 32, 32, 8, 128, 128256, 16384)
TINY = GpuModelShape(64, 96, 2, 4, 2, 16, 300, 256)  # what tests go through
