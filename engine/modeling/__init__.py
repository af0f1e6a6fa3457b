"""Decoders that execute a description, in torch and in native code, and the physical KV pool."""
