"""Plans: which may run, in what order, and where they are executed."""
