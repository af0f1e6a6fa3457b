"""The way of blocks' bytes from process to process, beside the bus: a store listens, workers connect.

It knows names, sizes and checksums, and nothing of what is in a block.
"""
