"""Several models in one deployment: which are in memory, and the orders that change it."""
