"""A checkpoint's tokenizer, and what decides about text."""
