"""What a model is, as data: dimensions, layers and the names of its tensors, read from a checkpoint's config.json.

Nothing here computes.  `engine.modeling` executes a description in torch and in native code.
"""
