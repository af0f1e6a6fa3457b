"""CPU kernels whose result for one row never depends on the rows beside it.

An op without a file here is served on the CPU by its reference in `kernels.ops`.
"""
