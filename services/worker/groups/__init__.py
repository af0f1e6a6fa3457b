"""The processes of a worker: ranks, stages, and the sockets between them."""
