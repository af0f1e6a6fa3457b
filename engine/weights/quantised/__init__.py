"""Quantised checkpoints: what their configuration says, which tensors a matrix is stored as, and its neutral form.

A file for each format.  What a file says of a checkpoint needs no torch: it is checked before processes start.  Only
`read`, which makes the neutral form (kernels.ops.linears.codes), imports it.
"""
