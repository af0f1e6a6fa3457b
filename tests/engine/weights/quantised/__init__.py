"""Quantised checkpoints: what each format is read as."""
