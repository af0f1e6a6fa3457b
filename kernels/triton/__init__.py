"""Triton kernels.  There are none yet: on a GPU the torch reference in `kernels.ops` serves every op."""
