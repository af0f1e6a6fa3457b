"""Compute kernels: `ops` says what each op means, providers (`cpu`, `triton`) make it fast, `provider` picks one."""
