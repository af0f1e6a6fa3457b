"""Blocks that move: orders, the threads that carry bytes, and what others may read."""
