"""Kernels and what surrounds them."""
