"""Parts of the documents that are written from code and from real runs."""
