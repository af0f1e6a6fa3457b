"""From plans to results: the model runner, its rows and its tables."""
