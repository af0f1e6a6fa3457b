"""The worker: weights, the physical KV pool, forward passes and sampling."""
