"""One generation from its admission to its last word, for every front."""
