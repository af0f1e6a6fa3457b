"""Mixtures of experts: routing, and the sum of what experts make of a row."""
