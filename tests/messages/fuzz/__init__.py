"""Frames that no service would send, at the inbox of every service."""
