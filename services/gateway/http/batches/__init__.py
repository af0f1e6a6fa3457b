"""/v1/batches: files of requests that are computed where nothing else is asked for."""
