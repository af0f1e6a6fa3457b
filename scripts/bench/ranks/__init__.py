"""Groups and pipelines."""
