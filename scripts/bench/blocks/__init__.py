"""Blocks that move."""
