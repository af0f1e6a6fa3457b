"""The store: keeps the keys and values of full blocks by name, while workers and schedulers come and go.

Nothing depends on it: what it does not have is computed.
"""
