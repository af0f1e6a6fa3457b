"""Compute kernels: `ops` says what each op means, the providers (`cpu`, `triton`) make it fast, `provider` picks one."""
