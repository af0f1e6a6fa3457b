"""Ranks that join their leader over TCP, from this host or another: `python -m services.worker.hosts ADDRESS [RANK]`.

Whatever starts these processes (Compose, Kubernetes, `pageant rank`) needs to know the leader's address alone.
"""
