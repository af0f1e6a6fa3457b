"""One step: which sequences compute how many tokens, in which blocks."""
