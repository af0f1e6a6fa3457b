"""One file per engine: `load(options)` returns something that `host.py` can drive.

A peer's file imports nothing of ours, because it runs in that peer's own environment.
"""
