"""Grammars as automata over a vocabulary: which tokens may come next.  Knows llguidance; no requests, no torch."""
