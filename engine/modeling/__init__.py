"""Models, weights, the physical KV pool and sampling.  Torch lives here; only the worker imports it."""
