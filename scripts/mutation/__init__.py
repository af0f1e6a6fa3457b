"""Mutation testing: which small faults a folder's own tests notice (`scripts/mutate`)."""
