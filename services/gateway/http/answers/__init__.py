"""What the answers of several endpoints have in common: objects, events, log-probabilities."""
