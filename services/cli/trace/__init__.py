"""What the services' logs tell of requests: `pageant trace`.  docs/tracing.md defines the lines."""
