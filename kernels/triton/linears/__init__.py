"""Linears in the formats of `kernels.ops.linears`."""
