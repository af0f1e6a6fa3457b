"""Tokens to text, stream by stream, with stop strings."""
