"""The formats in which models write reasoning and calls of tools, a module each."""
