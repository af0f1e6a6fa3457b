"""Pageant beside other engines on one machine, in turns within one run: what `scripts/bench_peers` does."""
