"""The rows' tokens, blocks and states, and the fence around blocks."""
