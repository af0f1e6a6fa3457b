"""Drafts: their links, what they propose, and what a worker's steps do with it."""
