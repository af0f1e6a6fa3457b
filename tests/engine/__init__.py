"""Tests of the model, through the runner: logits, batch invariance, loading and sampling."""
