"""Blocks of the KV cache: which are free, which are named, which were evicted; and the core's clock."""
