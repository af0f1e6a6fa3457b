"""Other systems that keep blocks behind a store, one module for each.  A store imports only the one that its settings
name, so that none of their packages is needed otherwise.
"""
