"""Which processes belong to the deployment, and the scheduler's own lives."""
