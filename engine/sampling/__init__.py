"""Logits into tokens: processing, truncation, drawing, the verification of drafts, log-probabilities."""
