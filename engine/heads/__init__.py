"""Draft heads: layers that ship with a model, read what it computed of each token, and draft what follows."""
