"""The scheduler: the one service that holds hard state.

It owns requests, queues, block pools, block tables and the roster.  Everything but `actor` and `main` is the pure
core: plain data, no sockets, no clock, no torch.
"""
