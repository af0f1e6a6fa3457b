"""From settings to a runner: which kernels compute, what memory there is, graphs, and the fingerprint of it all."""
