"""Hours of many tenants, and what each service's memory does meanwhile."""
