"""What computes: models from checkpoints, and their steps.  Of the services, worker and draft alone import it."""
