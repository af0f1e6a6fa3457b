"""Forks services that have imported already what takes long: `python -m services.fork_server SOCKET IMPORTS`.

Two seconds of processor time, most of what a worker needs until it is ready, are the import of torch; half of what
another service needs is what all import.  This process imports its modules once, and forks a service whenever its
supervisor asks (`services/cli/supervision/forking.py`).  It computes nothing and starts no thread.  Services share its
memory until they write.

A service that was forked is its supervisor's own child, as one that was started: it has two forks between it and this
process, and when the one in the middle ends, the kernel gives it to the supervisor, which is its subreaper.  So this
process may die, and no service does.
"""

# By name: a command line that named the worker's module would be taken for a worker's.
IMPORTS = {"common": "shared.actor", "torch": "services.worker.main"}
