"""Attention by libraries that others tune for one vendor's cards, FlashInfer and FlashAttention 3: where asked for."""
