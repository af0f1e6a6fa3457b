"""Rows that may not take every token."""
