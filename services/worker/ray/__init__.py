"""Ranks that Ray places (`executor=ray`): `python -m services.worker.ray`, one process for each worker group.

Ray finds the places, starts an actor at each, and says when one is gone.  Nothing else passes there: an actor starts a
process of ours, which joins the bus and its group over TCP as on any other host.  That process of ours is a Ray driver,
and ends with its group; what happens to Ray happens to it, never to `pageant serve`.
"""
