"""The tensors of a checkpoint on their way to memory: where they come from, in which formats, and their digest."""
