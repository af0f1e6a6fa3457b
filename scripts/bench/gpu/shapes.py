"""The model that is measured, and the least bytes and operations that its steps can take."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.common.models import llama, write_config

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
    def read_weights(self) -> int:
        """Parameters that every step reads: all but the embedding, of which it takes single rows."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden * heads + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.num_layers * layer + self.vocab_size * self.hidden + self.hidden

    @property
    def weight_bytes(self) -> int:
        return 2 * self.read_weights

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def decode_bytes(self, num_seqs: int, context: int) -> int:
        """Weights once, and each sequence's keys and values."""
        return self.weight_bytes + num_seqs * context * self.kv_bytes_per_token

    def prefill_operations(self, num_tokens: int) -> int:
        """Of the matrices for each token, the head for one, and attention over half of all pairs."""
        matrices = 2 * (self.read_weights - self.vocab_size * self.hidden) * num_tokens
        attention = 2 * 2 * self.num_layers * self.num_heads * self.head_dim * num_tokens * num_tokens // 2
        return matrices + attention + 2 * self.vocab_size * self.hidden

    def attention_bytes(self, num_seqs: int, context: int) -> int:
        """Keys and values of one layer."""
        return num_seqs * context * self.kv_bytes_per_token // self.num_layers

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
