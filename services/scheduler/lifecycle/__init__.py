"""A request from its admission to its end: assignment, results, outputs, parking."""
