"""A recording of a worker that is killed in mid-stream, played for README."""
