"""Times and numbers that compare between processes."""
