"""bench_tracing: whether a request's time is booked where it went, and what it costs to know."""
