"""How much of a device was used: arithmetic and memory traffic of a decoder-only model, as shares of the peak."""

from __future__ import annotations

import msgspec


class ModelWork(msgspec.Struct, frozen=True):
    """What a model's tokens cost.

    num_matrix_params: parameters of all linear layers of the decoder, each used once per token, without embedding and
    head.  num_head_params: the head's, used once per sampled token.  num_query_features: layers x query heads x head
    size; a query meets a key in 4 floating point operations per feature: 2 for the score, 2 for the mix.
    """

    num_matrix_params: int
    num_head_params: int
    num_query_features: int
    kv_bytes_per_token: int
    bytes_per_param: float = 2.0

    def flops(self, num_tokens: int, num_samples: int, num_pairs: int) -> float:
        """Of a step: tokens computed, samples taken, (query, key) pairs that attention met."""
        linear = self.num_matrix_params * num_tokens + self.num_head_params * num_samples
        return 2.0 * linear + 4.0 * self.num_query_features * num_pairs

    @property
    def weight_bytes(self) -> float:
        """Read once by every step that samples, whatever its number of tokens."""
        return self.bytes_per_param * (self.num_matrix_params + self.num_head_params)

    def bytes_moved(self, num_tokens: int, num_context: int) -> float:
        """Of a step: the weights, the keys and values of `num_context` tokens read, those of new tokens written."""
        return self.weight_bytes + self.kv_bytes_per_token * (num_context + num_tokens)


def utilisation(done: float, seconds: float, peak: float) -> float:
    """MFU (floating point operations) or MBU (bytes): what was done over what `peak` per second allows."""
    return done / (seconds * peak) if seconds > 0 and peak > 0 else 0.0
