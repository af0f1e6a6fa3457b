"""What the bench_* scripts share."""
