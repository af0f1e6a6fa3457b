"""From settings and plans to results: what computes, with how much memory, and the model runner.  Loads torch."""
