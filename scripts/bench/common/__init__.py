"""What several benches need: deployments, clients, checkpoints, turns, what the host takes, and the last table."""
