"""One folder, one process."""
