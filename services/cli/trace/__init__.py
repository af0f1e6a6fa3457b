"""`pageant trace`: requests and steps from the services' logs.  docs/tracing.md defines the lines."""
