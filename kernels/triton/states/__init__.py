"""Layers that keep a state of fixed size in place of a cache."""
