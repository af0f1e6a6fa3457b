"""Attention over the paged KV cache, and what is written there."""
