"""A process, its descriptors, its standard streams, its memory, its log lines and its end."""
