"""Frames that nobody should send, at the inbox of every service."""
